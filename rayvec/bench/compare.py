"""``rayvec bench compare``: steps/s and steps per CPU-second of rayvec and its peers in real environments."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from itertools import product
from typing import Any

from rayvec.bench.measured_processes import (
    COMPARE_PEERS,
    NOT_INSTALLED,
    check_peers,
    marked_environment,
    peer_process,
    rates,
    short_name,
    venvs,
)
from rayvec.bench.results import Results
from rayvec.bench.settings import Compare, check_any
from rayvec.bench.simulate import nodes
from rayvec.bench.terminal import show_split, show_table, spread, ticking
from rayvec.config.schema import check
from rayvec.envs.factory import EnvFactory
from rayvec.errors import ConfigError, RayvecError

__all__ = ["run"]

OURS = ("rayvec-driver", "rayvec-worker")
_CHUNK_STEPS = 128


def run(settings: Compare) -> None:
    """Measures, prints a table for each environment, and writes the files."""
    check(settings)
    check_any(settings, "env_id", "num_envs")
    check_peers(settings.peer, COMPARE_PEERS)
    check_peers((settings.reference,), COMPARE_PEERS, "--reference")
    if settings.reference == "rayvec-tcp":
        raise ConfigError(
            "--reference names a peer that runs without a cluster of its own.",
            expected="any peer but rayvec-tcp",
            got=settings.reference,
            remedy="Pass --reference process-pool, and rayvec-tcp as a --peer.",
        )
    pythons = venvs(settings.peer_venv)
    _check_envs(settings.env_id)
    results = Results.of("compare", settings)
    cells = list(product(settings.env_id, (*OURS, *settings.peer), sorted(set(settings.num_envs))))
    absent = set()
    with results.shown(_show), ticking(len(cells)) as tick:
        for env_id, way, num_envs in cells:
            name = short_name(way)
            tick(f"{env_id}, {name}, {num_envs} environments", 0.0)
            if (env_id, way) not in absent:
                task = _task(settings, env_id, way, num_envs)
                row = _measured(settings, way, task, pythons.get(name, sys.executable))
                results.add({"env_id": env_id, "way": name, "num_envs": num_envs, **row})
                absent |= {(env_id, way)} if "missing" in row else set()
            tick("", 1.0)


def _task(settings: Compare, env_id: str, way: str, num_envs: int) -> dict[str, Any]:
    workers = min(settings.workers or len(os.sched_getaffinity(0)), num_envs)
    return {
        "num_envs": num_envs,
        "workers": workers,
        "workers_per_node": workers,
        "nodes": 1 if way == "rayvec-tcp" else 0,  # 0: without Ray, whose start says nothing about steps
        "env_id": env_id,
        "inference": "worker" if way == "rayvec-worker" else "driver",
        "chunk_steps": _CHUNK_STEPS,
        "prefetch": way == "rayvec-worker",
        "hidden_sizes": settings.hidden_sizes,
    }


def _measured(settings: Compare, way: str, task: dict[str, Any], python: str) -> dict[str, Any]:
    """Returns how fast a way is and where its time goes, or why that is not known."""
    peer = "rayvec" if way.startswith("rayvec-") else way
    with ExitStack() as stack:
        environment = marked_environment()
        try:
            if way == "rayvec-tcp":  # the driver's own node has no cores
                cluster = stack.enter_context(nodes())
                cluster.grow(1, task["workers"])
                environment, task["address"] = cluster.environment, cluster.address
            row = _rates(settings, peer, task, environment, python)
        except RayvecError as error:
            return {"failed": str(error)}
        if "missing" in row or row["split"] or settings.hidden_sizes:  # a net takes time that is no state of its own
            return row
        try:
            return row | _divided(settings, peer, task, environment, python)
        except RayvecError as error:
            return row | {"undivided": str(error)}


def _rates(
    settings: Compare, peer: str, task: dict[str, Any], environment: dict[str, str], python: str
) -> dict[str, Any]:
    """Returns rates beside the reference; of the upper bound also where the time goes, which it measures itself."""
    with ExitStack() as stack:
        process, started = stack.enter_context(peer_process(peer, environment, task, python))
        if "missing" in started:
            return {"missing": started["missing"]}
        reference = process
        if peer != settings.reference:
            reference, _ = stack.enter_context(peer_process(settings.reference, marked_environment(), task))
        process.do("measure", seconds=min(0.3, settings.window), with_split=False)
        pairs = [  # interleaved, since the speed of a shared machine drifts
            [each.do("measure", seconds=settings.window, with_split=False) for each in (process, reference)]
            for _ in range(settings.repeats)
        ]
    own, references = map(list, zip(*pairs, strict=True))
    known = {"num_envs": started["num_envs"], "workers": task["workers"], "transport": started["transport"]}
    split = None if settings.hidden_sizes else own[0]["split"]
    return known | rates(own, references) | {"start_s": started["start_s"], "split": split}


def _divided(
    settings: Compare, peer: str, task: dict[str, Any], environment: dict[str, str], python: str
) -> dict[str, Any]:
    """Returns where the time goes, from another start with environments that record when they step."""
    seconds = min(0.5, settings.window)
    with peer_process(peer, environment, task, python, record=True) as (process, _):
        process.do("measure", seconds=min(0.3, seconds), with_split=False)
        split = process.do("measure", seconds=seconds, with_split=True)["split"]
    return {"split": split} if split else {"undivided": "its environments record no times"}


def _check_envs(env_ids: tuple[str, ...]) -> None:
    """Refuses ids that name no environment, before anything is measured.

    Raises:
        ConfigError: One of them.
    """
    for env_id in env_ids:
        try:
            EnvFactory.build(env_id, 1).make(0).close()
        except RayvecError:
            raise
        except Exception as error:
            raise ConfigError(
                "--env-id names environments that can be made.",
                expected="a registered environment whose libraries are installed",
                got=f"{env_id} ({type(error).__name__}: {error})",
                remedy="Install what it needs, or leave it out.",
            ) from error


def _show(results: Results) -> None:
    """Prints a table for each environment, and what could not be measured."""
    for env_id in dict.fromkeys(row["env_id"] for row in results.rows):
        rows = [row for row in results.rows if row["env_id"] == env_id]
        best: dict[str, float] = {}
        for row in rows:
            best[row["way"]] = max(best.get(row["way"], 0.0), row.get("steps_per_s", 0.0))
        reference = results.settings["reference"]
        show_table(
            f"{env_id}; each peer's best row has a *",
            ("", "envs", "transport", "steps/s", f"of {short_name(reference)}", "steps per CPU-second"),
            [_texts(row, best[row["way"]]) for row in rows],
        )
        divided = [((row["way"], row["num_envs"]), row["split"]) for row in rows if row.get("split")]
        if divided:
            title = f"{env_id}: where the time of the processes that step goes, percent"
            show_split(title, ("", "envs"), divided)
    for row in results.rows:
        what = f"{row['way']}, {row['env_id']}, {row['num_envs']} environments"
        if "undivided" in row:
            print(f"{what}: where its time goes is not known: {row['undivided']}")
        if "failed" in row:
            said = row["failed"].strip().splitlines()
            print(f"{what}: {said[0] if len(said) < 5 else f'{said[0][:120]} ... {said[-1]}'}")
        if "missing" in row:
            print(f"{row['way']}, {row['env_id']}: {NOT_INSTALLED} ({row['missing']})")


def _texts(row: dict[str, Any], best: float) -> tuple[str, ...]:
    if "steps_per_s" not in row:
        problem = NOT_INSTALLED if "missing" in row else "failed, see below"
        return row["way"], str(row["num_envs"]), problem, "", "", ""
    return (
        row["way"],
        str(row["num_envs"]),
        row["transport"],
        spread(row["steps_per_s_all"]) + ("*" if row["steps_per_s"] == best else ""),
        spread(row["of_bound_all"], ".2f"),
        f"{row['steps_per_cpu_s']:,.0f}",
    )
