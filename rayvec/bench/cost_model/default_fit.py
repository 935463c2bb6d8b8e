"""A fit that stands in where none was measured: `rayvec bench model` on simulated nodes of two cores, 2026-11-23."""

from __future__ import annotations

from rayvec.bench.cost_model.model import Costs, Fit

__all__ = ["DEFAULT_FIT"]

DEFAULT_FIT = Fit(
    costs={
        "driver": {
            0.001: Costs(
                (5.37e-05, 4.63e-05, 0.0),
                (0.000107, 1.16e-05, 0.0),
                (3.77e-06, 4.44e-05),
                7.83e-05,
                0.0,
                0.369,
                5.01e-10,
            ),
            0.01: Costs(
                (0.000172, 0.000102, 0.0), (0.000341, 8.98e-06, 0.0), (2.57e-05, 8.58e-05), 1.96e-05, 0.0, 0.419, 0.0
            ),
        },
        "worker": {
            0.001: Costs(
                (0.000982, 0.00103, 8.26e-06),
                (0.00178, 0.000214, 4.84e-06),
                (0.000949, 2.59e-05),
                5.35e-05,
                0.000288,
                0.179,
                1.77e-09,
            ),
            0.01: Costs(
                (0.00132, 0.000851, 3.73e-05),
                (0.00146, 0.000245, 4.9e-05),
                (0.00086, 0.000104),
                2.48e-05,
                0.000105,
                0.0622,
                2.52e-09,
            ),
        },
    },
    policy_s=(3.18e-06, 1.25e-07),
    others=(0.029, 0.0),
)
