"""Rules: from what a node has to what that means for a run, and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from rayvec.cluster.node_facts import is_incompatible
from rayvec.node.processes import FILES_OF_A_WORKER, SPARE_FILES

_FEW_FILES, _LEAST_SHM_BYTES, _SLOW_S = 4096, 16 << 20, 0.005
_INSTALL = "Install the same versions on all nodes, in the environment from which `ray start` runs."
_LIMIT_FILES = "Run `ulimit -n 65536` before `ray start`, or set LimitNOFILE of its service."
_ENLARGE = "Enlarge it (docker run --shm-size, a memory volume in Kubernetes), or lower --object-store-memory."
_FIREWALL = "A firewall may block the ports: open them between the nodes."


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
        level: ``"error"`` where a run would fail, ``"warning"`` where it would be slow or might fail.
        node: The node's address, or ``"driver"``.
        check: What was checked.
        found: What was found.
        meaning: What that means for a run, and what to do; empty if all is well.
    """

    level: Literal["ok", "warning", "error"]
    node: str
    check: str
    found: str
    meaning: str = ""

    def __str__(self) -> str:
        return f"{self.level:7}  {self.node:15}  {self.check:11} {self.found}{self.meaning and '. '}{self.meaning}"


def _judged(node: str, check: str, found: str, *problems: tuple[bool, Literal["warning", "error"], str]) -> Finding:
    """Returns the first problem that exists as a finding; without any, all is well.

    Args:
        node: Its name in the report.
        check: What was checked.
        found: What was found.
        problems: Of each, whether it exists, how bad it is, and what it means and what to do.
    """
    for exists, level, meaning in problems:
        if exists:
            return Finding(level, node, check, found.rstrip("."), meaning)
    return Finding("ok", node, check, found)


def versions(facts: Mapping[str, Any], driver: Mapping[str, Any], node: str) -> Iterator[Finding]:
    """Yields what the versions on a node mean, beside those of the driver."""
    ours, theirs = driver["versions"], facts["versions"]
    if ours == theirs:
        yield Finding("ok", node, "versions", ", ".join(f"{name} {version}" for name, version in theirs.items()))
    for name in (name for name in ours if theirs[name] != ours[name]):
        is_missing = "missing" in (ours[name], theirs[name])
        yield _judged(
            node,
            "versions",
            f"{name} {theirs[name]}, but {ours[name]} on the driver",
            (
                not is_missing and is_incompatible(name, ours[name], theirs[name]),
                "error",
                f"Workers can't start there, or read what the driver sends wrongly. {_INSTALL}",
            ),
            (True, "warning", f"Results may depend on the node. {_INSTALL}"),
        )


def resources(
    facts: Mapping[str, Any], node: str, in_ray: Mapping[str, float], driver_niceness: int
) -> Iterator[Finding]:
    """Yields what a node's cores, limits and GPUs mean for a run.

    Args:
        facts: What `read_facts` returned there.
        node: Its name in the report.
        in_ray: What it has in Ray.
        driver_niceness: Of the driver's process.
    """
    cores, quota = int(in_ray.get("CPU", 0)), facts["quota_cores"]
    usable = max(1, math.ceil(min(facts["cores"], quota or facts["cores"])))
    found = f"{cores} in Ray, {facts['cores']} usable" + ("" if quota is None else f", a quota of {quota:g}")
    remedy = f"Workers share the usable cores. Start Ray with --num-cpus={usable}, or raise the container's limit."
    yield _judged(node, "cores", found, (cores > usable, "warning", remedy))
    is_nice = facts["niceness"] > max(0, driver_niceness)
    starved = "A busy driver starves them. Start Ray with RAY_worker_niceness=0."
    yield _judged(node, "niceness", f"workers at nice {facts['niceness']}", (is_nice, "warning", starved))
    files, needed = facts["files"], FILES_OF_A_WORKER * cores + SPARE_FILES
    yield _judged(
        node,
        "open files",
        "any number allowed" if files < 0 else f"{files} allowed",
        (0 <= files < needed, "error", f"{cores} workers need {needed}: a run ends when it starts. {_LIMIT_FILES}"),
        (0 <= files < _FEW_FILES, "warning", f"Ray and many workers may run out of them. {_LIMIT_FILES}"),
    )
    free, total, store = (
        int(size) >> 20 for size in (facts["shm_free"], facts["shm_total"], in_ray.get("object_store_memory", 0))
    )
    yield _judged(
        node,
        "/dev/shm",
        f"{free:,} MiB free of {total:,} MiB, objects of Ray may take {store:,} MiB",
        (facts["shm_free"] < _LEAST_SHM_BYTES, "error", f"Chunks and weights have no room: a run fails. {_ENLARGE}"),
        (total < store, "warning", f"Chunks and weights go to the disk or fail. {_ENLARGE}"),
    )
    gpus, claimed, visible = facts["gpus"], int(in_ray.get("GPU", 0)), facts["visible_gpus"]
    shown = "all" if visible is None else visible or "none"
    yield _judged(
        node,
        "GPU",
        f"{gpus} on the machine, {claimed} in Ray; environments see {shown}",
        (claimed > gpus, "error", "learner_device='cuda' fails there. Start Ray with --num-gpus=0."),
        (
            gpus > 0 and visible == "",
            "warning",
            "Start Ray there with CUDA_VISIBLE_DEVICES unset, or with their numbers.",
        ),
        (gpus > claimed, "warning", f"Ray does not give all of them to learners. Start Ray with --num-gpus={gpus}."),
    )


def connection(node: str, there: float | str, back: float | str) -> Finding:
    """Returns what the round trips between the driver and a node, or the errors in their place, mean."""
    found = {"from the driver": there, "to the driver": back}
    wrong = "; ".join(f"{way}: {each}" for way, each in found.items() if isinstance(each, str))
    slowest = max(each if isinstance(each, float) else 0.0 for each in found.values())
    return _judged(
        node,
        "connection",
        wrong or f"round trip {1e3 * slowest:.2f} ms",
        (bool(wrong), "error", f"The driver can't step environments there, or ranks can't connect. {_FIREWALL}"),
        (slowest > _SLOW_S, "warning", "Every `env.step` waits for it. Collect in chunks (inference='worker')."),
    )
