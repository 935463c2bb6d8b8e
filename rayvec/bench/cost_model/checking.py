"""How good the cost model is: compared with nodes that it was not fitted to, and with a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from rayvec.bench.cost_model.fitting import Observation
from rayvec.bench.cost_model.measuring import CHECK_NODES
from rayvec.bench.cost_model.model import Cluster, Fit, Setting, cpu_s, predict_step_s, recommend
from rayvec.bench.terminal import show_table

__all__ = ["SEARCH", "SEARCH_ENVS", "compare_overheads", "describe", "fit_errors", "show_checks", "show_search"]

_CHECK_LIMIT = 0.25
_SEARCH_LIMIT = 0.9
SEARCH, SEARCH_ENVS = Setting(2, 4, step_s=0.001), 8
"""The nodes, workers at most and step duration of the search, and how many environments it places."""


def describe(setting: Setting) -> str:
    """Returns a setting in words."""
    how = f"worker, T={setting.chunk_steps}" if setting.inference == "worker" else f"driver, groups={setting.groups}"
    return f"{how}, {setting.workers} workers x {setting.envs}"


def compare_overheads(found: Fit, measured: Sequence[Observation], cluster: Cluster) -> list[dict[str, Any]]:
    """Returns, for each observation on more than two nodes, what the model and two naive guesses say.

    The overhead is the time per step of all environments less the step duration. *Ideal* guesses that there is none,
    *as on 2 nodes* that it is what was measured there. ``cpu_off_s`` says by how much more CPU time was used than
    the model expects, of each kind of process.
    """
    on_two = {each.setting: each.overhead_s for each in measured if each.setting.nodes == 2}
    checks = []
    for each in measured:
        setting, truth = each.setting, each.overhead_s
        if setting.nodes not in CHECK_NODES:
            continue
        model, same = predict_step_s(found, setting, cluster) - setting.meant_s, on_two[replace(setting, nodes=2)]
        costs = found.costs[setting.inference]
        said = cpu_s(costs.get(setting.step_s, costs[max(costs)]), setting)
        used = (each.driver_s, each.node_s, each.worker_s)
        checks.append(
            {
                "name": f"{setting.nodes} nodes, {describe(setting)}",
                "step_duration_s": setting.step_s,
                "measured_s": truth,
                "slowest_turn_s": each.slowest_s - setting.meant_s,
                "model_s": model,
                "model_off": model / truth - 1.0,
                "as_on_2_s": same,
                "as_on_2_off": same / truth - 1.0,
                "beats_both": bool(abs(model - truth) < min(abs(same - truth), abs(truth))),
                "cpu_off_s": {name: a - b for name, a, b in zip(("driver", "node", "worker"), used, said, strict=True)},
                "others_cores": each.others,
            }
        )
    return checks


def show_checks(checks: Sequence[dict[str, Any]], terminal: Console) -> None:
    """Prints the comparison, and of each cell that the model missed where CPU time differs."""
    header = ("setting", "step,\nms", "measured", "slowest\nturn", "model", "off")
    ms = [
        {name: 1e3 * each[f"{name}_s"] for name in ("measured", "slowest_turn", "model", "as_on_2")} for each in checks
    ]
    rows = [
        (
            *(each["name"], f"{1e3 * each['step_duration_s']:g}", f"{at['measured']:.3f}", f"{at['slowest_turn']:.3f}"),
            *(f"{at['model']:.3f}", f"{100 * each['model_off']:+.0f}%", f"{at['as_on_2']:.3f}"),
            *(f"{100 * each['as_on_2_off']:+.0f}%", "yes" if each["beats_both"] else "no"),
        )
        for each, at in zip(checks, ms, strict=True)
    ]
    title = f"Overhead per step, ms: fitted to 1 and 2 nodes; the aim is at most {100 * _CHECK_LIMIT:.0f}% off"
    show_table(terminal, title, (*header, "as on\n2 nodes", "off", "beats\nboth"), rows)
    missed = [each for each in checks if abs(each["model_off"]) > _CHECK_LIMIT]
    beaten = sum(each["beats_both"] for each in checks)
    terminal.print(
        f"{len(checks) - len(missed)} of {len(checks)} cells within {100 * _CHECK_LIMIT:.0f}%; "
        f'{beaten} nearer than both "ideal" and "as on 2 nodes"'
    )
    for each in missed:
        cpu = ", ".join(f"{name} {1e3 * off_s:+.3f} ms" for name, off_s in each["cpu_off_s"].items())
        off_ms = 1e3 * (each["measured_s"] - each["model_s"])
        terminal.print(
            f"{each['name']}, {1e3 * each['step_duration_s']:g} ms: measured less model is {off_ms:+.3f} ms; CPU time "
            f"measured less model of each process: {cpu}; other processes took {each['others_cores']:.2f} cores"
        )


def show_search(
    found: Fit, measured: Sequence[Observation], base: Setting, cluster: Cluster, terminal: Console
) -> dict[str, Any]:
    """Compares the recommended setting with the best of all that were measured."""
    rates = {each.setting: each.setting.num_envs / each.step_s for each in measured}
    chosen = recommend(found, base, SEARCH_ENVS, max(each.workers for each in rates), cluster)
    best = max(rates, key=lambda setting: rates[setting])
    share = rates[chosen] / rates[best]
    terminal.print(
        f"Of {len(rates)} settings for {SEARCH_ENVS} environments on 2 nodes, steps of 1 ms, the best is "
        f"{describe(best)} with {rates[best]:,.0f} steps/s; the recommended one, {describe(chosen)}, makes "
        f"{rates[chosen]:,.0f}, {100 * share:.0f}% of it (the aim is {100 * _SEARCH_LIMIT:.0f}%)"
    )
    return {"name": "search", "best": asdict(best), "chosen": asdict(chosen), "share": share}


def fit_errors(found: Fit, observations: Sequence[Observation], shared_cores: int | None) -> list[float]:
    """Returns by what share of the overhead the model is off, for each observation that it was fitted to."""
    said = [predict_step_s(found, each.setting, Cluster(shared_cores)) - each.setting.meant_s for each in observations]
    return [abs(one / max(each.overhead_s, 1e-9) - 1.0) for one, each in zip(said, observations, strict=True)]
