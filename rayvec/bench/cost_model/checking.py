"""How good the cost model is: held against nodes that it was not fitted to, and against a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rayvec.bench.cost_model.calibrate import CHECK_NODES, CHECK_WORKERS, Measured, check_settings, measure_settings
from rayvec.bench.cost_model.fitting import Observation
from rayvec.bench.cost_model.model import (
    Cluster,
    Costs,
    Fit,
    Setting,
    cpu_s,
    predict_step_s,
    recommend,
    settings_for,
    stepping_s,
)

if TYPE_CHECKING:
    from rayvec.bench.results import Results
    from rayvec.bench.simulate import Nodes

__all__ = ["Check", "compare_overheads", "describe", "explain", "fit_errors"]

_CHECK_LIMIT = 0.25
_SEARCH_LIMIT = 0.9
_SEARCH_ENVS, _SEARCH_WORKERS = 8, 4
_PROCESSES = {
    "driver": ("call_s", "frame_s", "driver_idle"),
    "node": ("node_call_s", "node_worker_s", "node_idle"),
    "worker": ("worker_call_s", "env_s"),
}
"""Whose CPU time a measurement knows, and the costs that say it in the model."""


@dataclass(frozen=True)
class Check:
    """Measures what the model has not seen, and says how far off it is.

    Attributes:
        found: The fitted model.
        measured: What it was fitted to, and what is there already to hold it against.
        where: Nodes to measure on; None if nothing is left to be measured.
        window_s: Seconds of a window at least.
        terminal: For the tables.
        results: Whose extra values keep what is measured.
    """

    found: Fit
    measured: Measured
    where: Nodes | None
    window_s: float
    terminal: Any
    results: Results

    def run(self, sigma: float, obs_bytes: int) -> list[dict[str, Any]]:
        """Returns a dict for each cell, and one for the search."""
        observations = self.measured.check_observations or self._measured_cells(sigma, obs_bytes)
        checks = compare_overheads(self.found, observations, Cluster(self.measured.shared_cores))
        self._show(checks)
        return [*checks, self._search(sigma, obs_bytes)]

    def _cores(self) -> int:
        return _SEARCH_WORKERS if self.where is None else self.where.cores(2, _SEARCH_WORKERS)

    def _measure(self, todo: Sequence[Setting], name: str) -> list[Observation]:
        from rayvec.bench.terminal import ticking

        assert self.where is not None
        cores = max(self._cores(), CHECK_WORKERS)
        with ticking(len(todo), self.terminal) as ticker:
            measured = measure_settings(todo, self.where, cores, self.window_s, ticker)
        self.results.extra[name] = [asdict(each) for each in measured]
        self.results.write()
        return measured

    def _measured_cells(self, sigma: float, obs_bytes: int) -> list[Observation]:
        settings = check_settings(sigma, obs_bytes)
        on_two = dict.fromkeys(replace(setting, nodes=2) for setting in settings)
        return self._measure([*on_two, *settings], "check_observations")

    def _show(self, checks: Sequence[dict[str, Any]]) -> None:
        from rayvec.bench.terminal import show_table

        header = ("setting", "step,\nms", "measured", "slowest\nturn", "model", "off")
        show_table(
            self.terminal,
            f"Overhead per step, ms: fitted to 1 and 2 nodes; at most {100 * _CHECK_LIMIT:.0f}% off is asked",
            (*header, "as on\n2 nodes", "off", "beats\nboth"),
            [
                (
                    *(each["name"], f"{1e3 * each['step_duration_s']:g}", f"{1e3 * each['measured_s']:.3f}"),
                    *(f"{1e3 * each['slowest_turn_s']:.3f}", f"{1e3 * each['model_s']:.3f}"),
                    *(f"{100 * each['model_off']:+.0f}%", f"{1e3 * each['as_on_2_s']:.3f}"),
                    *(f"{100 * each['as_on_2_off']:+.0f}%", "yes" if each["beats_both"] else "no"),
                )
                for each in checks
            ],
        )
        within = sum(abs(each["model_off"]) <= _CHECK_LIMIT for each in checks)
        beaten = sum(each["beats_both"] for each in checks)
        self.terminal.print(
            f"{within} of {len(checks)} cells within {100 * _CHECK_LIMIT:.0f}%; "
            f'{beaten} nearer than both "ideal" and "as on 2 nodes"'
        )
        for each in checks:
            if abs(each["model_off"]) > _CHECK_LIMIT or not each["beats_both"]:
                self.terminal.print(f"{each['name']}, {1e3 * each['step_duration_s']:g} ms: {in_words(each)}")

    def _search(self, sigma: float, obs_bytes: int) -> dict[str, Any]:
        """Measures every setting for 8 environments on 2 nodes, and says how good the recommended one is."""
        base = Setting(2, 1, step_s=0.001, sigma=sigma, obs_bytes=obs_bytes)
        todo = list(settings_for(base, _SEARCH_ENVS, self._cores()))
        measured = self.measured.search_observations or self._measure(todo, "search_observations")
        rates = {each.setting: each.setting.num_envs / each.step_s for each in measured}
        chosen = recommend(self.found, base, _SEARCH_ENVS, self._cores(), Cluster(self.measured.shared_cores))
        best = max(rates, key=lambda setting: rates[setting])
        share = rates[chosen] / rates[best]
        self.terminal.print(
            f"Of {len(rates)} settings for {_SEARCH_ENVS} environments on 2 nodes, steps of 1 ms, the best is "
            f"{describe(best)} with {rates[best]:,.0f} steps/s; recommended is {describe(chosen)} with "
            f"{rates[chosen]:,.0f}, {100 * share:.0f}% of it (at least {100 * _SEARCH_LIMIT:.0f}% is asked)"
        )
        return {"name": "search", "best": asdict(best), "chosen": asdict(chosen), "share": share}


def describe(setting: Setting) -> str:
    """Says a setting in words."""
    how = f"worker, T={setting.chunk_steps}" if setting.inference == "worker" else f"driver, groups={setting.groups}"
    return f"{how}, {setting.workers} workers x {setting.envs}"


def compare_overheads(found: Fit, measured: Sequence[Observation], cluster: Cluster) -> list[dict[str, Any]]:
    """Returns, for each observation on more than two nodes, what the model and the two naive guesses say.

    The overhead is the time per step of all environments less the step duration. *Ideal* says that there is none, *as
    on 2 nodes* that it is what was measured there.
    """

    def overhead(each: Observation) -> float:
        return each.step_s - each.setting.envs * each.setting.step_s

    on_two = {each.setting: overhead(each) for each in measured if each.setting.nodes == 2}
    found_checks = []
    for each in measured:
        setting = each.setting
        if setting.nodes not in CHECK_NODES:
            continue
        truth = overhead(each)
        model = predict_step_s(found, setting, cluster) - setting.envs * setting.step_s
        same = on_two[replace(setting, nodes=2)]
        found_checks.append(
            {
                "name": f"{setting.nodes} nodes, {describe(setting)}",
                "step_duration_s": setting.step_s,
                "measured_s": truth,
                "slowest_turn_s": max(each.turns_s, default=each.step_s) - setting.envs * setting.step_s,
                "model_s": model,
                "model_off": model / truth - 1.0,
                "as_on_2_s": same,
                "as_on_2_off": same / truth - 1.0,
                "beats_both": bool(abs(model - truth) < min(abs(same - truth), abs(truth))),
                "causes_s": explain(found, each, cluster),
            }
        )
    return found_checks


def explain(found: Fit, observation: Observation, cluster: Cluster) -> dict[str, float]:
    """Returns by how much the model is off, divided by causes: seconds of a step that it predicts too little.

    CPU time of each kind of process, and cores that others took, are put into the model as they were measured, one
    after the other; what is left then is in the waiting: for cores, for wake-ups, for the slowest environment.
    """
    setting = observation.setting
    costs, causes = found.of(setting), {}
    said_s = predict_step_s(found, setting, cluster)
    calls_s = cpu_s(costs, setting)
    idle_s = costs.driver_idle * observation.step_s, costs.node_idle * observation.step_s, stepping_s(costs, setting)
    for place, (name, fields) in enumerate(_PROCESSES.items()):
        factor = getattr(observation, f"{name}_s") / max(calls_s[place] + idle_s[place], 1e-12)
        costs = replace(costs, **{each: factor * getattr(costs, each) for each in fields})
        before_s, said_s = said_s, predict_step_s(_with(found, setting, costs), setting, cluster)
        causes[f"{name}'s CPU time"] = said_s - before_s
    if cluster.shared_cores is not None:
        true = replace(_with(found, setting, costs), others=observation.others, others_per_node=0.0)
        before_s, said_s = said_s, predict_step_s(true, setting, cluster)
        causes["others on the cores"] = said_s - before_s
    causes["waiting"] = observation.step_s - said_s
    return causes


def _with(found: Fit, setting: Setting, costs: Costs) -> Fit:
    return replace(found, worker=costs) if setting.inference == "worker" else replace(found, driver=costs)


def in_words(check: dict[str, Any]) -> str:
    """Says why the model is off, largest cause first."""
    causes = sorted(check["causes_s"].items(), key=lambda item: -abs(item[1]))
    parts = [f"{name} {1e3 * seconds:+.3f} ms" for name, seconds in causes]
    return f"measured less model is {1e3 * (check['measured_s'] - check['model_s']):+.3f} ms: {', '.join(parts)}"


def fit_errors(found: Fit, observations: Sequence[Observation], shared_cores: int | None) -> list[float]:
    """Returns by what share of the overhead the model is off, for each observation that it was fitted to."""
    errors = []
    for each in observations:
        meant = each.setting.envs * each.setting.step_s
        said = predict_step_s(found, each.setting, Cluster(shared_cores)) - meant
        errors.append(abs(said / max(each.step_s - meant, 1e-9) - 1.0))
    return errors
