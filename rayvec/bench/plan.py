"""``rayvec bench model``: fit the cost model here, predict a cluster that one doesn't have, and check the model."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rayvec.bench.scaling import check_any, parse_jitter
from rayvec.fields import Bounds, check, plain

if TYPE_CHECKING:
    from rayvec.bench.model import Cluster, Fit, Observation, Setting
    from rayvec.bench.results import Results

__all__ = ["Model"]

Count = Annotated[int, Bounds(1)]
Positive = Annotated[float, Bounds(0, above=True)]
_CHECK_LIMIT = 0.25
_SEARCH_LIMIT = 0.9


@dataclass(frozen=True, kw_only=True)
class Model:
    """Predict steps/s on a cluster that one doesn't have, from measurements on one and two simulated nodes.

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

    network_latency_us: Annotated[float, Bounds(0)] = 100.0
    """Microseconds one way between nodes, beside what this machine's own network takes."""

    network_gbit: Positive = 10.0
    """Bandwidth of the driver's network in Gbit/s."""

    window: Positive = 1.0
    """Seconds of a window at least."""

    fit: Path | None = None
    """Use the measurements in this model.json, rather than measure."""

    check: bool = False
    """Hold the fitted model against four and eight simulated nodes, and its recommendation against a search."""

    out: Path = Path("runs/bench-model")
    """Directory for model.json and model.csv."""

    def run(self, mentioned: frozenset[str] = frozenset()) -> None:
        """Measures, fits, predicts."""
        check(self)
        check_any(self, "nodes", "step_duration")
        sigma = parse_jitter(self.jitter)
        from rayvec.bench.results import Results
        from rayvec.bench.terminal import console

        settings = plain(self) | {"out": str(self.out), "fit": str(self.fit) if self.fit else None}
        results = Results("model", settings, self.out / "model.json")
        terminal = console()
        try:
            self._measure_and_tell(sigma, results, terminal)
        except KeyboardInterrupt:
            kept = f"go on with --fit {results.path}" if "observations" in results.extra else "nothing was kept"
            raise KeyboardInterrupt(f"interrupted; {kept}") from None

    def _measure_and_tell(self, sigma: float, results: Results, terminal: Any) -> None:
        from rayvec.bench.calibrate import (
            FIT_CORES,
            Measured,
            fit_settings,
            measure_policy,
            measure_settings,
            read_measured,
        )
        from rayvec.bench.model import ASSUMPTIONS
        from rayvec.bench.simulate import nodes
        from rayvec.bench.terminal import ticking

        checks: list[dict[str, Any]] = []
        policy = measure_policy(self.obs_size, self.hidden_size) if self.hidden_size else (0.0, 0.0)
        measured = replace(read_measured(self.fit), policy_s=policy) if self.fit is not None else None
        with ExitStack() as stack:
            where: Any = stack.enter_context(nodes()) if measured is None or self.check else None
            if measured is None:
                todo = fit_settings(sigma, 4 * self.obs_size)
                terminal.print(f"measuring {len(todo)} settings on 1 and 2 simulated nodes, about 3 minutes")
                with ticking(len(todo), terminal) as ticker:
                    observations = measure_settings(todo, where, FIT_CORES, self.window, ticker)
                measured = Measured(observations, len(os.sched_getaffinity(0)), policy)
            found = measured.fit()
            errors = fit_errors(found, measured.observations, measured.shared_cores)
            results.extra |= {**asdict(measured), "fit": found.as_dict(), "fit_error": statistics.median(errors)}
            results.write()
            if self.check:
                checks = self._check(found, where, sigma, results, terminal)
        results.extra["checks"] = checks
        self._predict(found, results, terminal, sigma)
        terminal.print("Assumptions:")
        for text in ASSUMPTIONS:
            terminal.print(f"  - {text}")
        results.notes = list(ASSUMPTIONS)
        results.write()
        terminal.print(f"written: {results.path}, {results.write_csv()}")

    def _cluster(self) -> Cluster:
        from rayvec.bench.model import Cluster

        return Cluster(None, self.network_latency_us * 1e-6, self.network_gbit * 1e9 / 8)

    def _predict(self, found: Fit, results: Results, terminal: Any, sigma: float) -> None:
        from rayvec.bench.model import Setting, recommend, steps_per_s
        from rayvec.bench.results import old_design
        from rayvec.bench.terminal import show_table

        old = {(row["nodes"], row["step_duration_s"]): row for row in old_design()}
        lines, advice = [], []
        for count in sorted(set(self.nodes)):
            for step_s in sorted(set(self.step_duration), reverse=True):
                base = Setting(count, self.cores_per_node, step_s=step_s, sigma=sigma, obs_bytes=4 * self.obs_size)
                ideal = count * self.cores_per_node / step_s
                rates = {
                    kind: steps_per_s(found, replace(base, inference=kind), self._cluster())
                    for kind in ("driver", "worker")
                }
                before = old.get((count, step_s)) if self.cores_per_node == 48 else None
                num_envs = count * self.cores_per_node * self.envs_per_core
                with_policy = replace(base, policy=self.hidden_size > 0)
                best = recommend(found, with_policy, num_envs, self.cores_per_node, self._cluster())
                best_rate = steps_per_s(found, best, self._cluster())
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

    def _check(self, found: Fit, where: Any, sigma: float, results: Results, terminal: Any) -> list[dict[str, Any]]:
        """Measures what the model was not fitted to, and says how far off it is."""
        from rayvec.bench.calibrate import CHECK_NODES, CHECK_WORKERS, FIT_CORES, check_settings, measure_settings
        from rayvec.bench.model import Cluster
        from rayvec.bench.simulate import check_memory
        from rayvec.bench.terminal import show_table, ticking

        cores, shared = max(FIT_CORES, CHECK_WORKERS), len(os.sched_getaffinity(0))
        check_memory(max(CHECK_NODES), {"rayvec": 14.0}, max(CHECK_NODES) * cores)
        base = [replace(setting, nodes=2) for setting in check_settings(sigma, 4 * self.obs_size)]
        todo = [*dict.fromkeys(base), *check_settings(sigma, 4 * self.obs_size)]
        with ticking(len(todo), terminal) as ticker:
            measured = measure_settings(todo, where, cores, self.window, ticker)
        results.extra["check_observations"] = [asdict(each) for each in measured]
        results.write()
        checks = compare_overheads(found, measured, Cluster(shared))
        show_table(
            terminal,
            f"Overhead per step, ms: fitted to 1 and 2 nodes; at most {100 * _CHECK_LIMIT:.0f}% off is asked",
            ("setting", "step,\nms", "measured", "model", "off", "as on\n2 nodes", "off", "beats that\nand ideal"),
            [
                (
                    *(each["name"], f"{1e3 * each['step_duration_s']:g}", f"{1e3 * each['measured_s']:.3f}"),
                    *(f"{1e3 * each['model_s']:.3f}", f"{100 * each['model_off']:+.0f}%"),
                    *(f"{1e3 * each['as_on_2_s']:.3f}", f"{100 * each['as_on_2_off']:+.0f}%"),
                    "yes" if each["beats_both"] else "no",
                )
                for each in checks
            ],
        )
        within = sum(abs(each["model_off"]) <= _CHECK_LIMIT for each in checks)
        terminal.print(f"{within} of {len(checks)} cells within {100 * _CHECK_LIMIT:.0f}%")
        return [*checks, self._search(found, where, shared, sigma, terminal)]

    def _search(self, found: Fit, where: Any, shared: int, sigma: float, terminal: Any) -> dict[str, Any]:
        """Measures every setting for 8 environments on 2 nodes, and says how good the recommended one is."""
        from rayvec.bench.calibrate import FIT_CORES, measure_settings
        from rayvec.bench.model import Cluster, Setting, recommend, settings_for
        from rayvec.bench.terminal import ticking

        base = Setting(2, 1, step_s=0.001, sigma=sigma, obs_bytes=4 * self.obs_size)
        todo = list(settings_for(base, 8, FIT_CORES))
        with ticking(len(todo), terminal) as ticker:
            measured = measure_settings(todo, where, FIT_CORES, self.window, ticker)
        rates = {each.setting: each.setting.num_envs / each.step_s for each in measured}
        chosen = recommend(found, base, 8, FIT_CORES, Cluster(shared))
        best = max(rates, key=lambda setting: rates[setting])
        share = rates[chosen] / rates[best]
        terminal.print(
            f"Of {len(rates)} settings for 8 environments on 2 nodes, steps of 1 ms, the best is {describe(best)} with "
            f"{rates[best]:,.0f} steps/s; recommended is {describe(chosen)} with {rates[chosen]:,.0f}, "
            f"{100 * share:.0f}% of it (at least {100 * _SEARCH_LIMIT:.0f}% is asked)"
        )
        return {"name": "search", "best": asdict(best), "chosen": asdict(chosen), "share": share}


def describe(setting: Setting) -> str:
    """Says a setting in words."""
    how = f"worker, T={setting.chunk_steps}" if setting.inference == "worker" else f"driver, groups={setting.groups}"
    return f"{how}, {setting.workers} workers x {setting.envs}"


def compare_overheads(found: Fit, measured: Sequence[Observation], shared: Cluster) -> list[dict[str, Any]]:
    """Returns, for each observation on more than two nodes, what the model and the two naive guesses say.

    The overhead is the time per step of all environments less the step duration. *Ideal* says that there is none, *as
    on 2 nodes* that it is what was measured there.
    """
    from rayvec.bench.model import predict_step_s

    def overhead(each: Observation) -> float:
        return each.step_s - each.setting.envs * each.setting.step_s

    on_two = {each.setting: overhead(each) for each in measured if each.setting.nodes == 2}
    found_checks = []
    for each in measured:
        setting = each.setting
        if setting.nodes == 2:
            continue
        truth = overhead(each)
        model = predict_step_s(found, setting, shared) - setting.envs * setting.step_s
        same = on_two[replace(setting, nodes=2)]
        found_checks.append(
            {
                "name": f"{setting.nodes} nodes, {describe(setting)}",
                "step_duration_s": setting.step_s,
                "measured_s": truth,
                "model_s": model,
                "model_off": model / truth - 1.0,
                "as_on_2_s": same,
                "as_on_2_off": same / truth - 1.0,
                "beats_both": bool(abs(model - truth) < min(abs(same - truth), abs(truth))),
            }
        )
    return found_checks


def fit_errors(found: Fit, observations: Sequence[Observation], shared: int) -> list[float]:
    """Returns by what share of the overhead the model is off, for each observation that it was fitted to."""
    from rayvec.bench.model import Cluster, predict_step_s

    errors = []
    for each in observations:
        meant = each.setting.envs * each.setting.step_s
        said = predict_step_s(found, each.setting, Cluster(shared)) - meant
        errors.append(abs(said / max(each.step_s - meant, 1e-9) - 1.0))
    return errors
