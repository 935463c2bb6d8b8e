"""A fit that stands in where none was measured: `rayvec bench model` on simulated nodes of two cores, 2026-11-22."""

from __future__ import annotations

from rayvec.bench.cost_model.model import Costs, Fit

__all__ = ["DEFAULT_FIT"]

DEFAULT_FIT = Fit(
    costs={
        "driver": {
            0.001: Costs((6.2e-5, 5.9e-5, 0.0), (1.36e-4, 2.7e-5, 0.0), (5.5e-5, 1.9e-5), 5.9e-5, 4.6e-4, 3.6, 0.0),
            0.01: Costs((1.77e-4, 1.22e-4, 0.0), (4.5e-4, 2.8e-5, 0.0), (1.3e-4, 3.3e-5), 0.0, 8.6e-4, 1.4, 7.1e-9),
        },
        "worker": {
            0.001: Costs(
                (3.2e-4, 1.3e-3, 7.4e-6), (1.42e-3, 3.7e-4, 1.1e-5), (9.5e-4, 3.6e-5), 1.8e-4, 4.0e-3, 0.68, 4.3e-9
            ),
            0.01: Costs(
                (2.9e-4, 1.64e-3, 3.7e-5), (1.74e-3, 4.0e-4, 5.5e-5), (1.34e-3, 1.2e-4), 3.2e-4, 1.15e-2, 0.67, 1.0e-8
            ),
        },
    },
    policy_s=(3.2e-6, 1.2e-7),
    others=(1.84, 0.0),
)
