"""``rayvec bench model``: fits the cost model, predicts a larger cluster, and checks the model."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from rayvec.bench.cost_model.checking import (
    SEARCH,
    SEARCH_ENVS,
    compare_overheads,
    describe,
    fit_errors,
    show_checks,
    show_search,
)
from rayvec.bench.cost_model.fitting import Observation
from rayvec.bench.cost_model.measuring import (
    CHECK_NODES,
    CHECK_WORKERS,
    FIT_NODES,
    FIT_WORKERS,
    Measured,
    check_settings,
    fit_settings,
    measure_policy,
    measure_settings,
)
from rayvec.bench.cost_model.model import ASSUMPTIONS, Cluster, Fit, Setting, recommend, settings_for, steps_per_s
from rayvec.bench.results import Results, old_design
from rayvec.bench.settings import Model, check_any, jitter_sigma
from rayvec.bench.simulate import Nodes, check_memory, nodes
from rayvec.bench.terminal import console, show_table, ticking
from rayvec.config.schema import check
from rayvec.errors import ConfigError

__all__ = ["cluster_of", "run"]

_LATENCY_US, _GBIT = 100.0, 10.0
"""Of the predicted network, where nodes were simulated on one machine."""


def run(settings: Model, mentioned: frozenset[str] = frozenset()) -> None:
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
    results, terminal = Results.of("model", settings), console()
    try:
        with ExitStack() as stack:
            _Plan(settings, results, terminal, stack).run()
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
        terminal: For the tables.
        stack: Ends the nodes, which start when they are needed.
    """

    def __init__(self, settings: Model, results: Results, terminal: Console, stack: ExitStack) -> None:
        self._settings, self._results, self._terminal, self._stack = settings, results, terminal, stack
        self._sigma, self._obs_bytes = jitter_sigma(settings.jitter), 4 * settings.obs_size
        self._nodes: Nodes | None = None

    def run(self) -> None:
        settings, results = self._settings, self._results
        policy_s = measure_policy(settings.obs_size, settings.hidden_size)
        measured = self._measured(policy_s) if settings.fit is None else Measured.read(settings.fit)
        measured.policy_s = policy_s
        found = measured.fit()
        errors = fit_errors(found, measured.observations, measured.shared_cores)
        results.extra = {**asdict(measured), "fit": asdict(found), "fit_error": statistics.median(errors), "checks": []}
        results.write()
        if settings.check:
            results.extra["checks"] = self._checks(found, measured)
        self._predict(found, cluster_of(measured, settings.network_latency_us, settings.network_gbit))
        self._terminal.print("Assumptions:", *(f"- {text}" for text in ASSUMPTIONS), sep="\n  ")
        results.notes += ASSUMPTIONS
        results.finish(self._terminal)

    def _where(self) -> Nodes:
        """Returns the nodes that are measured on, started at the first call."""
        if self._nodes is None:
            most_nodes = max(CHECK_NODES) if self._settings.check else max(FIT_NODES)
            if self._settings.address is None:
                most_envs = max(max(FIT_NODES) * max(FIT_WORKERS), max(CHECK_NODES) * CHECK_WORKERS)
                check_memory(most_nodes, ("rayvec",), most_envs)
            self._nodes = self._stack.enter_context(nodes(self._settings.address))
            self._nodes.check(most_nodes, CHECK_WORKERS)
            cores = self._nodes.cores(max(FIT_NODES), max(FIT_WORKERS))
            self._terminal.print(f"Measured on {self._nodes.describe(cores)}.")
        return self._nodes

    def _measure(self, todo: Sequence[Setting], name: str) -> list[Observation]:
        def keep(found: list[Observation]) -> None:
            self._results.extra[name] = [asdict(each) for each in found]
            self._results.write()

        where = self._where()
        self._terminal.print(f"measuring {len(todo)} settings, about {math.ceil(len(todo) / 10)} minutes")
        with ticking(len(todo), self._terminal) as ticker:
            cores = where.cores(max(FIT_NODES), max(FIT_WORKERS))
            return measure_settings(todo, where, cores, self._settings.window, ticker, keep)

    def _measured(self, policy_s: tuple[float, float]) -> Measured:
        where = self._where()
        self._results.extra["interrupted"] = True
        todo = fit_settings(self._sigma, self._obs_bytes, where.cores(max(FIT_NODES), max(FIT_WORKERS)))
        observations = self._measure(todo, "observations")
        del self._results.extra["interrupted"]
        return Measured(observations, len(os.sched_getaffinity(0)) if where.simulated else None, policy_s)

    def _checks(self, found: Fit, measured: Measured) -> list[dict[str, Any]]:
        """Measures what is missing, and compares."""
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
        show_checks(checks, self._terminal)
        base = replace(SEARCH, sigma=self._sigma, obs_bytes=self._obs_bytes)
        tried = measured.search_observations
        if not tried:
            workers = self._where().cores(SEARCH.nodes, SEARCH.workers)
            tried = self._measure(list(settings_for(base, SEARCH_ENVS, workers)), "search_observations")
        return [*checks, show_search(found, tried, base, cluster, self._terminal)]

    def _predict(self, found: Fit, network: Cluster) -> None:
        settings = self._settings
        old = {(48.0, row["nodes"], row["step_duration_s"]): row for row in old_design()}
        lines, advice = [], []
        for count in sorted(set(settings.nodes)):
            for step_s in sorted(set(settings.step_duration), reverse=True):
                cores = count * settings.cores_per_node
                base = Setting(
                    count, settings.cores_per_node, step_s=step_s, sigma=self._sigma, obs_bytes=self._obs_bytes
                )
                with_policy = replace(base, policy=settings.hidden_size > 0)
                best = recommend(found, with_policy, cores * settings.envs_per_core, settings.cores_per_node, network)
                row = {"nodes": count, "cores": cores, "step_duration_s": step_s, "ideal_steps_per_s": cores / step_s}
                cells = []
                for kind in ("driver", "worker"):
                    rate = steps_per_s(found, replace(base, inference=kind), network)
                    row |= {f"{kind}_steps_per_s": rate, f"{kind}_efficiency": rate * step_s / cores}
                    cells.append(f"{rate:,.0f} ({100 * rate * step_s / cores:.0f}%)")
                before = old.get((float(settings.cores_per_node), float(count), step_s))
                cells.append(f"{before['steps_per_s']:,.0f} ({before['efficiency_percent']:.0f}%)" if before else "")
                best_rate = steps_per_s(found, best, network)
                self._results.rows.append(
                    {
                        **row,
                        "old_design_steps_per_s": before["steps_per_s"] if before else None,
                        "recommended": asdict(best),
                        "recommended_steps_per_s": best_rate,
                    }
                )
                lines.append((str(count), str(cores), f"{step_s:g}", f"{cores / step_s:,.0f}", *cells))
                advice.append((str(count), f"{step_s:g}", describe(best), f"{best_rate:,.0f}"))
        title = f"Predicted for {settings.cores_per_node} cores per node, T=128 in chunks; the old design as measured"
        header = ("nodes", "cores", "step, s", "ideal", "rayvec, driver", "rayvec, worker, T=128", "old design")
        show_table(self._terminal, title, header, lines)
        policy = f"a policy of 2 x {settings.hidden_size} units" if settings.hidden_size else "no policy"
        title = f"Recommended for {settings.envs_per_core} environments per core and {policy}"
        show_table(self._terminal, title, ("nodes", "step, s", "setting", "steps/s"), advice)


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
