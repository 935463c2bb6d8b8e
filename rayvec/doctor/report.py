"""Examines the nodes of a Ray cluster, by tasks that claim no core, and prints what is found."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayvec.cluster.ray_session import ray_session
from rayvec.doctor.facts import echo, measure_env, read_facts, round_trip
from rayvec.doctor.rules import Finding, connection, resources, versions
from rayvec.envs.factory import EnvFactory
from rayvec.envs.step_time import StepTime
from rayvec.errors import counted, first_line

_NO_RAY = "Only num_nodes=0 works, which needs no Ray. Start Ray (ray start --head), or check its address."
_NO_ANSWER = "The node is lost or overloaded, or can't import rayvec: see Ray's logs there."
_ANSWER_S, _SHORT_STEP_S = 300.0, 1e-3
_MAX_PER_CORE, _MAX_WAITING = 8, 64
"""The most environments that are recommended for each core, and on each node if their steps wait."""


def report(address: str | None, env_id: str | None, *, as_json: bool = False) -> int:
    """Examines a cluster and prints what it finds; returns the exit code: 1 if a run would fail.

    Args:
        address: Of a Ray cluster; None for ``RAY_ADDRESS`` or a private cluster.
        env_id: An environment to measure on each node; None for none.
        as_json: Whether to print one JSON document, with the level of the worst finding and all findings.

    Raises:
        EnvIdError: No environment of that id is registered.
    """
    findings = []
    for finding in _examine(address, env_id):
        findings.append(finding)
        print("" if as_json else f"{finding}\n", end="", flush=True)
    count = Counter(finding.level for finding in findings)
    worst = "error" if count["error"] else "warning" if count["warning"] else "ok"
    summary = f"{worst}: {counted(count['error'], 'error')}, {counted(count['warning'], 'warning')}"
    content = {"level": worst, "findings": [finding._asdict() for finding in findings]}
    print(json.dumps(content, indent=1) if as_json else summary)
    return int(worst == "error")


def _examine(address: str | None, env_id: str | None) -> Iterator[Finding]:
    """Yields the findings of this process and of every node of a cluster."""
    factory = b"" if env_id is None else EnvFactory.build(env_id, 1).to_bytes()
    driver = read_facts()
    yield from versions(driver, driver, "driver")
    try:
        session = ray_session(address)
    except Exception as error:
        yield Finding("error", "driver", "ray", f"{type(error).__name__}: {first_line(error)}", _NO_RAY)
        return
    with session:
        yield Finding("ok", "driver", "ray", f"answers: {address or os.environ.get('RAY_ADDRESS') or 'a private Ray'}")
        measured: list[tuple[int, StepTime]] = []
        alive = [node for node in ray.nodes() if node["Alive"]]
        for node in sorted(alive, key=lambda node: node["NodeID"] != ray.get_runtime_context().get_node_id()):
            try:
                yield from _node(node, driver)
                if env_id is not None and node["Resources"].get("CPU"):
                    found = _ask(node, measure_env, factory)
                    yield _times(node, env_id, found)
                    measured += [(int(node["Resources"]["CPU"]), found)] * isinstance(found, StepTime)
            except ray.exceptions.RayError as error:
                yield Finding("error", node["NodeManagerAddress"], "answer", first_line(error), _NO_ANSWER)
        if env_id is not None and measured:
            yield Finding("ok", "driver", "command", _command(env_id, measured))


def _ask(node: Mapping[str, Any], function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function on a node."""
    where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    task: Any = ray.remote(function)
    ref = task.options(num_cpus=0, max_retries=0, scheduling_strategy=where).remote(*args)
    return ray.get(ref, timeout=_ANSWER_S)


def _node(node: Mapping[str, Any], driver: Mapping[str, Any]) -> Iterator[Finding]:
    name, here = node["NodeManagerAddress"], ray.util.get_node_ip_address()
    facts = _ask(node, read_facts)
    yield from versions(facts, driver, name)
    yield from resources(facts, name, node["Resources"], driver["niceness"])
    there = round_trip(name, _ask(node, echo, name))
    yield connection(name, there, _ask(node, round_trip, here, echo(here)))


def _times(node: Mapping[str, Any], env_id: str, found: StepTime | str) -> Finding:
    name = node["NodeManagerAddress"]
    if isinstance(found, str):
        return Finding(
            "error", name, "environment", f"{env_id}: {found}", "Install there what it needs, or correct it."
        )
    return Finding("ok", name, "environment", f"{env_id}: steps {'wait' if found.waits else 'compute'}: {found}")


def _command(env_id: str, measured: list[tuple[int, StepTime]]) -> str:
    """Returns a command line: more environments than cores where steps wait, or are so short that calls cost more."""
    cores = min(cores for cores, _ in measured)
    step_s = max(found.step_s for _, found in measured)
    waits = all(found.waits for _, found in measured)
    each = max(cores, _MAX_WAITING) if waits else cores * min(_MAX_PER_CORE, max(1, round(_SHORT_STEP_S / step_s)))
    nodes = f"--num-nodes {len(measured) if len(measured) > 1 else 0}"
    return f"rayvec train ppo --env-id {shlex.quote(env_id)} --num-envs {len(measured) * each} {nodes}"
