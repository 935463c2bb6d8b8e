"""What a run says of itself while it trains: ``status.json`` in its directory, replaced at most once a second."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import psutil

from rayvec.errors import ConfigError
from rayvec.training.atomic_files import finite, is_of

__all__ = ["NodeStatus", "RunStatus", "directory_advice", "end_state", "read_status", "write_status"]


def end_state(error: BaseException | None) -> str:
    """Returns :attr:`RunStatus.state` of a run that has ended with `error`, or without one."""
    return "finished" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node of a run.

    Attributes:
        node: The node for a person.
        num_envs: Environments that it holds.
        num_workers: Processes that step them.
        steps_per_s: Environment steps per second of wall time.
        step_s: Mean duration of a step of one environment, in seconds; None if the workers do not measure it.
        efficiency: Share of the workers' time that environments take; None if the workers do not measure it.
        n_restarts: Restarts of its environments since the process began.
        n_pending: Chunks that are requested and not finished.
        seen_s: Seconds since it returned steps, when the status was written.
    """

    node: str
    num_envs: int
    num_workers: int
    steps_per_s: float
    step_s: float | None
    efficiency: float | None
    n_restarts: int
    n_pending: int
    seen_s: float


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run.

    Attributes:
        run_dir: Its directory.
        title: Environment, algorithm and seed.
        state: ``"running"``, or how it ended: ``"finished"``, ``"interrupted"`` or ``"failed"``.
        steps: Environment steps taken.
        total_steps: Steps at its end.
        steps_per_s: Environment steps per second of wall time.
        return_mean: Mean return of the last 100 episodes; None before the first one.
        staleness: Updates published after the oldest weights that acted.
        time_share: Share of the wall time by activity.
        restarts: Restarts since the process began, by kind.
        nodes: Its nodes; none before the first iteration.
        host: Name of the host that trains.
        pid: The process that trains.
        began_s: When that process began, in seconds since the epoch of that host.
        number: Counts what the process has written.
    """

    run_dir: str
    title: str
    state: str
    steps: int
    total_steps: int
    steps_per_s: float = 0.0
    return_mean: float | None = None
    staleness: int = 0
    time_share: Mapping[str, float] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=dict)
    nodes: tuple[NodeStatus, ...] = ()
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    began_s: float = field(default_factory=lambda: psutil.Process().create_time())
    number: int = 0

    def to_json(self) -> str:
        """Returns it as JSON, with null for numbers that are not finite."""
        return json.dumps(finite(asdict(self)), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> RunStatus:
        """Returns what `to_json` wrote; names that are unknown here are left out.

        Raises:
            ValueError: It is something else.
        """
        try:
            values = _known(cls, json.loads(text))
            nodes = tuple(NodeStatus(**_known(NodeStatus, node)) for node in values.pop("nodes"))
            return cls(**values, nodes=nodes)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"no status of a run: {error}") from error

    @property
    def has_died(self) -> bool:
        """Whether its process is gone, as far as this host can know: another host's processes count as alive."""
        if self.state != "running" or self.host != socket.gethostname():
            return False
        try:
            return bool(abs(psutil.Process(self.pid).create_time() - self.began_s) > 1.0)
        except psutil.NoSuchProcess:
            return True


def _known(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    found = {name: value for name, value in values.items() if name in hints}
    for name, value in found.items():
        if name != "nodes" and not is_of(value, hints[name]):
            raise TypeError(f"{name}: {value!r}"[:200])
    return found


def write_status(run_dir: Path, status: RunStatus) -> None:
    """Replaces the status of a run; a reader sees the old one or the new one."""
    partial = run_dir / ".status.tmp"  # only one process trains in a directory; `written_whole` would flush to the disk
    try:
        partial.write_text(status.to_json(), encoding="utf-8")
        partial.replace(run_dir / "status.json")
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_status(run_dir: Path) -> RunStatus:
    """Returns the last status of a run.

    Raises:
        ConfigError: `run_dir` is not the directory of a run, or the run has not written a status.
    """
    path = run_dir / "status.json"
    try:
        return RunStatus.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if not os.path.exists(run_dir / "config.yaml"):
            is_hidden = isinstance(error, PermissionError)
            raise ConfigError(
                "`rayvec top` shows a run while it trains.",
                expected="the directory of a run, such as one below runs/",
                got=f"{run_dir}, which {'may not be read' if is_hidden else 'has no config.yaml'}",
                remedy=f"{directory_advice(run_dir)} Or pass --address for the runs on a Ray cluster.",
            ) from None
        raise ConfigError(
            "A run writes its status when training begins.",
            expected=f"a readable file {path}",
            got=getattr(error, "strerror", None) or str(error),
            remedy="Wait until training has begun, or resume the run with this version of rayvec.",
        ) from None


def directory_advice(path: Path) -> str:
    """Returns sentences that say what to pass in place of a path that is not the directory of a run."""
    run_dir = next((each for each in path.parents if (each / "config.yaml").exists()), None)
    if run_dir is not None:
        name, is_other = path.relative_to(run_dir).as_posix(), path.suffix == ".pt" and path.name != "checkpoint.pt"
        option = f" For this checkpoint add --checkpoint {name}, or checkpoint={name!r} in Python." if is_other else ""
        return f"Pass the directory of the run, {str(run_dir)!r}.{option}"
    for config in sorted(path.glob("seed*/config.yaml")) if os.path.isdir(path) else ():
        return f"Pass one of its runs, such as {config.parent}."
    return "Pass the directory of a run, such as one below runs/."
