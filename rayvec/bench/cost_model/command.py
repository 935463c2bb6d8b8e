"""``rayvec bench model``: fits the cost model, predicts a larger cluster, and checks the model."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from rayvec.bench.cost_model.measuring import (
    CHECK_NODES,
    CHECK_WORKERS,
    FIT_NODES,
    FIT_WORKERS,
    Measured,
    check_settings,
    fit_settings,
    measure_alone,
    measure_policy,
    measure_settings,
)
from rayvec.bench.cost_model.model import (
    ASSUMPTIONS,
    Cluster,
    Fit,
    Observation,
    Setting,
    all_reduce_s,
    predict_alone_s,
    predict_step_s,
    recommend,
    settings_for,
    steps_per_s,
)
from rayvec.bench.results import Results, old_design
from rayvec.bench.settings import Model, check_any, jitter_sigma
from rayvec.bench.simulate import Nodes, Place, check_hosts, check_memory, nodes
from rayvec.bench.terminal import show_table
from rayvec.config.schema import check
from rayvec.errors import ConfigError, counted

__all__ = ["cluster_of", "compare_overheads", "run"]

_LATENCY_US, _GBIT = 100.0, 10.0
"""Of the predicted network, where nodes were simulated on one machine."""
_CHECK_LIMIT, _SEARCH_LIMIT = 0.25, 0.9
_SEARCH, _SEARCH_ENVS = Setting(2, 4, step_s=0.001), 8
"""The nodes, workers at most and step duration of the search, and how many environments it places."""
_PLACES = {"simulated": "simulated nodes", "hosts": "hosts in network namespaces", "cluster": "those of a cluster"}


def run(settings: Model) -> None:
    """Measures, fits, predicts."""
    check(settings)
    check_any(settings, "nodes", "step_duration")
    if settings.fit is not None and settings.address is not None:
        raise ConfigError(
            "--fit takes measurements from a file, --address makes them.",
            expected="one of the two",
            got=f"--fit {settings.fit} and --address {settings.address}",
            remedy="Leave one out.",
        )
    if settings.hosts:
        check_hosts()
        if settings.address is not None or (settings.fit is not None and not settings.check):
            raise ConfigError(
                "--hosts says where is measured.",
                expected="--hosts without --address, and with --fit only together with --check",
                got=f"--address {settings.address}" if settings.address else f"--fit {settings.fit} without --check",
                remedy="Leave one out.",
            )
    results = Results.of("model", settings)
    try:
        with ExitStack() as stack:
            _Plan(settings, results, stack).run()
    except KeyboardInterrupt:
        kept = results.extra.get("observations", [])
        said = f"{len(kept)} settings are in {results.path}" if kept else "nothing was finished"
        go_on = f", continue with --fit {results.path}" if kept and not results.extra.get("interrupted") else ""
        raise KeyboardInterrupt(f"interrupted; {said}{go_on}") from None


class _Plan:
    """One run of the command.

    Args:
        settings: Of the command.
        results: Where everything goes.
        stack: Ends the nodes, which start when they are needed.
    """

    def __init__(self, settings: Model, results: Results, stack: ExitStack) -> None:
        self._settings, self._results, self._stack = settings, results, stack
        self._sigma, self._obs_bytes = jitter_sigma(settings.jitter), 4 * settings.obs_size
        self._nodes: Nodes | None = None
        self._place: Place = "hosts" if settings.hosts else "simulated" if settings.address is None else "cluster"

    def run(self) -> None:
        settings, results = self._settings, self._results
        measured = self._measured() if settings.fit is None else Measured.read(settings.fit)
        if settings.hosts and measured.checked_on != "hosts":
            measured.check_observations, measured.search_observations, measured.checked_on = [], [], "hosts"
        self._place = measured.checked_on
        measured.policy_s = measure_policy(settings.obs_size, settings.hidden_size)
        found = measured.fit()
        results.extra = {**asdict(measured), "fit": asdict(found), "checks": []}
        results.write()
        if settings.check:
            results.extra["checks"] = self._checks(found, measured)
        self._predict(found, cluster_of(measured, settings.network_latency_us, settings.network_gbit))
        print("Assumptions:", *(f"- {text}" for text in ASSUMPTIONS), sep="\n  ")
        results.notes += ASSUMPTIONS
        results.finish()

    def _where(self) -> tuple[Nodes, int]:
        """Returns the nodes that are measured on, started at the first call, and the cores of each."""
        if self._nodes is None:
            most_nodes = max(CHECK_NODES) if self._settings.check else max(FIT_NODES)
            if self._settings.address is None:
                most_envs = max(max(FIT_NODES) * max(FIT_WORKERS), max(CHECK_NODES) * CHECK_WORKERS)
                check_memory(most_nodes, ("rayvec",), most_envs)
            self._nodes = self._stack.enter_context(nodes(self._settings.address, self._place))
            self._nodes.check(most_nodes, CHECK_WORKERS)
            print(f"Measured on {self._nodes.describe(self._nodes.cores(max(FIT_NODES), max(FIT_WORKERS)))}.")
        return self._nodes, self._nodes.cores(max(FIT_NODES), max(FIT_WORKERS))

    def _measure(self, todo: Sequence[Setting], name: str) -> list[Observation]:
        def keep(found: list[Observation]) -> None:
            self._results.extra[name] = [asdict(each) for each in found]
            self._results.write()

        where, cores = self._where()
        print(f"measuring {len(todo)} settings, about {counted(max(1, round(len(todo) / 16)), 'minute')}")
        return measure_settings(todo, where, cores, self._settings.window, keep)

    def _measured(self) -> Measured:
        where, cores = self._where()
        self._results.extra["interrupted"] = True
        alone_s = measure_alone(self._sigma)
        observations = self._measure(fit_settings(self._sigma, self._obs_bytes, cores), "observations")
        del self._results.extra["interrupted"]
        shared_cores = len(os.sched_getaffinity(0)) if where.share_machine else None
        return Measured(observations, shared_cores, alone_s=alone_s, checked_on=self._place)

    def _checks(self, found: Fit, measured: Measured) -> list[dict[str, Any]]:
        """Measures what is missing, compares, and prints how good the model is."""
        complete = measured.check_observations and measured.search_observations
        if self._settings.fit is not None and measured.shared_cores is None and not complete:
            raise ConfigError(
                "A model is checked where it was fitted.",
                expected="--check together with --address, or a file that holds the check already",
                got=f"--fit {self._settings.fit}, of a cluster",
                remedy="Leave out --fit or --check.",
            )
        cluster = Cluster(measured.shared_cores)
        todo = check_settings(self._sigma, self._obs_bytes)
        on_two = dict.fromkeys(replace(setting, nodes=2) for setting in todo)
        cells = measured.check_observations or self._measure([*on_two, *todo], "check_observations")
        checks = compare_overheads(found, cells, cluster)
        show_table(
            f"Overhead per step, ms: fitted to 1 and 2 nodes, checked on {_PLACES[self._place]}; "
            f"the aim is at most {_CHECK_LIMIT:.0%} off",
            ("setting", "step, ms", "measured", "slowest turn", "model", "off", "as on 2 nodes", "off"),
            [
                (
                    *(each["name"], f"{1e3 * each['step_duration_s']:g}", f"{1e3 * each['measured_s']:.3f}"),
                    *(f"{1e3 * each['slowest_turn_s']:.3f}", f"{1e3 * each['model_s']:.3f}"),
                    *(f"{each['model_off']:+.0%}", f"{1e3 * each['as_on_2_s']:.3f}", f"{each['as_on_2_off']:+.0%}"),
                )
                for each in checks
            ],
        )
        good = sum(abs(each["model_off"]) <= _CHECK_LIMIT for each in checks)
        nearest = sum(each["beats_both"] for each in checks)
        print(f"{good} of {len(checks)} cells within {_CHECK_LIMIT:.0%}; ", end="")
        print(f'{nearest} nearer than both "no overhead" and "as on 2 nodes"')
        base, tried = replace(_SEARCH, sigma=self._sigma, obs_bytes=self._obs_bytes), measured.search_observations
        if not tried:
            workers = min(_SEARCH.workers, self._where()[1])
            tried = self._measure(list(settings_for(base, _SEARCH_ENVS, workers)), "search_observations")
        rates = {each.setting: each.setting.num_envs / each.step_s for each in tried}
        chosen = recommend(found, base, _SEARCH_ENVS, max(each.workers for each in rates), cluster)
        best = max(rates, key=lambda setting: rates[setting])
        share = rates[chosen] / rates[best]
        print(
            f"Of {len(rates)} settings for {_SEARCH_ENVS} environments on 2 nodes, steps of 1 ms, the best is "
            f"{describe(best)} with {rates[best]:,.0f} steps/s; the recommended one, {describe(chosen)}, makes "
            f"{rates[chosen]:,.0f}, {share:.0%} of it (the aim is {_SEARCH_LIMIT:.0%})"
        )
        return [*checks, {"name": "search", "best": asdict(best), "chosen": asdict(chosen), "share": share}]

    def _predict(self, found: Fit, network: Cluster) -> None:
        settings = self._settings
        old = {(48.0, row["nodes"], row["step_duration_s"]): row for row in old_design()}
        lines, advice = [], []
        for count in sorted(set(settings.nodes)):
            for step_s in sorted(set(settings.step_duration), reverse=True):
                cores, each = count * settings.cores_per_node, settings.cores_per_node
                base = Setting(count, each, step_s=step_s, sigma=self._sigma, obs_bytes=self._obs_bytes)
                rates = self._rates(replace(found, policy_s=(0.0, 0.0)), base, network)
                before = old.get((float(each), float(count), step_s), {"steps_per_s": None})
                best = recommend(found, base, cores * settings.envs_per_core, each, network)
                row: dict[str, Any] = {"nodes": count, "cores": cores, "step_duration_s": step_s}
                row["ideal_steps_per_s"] = ideal = cores / step_s
                for kind, rate in rates.items():
                    row |= {f"{kind}_steps_per_s": rate, f"{kind}_efficiency": rate / ideal}
                row["old_design_steps_per_s"] = before["steps_per_s"]
                row["all_reduce_s"] = sum_s = all_reduce_s(4 * settings.parameters, count, network)
                row |= {"recommended": asdict(best), "recommended_steps_per_s": steps_per_s(found, best, network)}
                self._results.rows.append(row)
                shown = [*rates.values(), before["steps_per_s"]]
                texts = [f"{rate:,.0f} ({rate / ideal:.0%})" if rate else "" for rate in shown]
                lines.append((count, cores, f"{step_s:g}", f"{ideal:,.0f}", *texts, f"{1e3 * sum_s:.2f}"))
                advice.append((count, f"{step_s:g}", describe(best), f"{row['recommended_steps_per_s']:,.0f}"))
        ours = ("central, by step", "central, chunks", "decentralized, chunks", "environments alone")
        show_table(
            f"Predicted steps/s and share of ideal for {settings.cores_per_node} cores per node, chunks of 128 steps;\n"
            f"all-reduce: one sum of the gradient of {settings.parameters:,} parameters over one rank on each node",
            ("nodes", "cores", "step, s", "ideal", *ours, "old design, measured", "all-reduce, ms"),
            lines,
        )
        policy = f"a policy of 2 x {settings.hidden_size} units" if settings.hidden_size else "no policy"
        show_table(
            f"Recommended for {settings.envs_per_core} environments per core and {policy}",
            ("nodes", "step, s", "setting", "steps/s"),
            advice,
        )

    @staticmethod
    def _rates(found: Fit, base: Setting, network: Cluster) -> dict[str, float]:
        """Returns steps/s by who takes them: the driver, workers in chunks, ranks in chunks, environments alone."""
        chunks, rank = replace(base, inference="worker"), replace(base, inference="rank", nodes=1)
        return {
            "driver": steps_per_s(found, base, network),
            "worker": steps_per_s(found, chunks, network),
            "decentralized": base.nodes * steps_per_s(found, rank, Cluster()),
            "alone": base.num_envs / predict_alone_s(found, base.step_s),
        }


def compare_overheads(found: Fit, measured: Sequence[Observation], cluster: Cluster) -> list[dict[str, Any]]:
    """Returns, for each observation on more than two nodes, what the model and two naive guesses say.

    The overhead is the time per step of all environments less the step duration. One guess is that there is none, the
    other, *as on 2 nodes*, that it is what was measured there.
    """
    on_two = {each.setting: each.overhead_s for each in measured if each.setting.nodes == 2}
    checks = []
    for each in measured:
        setting, truth = each.setting, each.overhead_s
        if setting.nodes in CHECK_NODES:
            model, same = predict_step_s(found, setting, cluster) - setting.meant_s, on_two[replace(setting, nodes=2)]
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
                }
            )
    return checks


def describe(setting: Setting) -> str:
    """Returns a setting in words."""
    by_driver = setting.inference == "driver"
    how = f"groups={setting.groups}" if by_driver else f"T={setting.chunk_steps}"
    return f"{setting.inference}, {how}, {setting.workers} workers x {setting.envs}"


def cluster_of(measured: Measured, latency_us: float | None, gbit: float | None) -> Cluster:
    """Returns the predicted cluster: its network as given, or by default that of the measurements.

    Args:
        measured: On nodes simulated on one machine, or on a cluster, whose network is in the measurements.
        latency_us: One way, in addition to what was measured.
        gbit: Bandwidth of the driver's network, likewise.
    """
    simulated = measured.shared_cores is not None
    latency_us = latency_us if latency_us is not None else _LATENCY_US if simulated else 0.0
    gbit = gbit if gbit is not None else _GBIT if simulated else math.inf
    return Cluster(None, latency_us * 1e-6, gbit * 1e9 / 8)
