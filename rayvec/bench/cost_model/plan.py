"""``rayvec bench model``: fit the cost model here, predict a cluster that one doesn't have, and check the model."""

from __future__ import annotations

import math
import os
import statistics
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rayvec.bench.scaling import check_any, parse_jitter
from rayvec.config.schema import Bounds, check, plain
from rayvec.errors import ConfigError

if TYPE_CHECKING:
    from rayvec.bench.cost_model.calibrate import Measured
    from rayvec.bench.cost_model.fitting import Observation
    from rayvec.bench.cost_model.model import Cluster, Fit
    from rayvec.bench.results import Results
    from rayvec.bench.simulate import Nodes

__all__ = ["Model", "cluster_beside"]

Count = Annotated[int, Bounds(1)]
Positive = Annotated[float, Bounds(0, above=True)]
_LATENCY_US, _GBIT = 100.0, 10.0
"""Of the network that is predicted for, where nodes were simulated on one machine."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Predict steps/s on a cluster that one doesn't have, from measurements on one and two nodes.

    Says also which inference, chunk length, groups, workers and environments per worker are best there.
    """

    nodes: tuple[Count, ...] = (2, 4, 8, 16, 32)
    """Numbers of nodes to predict."""

    cores_per_node: Count = 48
    """Cores of each."""

    step_duration: tuple[Positive, ...] = (1.0, 0.1, 0.01, 0.001)
    """Seconds that an environment takes for a step."""

    jitter: str | None = None
    """How durations vary around their mean, such as lognormal:0.5; unset: not at all."""

    obs_size: Count = 4
    """Numbers in an observation, float32."""

    hidden_size: Annotated[int, Bounds(0)] = 64
    """Units of the two hidden layers of the policy that settings are recommended for; 0: no policy."""

    envs_per_core: Count = 1
    """Environments for each core, to recommend settings for."""

    network_latency_us: Annotated[float, Bounds(0)] | None = None
    """Microseconds one way between nodes, beside what was measured; unset: 100 where nodes were simulated on one
    machine, 0 where a cluster was measured."""

    network_gbit: Positive | None = None
    """Bandwidth of the driver's network in Gbit/s, beside the bytes' cost that was measured; unset: 10 where nodes
    were simulated, without limit where a cluster was measured."""

    window: Positive = 1.0
    """Seconds of a window at least."""

    fit: Path | None = None
    """Use the measurements in this model.json, rather than measure."""

    check: bool = False
    """Hold the fitted model against four and eight nodes, and its recommendation against a search; what --fit holds
    of that is not measured again."""

    address: str | None = None
    """Measure on the Ray cluster at this address; unset: simulate nodes on this machine."""

    out: Path = Path("runs/bench-model")
    """Directory for model.json and model.csv; what was there before is replaced."""

    def run(self, mentioned: frozenset[str] = frozenset()) -> None:
        """Measures, fits, predicts."""
        check(self)
        check_any(self, "nodes", "step_duration")
        if self.fit is not None and self.address is not None:
            raise ConfigError(
                "--fit takes measurements from a file, --address makes them.",
                expected="one of the two",
                got=f"--fit {self.fit} and --address {self.address}",
                remedy="Leave one out.",
            )
        sigma = parse_jitter(self.jitter)
        from rayvec.bench.results import Results
        from rayvec.bench.terminal import console

        settings = plain(self) | {"out": str(self.out), "fit": str(self.fit) if self.fit else None}
        results = Results("model", settings, self.out / "model.json")
        terminal = console()
        try:
            self._measure_and_tell(sigma, results, terminal)
        except KeyboardInterrupt:
            kept = results.extra.get("observations", [])
            is_fitted = kept and not results.extra.get("interrupted")
            said = f"{len(kept)} settings are in {results.path}" if kept else "nothing was finished"
            raise KeyboardInterrupt(
                f"interrupted; {said}{f', go on with --fit {results.path}' if is_fitted else ''}"
            ) from None

    def _measure_and_tell(self, sigma: float, results: Results, terminal: Any) -> None:
        from rayvec.bench.cost_model.calibrate import measure_policy, read_measured
        from rayvec.bench.cost_model.checking import Check, fit_errors
        from rayvec.bench.cost_model.model import ASSUMPTIONS

        checks: list[dict[str, Any]] = []
        policy = measure_policy(self.obs_size, self.hidden_size) if self.hidden_size else (0.0, 0.0)
        measured = replace(read_measured(self.fit), policy_s=policy) if self.fit is not None else None
        with ExitStack() as stack:
            if measured is None or (self.check and not measured.is_checked):
                where = self._begin(stack, measured, terminal)
            else:
                where = None
            if measured is None:
                measured = self._measure(where, policy, sigma, results, terminal)
            found = measured.fit()
            errors = fit_errors(found, measured.observations, measured.shared_cores)
            results.extra |= {**asdict(measured), "fit": found.as_dict(), "fit_error": statistics.median(errors)}
            results.write()
            if self.check:
                checks = Check(found, measured, where, self.window, terminal, results).run(sigma, 4 * self.obs_size)
        results.extra["checks"] = checks
        network = cluster_beside(measured, self.network_latency_us, self.network_gbit)
        self._predict(found, network, results, terminal, sigma)
        terminal.print("Assumptions:")
        for text in ASSUMPTIONS:
            terminal.print(f"  - {text}")
        results.notes = [*results.notes, *ASSUMPTIONS]
        results.write()
        terminal.print(f"written: {results.path}, {results.write_csv()}")

    def _begin(self, stack: ExitStack, measured: Measured | None, terminal: Any) -> Nodes:
        """Returns the nodes that are measured on, if there are enough and there is memory for them."""
        if measured is not None and measured.shared_cores is None:
            raise ConfigError(
                "A model is checked where it was fitted.",
                expected="--check together with --address, or a file that holds the check already",
                got=f"--fit {self.fit}, of a cluster",
                remedy="Leave --fit out, or --check.",
            )
        from rayvec.bench.cost_model.calibrate import CHECK_NODES, CHECK_WORKERS, FIT_NODES, FIT_WORKERS
        from rayvec.bench.simulate import check_memory, nodes

        most_nodes = max(CHECK_NODES) if self.check else max(FIT_NODES)
        if self.address is None:
            most_envs = max(max(FIT_NODES) * max(FIT_WORKERS), max(CHECK_NODES) * CHECK_WORKERS)
            check_memory(most_nodes, {"rayvec": 14.0}, most_envs)
        where = stack.enter_context(nodes(self.address))
        where.check(most_nodes, CHECK_WORKERS)
        terminal.print(f"Measured on {where.describe(where.cores(max(FIT_NODES), max(FIT_WORKERS)))}.")
        return where

    def _measure(
        self, where: Any, policy: tuple[float, float], sigma: float, results: Results, terminal: Any
    ) -> Measured:
        from rayvec.bench.cost_model.calibrate import FIT_NODES, FIT_WORKERS, Measured, fit_settings, measure_settings
        from rayvec.bench.terminal import ticking

        cores = where.cores(max(FIT_NODES), max(FIT_WORKERS))
        todo = fit_settings(sigma, 4 * self.obs_size, cores)
        terminal.print(f"measuring {len(todo)} settings on 1 and 2 nodes, about 4 minutes")

        def keep(found: list[Observation]) -> None:
            results.extra |= {"interrupted": True, "observations": [asdict(each) for each in found]}
            results.write()

        with ticking(len(todo), terminal) as ticker:
            observations = measure_settings(todo, where, cores, self.window, ticker, keep)
        del results.extra["interrupted"]
        return Measured(observations, len(os.sched_getaffinity(0)) if where.simulated else None, policy)

    def _predict(self, found: Fit, network: Cluster, results: Results, terminal: Any, sigma: float) -> None:
        from rayvec.bench.cost_model.checking import describe
        from rayvec.bench.cost_model.model import Setting, recommend, steps_per_s
        from rayvec.bench.results import old_design
        from rayvec.bench.terminal import show_table

        old = {(row["nodes"], row["step_duration_s"]): row for row in old_design()}
        lines, advice = [], []
        for count in sorted(set(self.nodes)):
            for step_s in sorted(set(self.step_duration), reverse=True):
                base = Setting(count, self.cores_per_node, step_s=step_s, sigma=sigma, obs_bytes=4 * self.obs_size)
                ideal = count * self.cores_per_node / step_s
                rates = {
                    kind: steps_per_s(found, replace(base, inference=kind), network) for kind in ("driver", "worker")
                }
                before = old.get((count, step_s)) if self.cores_per_node == 48 else None
                num_envs = count * self.cores_per_node * self.envs_per_core
                with_policy = replace(base, policy=self.hidden_size > 0)
                best = recommend(found, with_policy, num_envs, self.cores_per_node, network)
                best_rate = steps_per_s(found, best, network)
                results.rows.append(
                    {
                        "nodes": count,
                        "cores": count * self.cores_per_node,
                        "step_duration_s": step_s,
                        "ideal_steps_per_s": ideal,
                        **{f"{kind}_steps_per_s": rate for kind, rate in rates.items()},
                        **{f"{kind}_efficiency": rate / ideal for kind, rate in rates.items()},
                        "old_design_steps_per_s": before["steps_per_s"] if before else None,
                        "recommended": asdict(best),
                        "recommended_steps_per_s": best_rate,
                    }
                )
                old_rate = f"{before['steps_per_s']:,.0f} ({before['efficiency_percent']:.0f}%)" if before else ""
                lines.append(
                    (
                        *(str(count), str(count * self.cores_per_node), f"{step_s:g}", f"{ideal:,.0f}"),
                        *(f"{rates[kind]:,.0f} ({100 * rates[kind] / ideal:.0f}%)" for kind in ("driver", "worker")),
                        old_rate,
                    )
                )
                advice.append((str(count), f"{step_s:g}", describe(best), f"{best_rate:,.0f}"))
        title = f"Predicted for {self.cores_per_node} cores a node, T=128 in chunks; the old design as it was measured"
        header = ("nodes", "cores", "step, s", "ideal", "rayvec, driver", "rayvec, worker, T=128", "old design")
        show_table(terminal, title, header, lines)
        policy = f"a policy of 2 x {self.hidden_size} units" if self.hidden_size else "no policy"
        title = f"Recommended for {self.envs_per_core} environments a core and {policy}"
        show_table(terminal, title, ("nodes", "step, s", "setting", "steps/s"), advice)


def cluster_beside(measured: Measured, latency_us: float | None, gbit: float | None) -> Cluster:
    """Returns the cluster that is predicted for: its network as given, or else after what was measured.

    Args:
        measured: On nodes that were simulated on one machine, or on a cluster, whose network is in the measurements.
        latency_us: One way, beside what was measured.
        gbit: Bandwidth of the driver's network, likewise.
    """
    from rayvec.bench.cost_model.model import Cluster

    simulated = measured.shared_cores is not None
    latency_us = latency_us if latency_us is not None else _LATENCY_US if simulated else 0.0
    gbit = gbit if gbit is not None else _GBIT if simulated else math.inf
    return Cluster(None, latency_us * 1e-6, gbit * 1e9 / 8)
