"""Rules: from what a node has to what that means for a run, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rayvec.cluster.software_versions import is_incompatible
from rayvec.node.worker_processes import FILES_OF_A_WORKER, SPARE_FILES

__all__ = ["Finding", "Node", "of_network", "of_node", "of_versions"]

Level = Literal["ok", "warning", "error"]

_FEW_FILES = 4096
_CORE_BYTES = 64 << 20
"""Memory that a worker with a small environment takes, with a reserve."""
_LEAST_SHM_BYTES = 16 << 20
_SLOW_S, _NARROW_BYTES_PER_S = 0.005, 12.5e6
_NEEDED = ("rayvec", "ray", "numpy", "gymnasium")
_INSTALL = "Install the same versions on all nodes, in the environment from which `ray start` runs."


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        level: ``"error"`` where a run would fail, ``"warning"`` where it would be slow or might fail.
        node: The node's address, or ``"driver"``.
        check: What was checked.
        found: What was found.
        meaning: What that means for a run; empty if all is well.
        remedy: What to do; empty if all is well.
    """

    level: Level
    node: str
    check: str
    found: str
    meaning: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.level:7}  {self.node:15}  {self.check:11} {self.found}"
        return text if self.level == "ok" else f"{text.rstrip('.')}. {self.meaning} {self.remedy}"


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster as Ray sees it.

    Attributes:
        node_id: Ray's id.
        name: Its name in the report: the address, with a part of the id where several nodes have one address.
        address: Its IP address.
        resources: What it has in Ray.
        is_driver: Whether this process runs on it.
    """

    node_id: str
    name: str
    address: str
    resources: Mapping[str, float]
    is_driver: bool

    @property
    def cores(self) -> int:
        """Cores that it has in Ray."""
        return int(self.resources.get("CPU", 0))


def of_versions(facts: Mapping[str, Any], driver: Mapping[str, Any], name: str) -> Iterator[Finding]:
    """Yields what the versions on a node mean, beside those of the driver."""
    ours, theirs = driver["versions"], facts["versions"]
    missing = [package for package in _NEEDED if theirs[package] is None]
    if missing:
        where = f"no {', no '.join(missing)}"
        yield Finding("error", name, "versions", where, "Workers cannot start there.", _INSTALL)
    others = [package for package in ours if theirs[package] != ours[package] and package not in missing]
    if not others and not missing:
        same = "" if name == "driver" else "as the driver: "
        listed = ", ".join(f"{package} {version}" for package, version in theirs.items() if version)
        yield Finding("ok", name, "versions", same + listed)
    for package in others:
        found = f"{package} {theirs[package] or 'missing'}, but {ours[package] or 'none'} on the driver"
        yield _judged(
            name,
            "versions",
            found,
            (
                _is_fatal(package, ours[package], theirs[package]),
                "error",
                "What the driver sends may not be read there, or be read wrongly.",
                _INSTALL,
            ),
            (True, "warning", "Results may depend on the node.", _INSTALL),
        )
    if facts["digest"] and facts["digest"] != driver["digest"] and "rayvec" not in others:
        found = f"rayvec {theirs['rayvec']} with source {facts['digest']}, but {driver['digest']} on the driver"
        yield Finding("error", name, "versions", found, "The same version has different code.", _INSTALL)


def _is_fatal(package: str, ours: str | None, theirs: str | None) -> bool:
    """Whether a run fails with these versions; None stands for a missing package."""
    if ours is None or theirs is None:
        return package in _NEEDED
    return is_incompatible(package, ours, theirs)


def of_node(
    facts: Mapping[str, Any], name: str, node: Node | None = None, driver_niceness: int = 0
) -> Iterator[Finding]:
    """Yields what a node's cores, limits, memory and GPUs mean.

    Args:
        facts: What `read_facts` returned there.
        name: Its name in the report.
        node: The node as Ray sees it; None for this process.
        driver_niceness: Of this process.
    """
    yield _cores(facts, name, node)
    if node is not None:
        yield _niceness(facts, name, driver_niceness)
    workers = max(1, node.cores) if node is not None else int(facts["cores"])
    yield _files(facts, name, workers)
    if node is not None:
        yield _shm(facts, name, int(node.resources.get("object_store_memory", 0)))
    else:
        yield Finding("ok", name, "/dev/shm", f"{_gib(facts['shm_free'])} free of {_gib(facts['shm_total'])}")
    yield _memory(facts, name, workers, node)
    yield _gpus(facts, name, node)


_Problem = tuple[bool, Level, str, str]
"""Whether something is wrong with a node, how bad that is, what it means for a run, and what to do."""


def _judged(name: str, check: str, found: str, *problems: _Problem) -> Finding:
    """Returns the first problem that exists as a finding; without any, all is well."""
    for exists, level, meaning, remedy in problems:
        if exists:
            return Finding(level, name, check, found, meaning, remedy)
    return Finding("ok", name, check, found)


def _cores(facts: Mapping[str, Any], name: str, node: Node | None) -> Finding:
    usable = min(float(facts["cores"]), facts["quota_cores"] or float("inf"))
    found = f"{facts['cores']} of {facts['machine_cores']} usable by this process"
    if facts["quota_cores"] is not None:
        found += f", a quota of {facts['quota_cores']:g}"
    if node is None:
        return _judged(name, "cores", found)
    return _judged(
        name,
        "cores",
        f"{node.cores} in Ray, {found}",
        (
            node.cores > usable,
            "warning",
            f"Ray starts {node.cores} workers, which share {usable:g} cores: each step takes longer.",
            f"Start Ray with --num-cpus={max(1, int(usable))}, or raise the limit of the container.",
        ),
    )


def _niceness(facts: Mapping[str, Any], name: str, of_driver: int) -> Finding:
    is_nice = facts["niceness"] > max(0, of_driver)
    return _judged(
        name,
        "niceness",
        f"workers at nice {facts['niceness']}",
        (is_nice, "warning", "A busy driver starves them.", "Start Ray with RAY_worker_niceness=0."),
    )


def _files(facts: Mapping[str, Any], name: str, workers: int) -> Finding:
    soft, hard = facts["files_soft"], facts["files_hard"]
    needed = FILES_OF_A_WORKER * workers + SPARE_FILES
    remedy = "Run `ulimit -n 65536` before `ray start`, or set LimitNOFILE of its service."
    meaning = f"{workers} workers need {needed}: a run ends when it starts."
    return _judged(
        name,
        "open files",
        f"{soft} allowed, can be raised to {hard}".replace("-1", "any number"),
        (0 <= hard < needed, "error", meaning, remedy),
        (0 <= hard < _FEW_FILES, "warning", "Ray and many workers may run out of them.", remedy),
    )


def _shm(facts: Mapping[str, Any], name: str, store: int) -> Finding:
    remedy = "Enlarge it (docker run --shm-size, a memory volume in Kubernetes), or lower --object-store-memory."
    is_full, is_small = facts["shm_free"] < _LEAST_SHM_BYTES, facts["shm_total"] < store
    return _judged(
        name,
        "/dev/shm",
        f"{_gib(facts['shm_free'])} free of {_gib(facts['shm_total'])}, objects of Ray may take {_gib(store)}",
        (is_full, "error", "Chunks and weights have no room: a run fails.", remedy),
        (is_small, "warning", "Chunks and weights go to the disk or fail.", remedy),
    )


def _memory(facts: Mapping[str, Any], name: str, workers: int, node: Node | None) -> Finding:
    limit, free = facts["memory_limit"], facts["memory_free"]
    claimed = 0 if node is None else int(sum(node.resources.get(key, 0) for key in ("memory", "object_store_memory")))
    found = f"{_gib(free)} free" + (f", a limit of {_gib(limit)}" if limit is not None else "")
    found += f", Ray gives out {_gib(claimed)}" if claimed else ""
    needed = workers * _CORE_BYTES
    return _judged(
        name,
        "memory",
        found,
        (
            limit is not None and limit < claimed,
            "warning",
            "The kernel kills processes of a run before Ray notices that memory is short.",
            "Start Ray with a lower --memory and --object-store-memory, or raise the limit of the container.",
        ),
        (
            min(free, limit or free) < needed,
            "warning",
            f"{workers} workers need about {_gib(needed)} and more: some may be killed.",
            "Use fewer workers_per_node, or free memory.",
        ),
    )


def _gpus(facts: Mapping[str, Any], name: str, node: Node | None) -> Finding:
    gpus, claimed = facts["gpus"], 0 if node is None else int(node.resources.get("GPU", 0))
    cuda = f"torch for CUDA {facts['torch_cuda']}" if facts["torch_cuda"] else "torch without CUDA"
    found = f"{gpus} on the machine, {cuda}" + (f", {claimed} in Ray" if node is not None else "")
    return _judged(
        name,
        "GPU",
        found if gpus or claimed else "none",
        (
            claimed > gpus,
            "error",
            "Learners with learner_device='cuda' cannot start there.",
            "Give the container its GPUs, or start Ray with --num-gpus=0.",
        ),
        (
            bool(gpus) and not facts["torch_cuda"],
            "warning",
            "Learners cannot use the GPU.",
            "Install torch for CUDA, or leave learner_device='cpu'.",
        ),
        (
            bool(gpus) and node is not None and not claimed,
            "warning",
            "Ray gives no GPU to learners.",
            "Start Ray with --num-gpus.",
        ),
    )


def of_network(name: str, round_trip_s: float, bytes_per_s: float) -> Finding:
    """Returns what the round trip and the bandwidth between the driver and a node mean."""
    return _judged(
        name,
        "network",
        f"round trip {1e3 * round_trip_s:.2f} ms, {8e-9 * bytes_per_s:.2f} Gbit/s",
        (
            round_trip_s > _SLOW_S,
            "warning",
            "Every `env.step` waits for it.",
            "Collect in chunks (inference='worker').",
        ),
        (
            bytes_per_s < _NARROW_BYTES_PER_S,
            "warning",
            "Chunks with large observations wait for it.",
            "Train with learners='decentralized'.",
        ),
    )


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 0.95 * 2**30 else f"{count / 2**20:.0f} MiB"
