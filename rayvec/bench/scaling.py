"""``rayvec bench scaling``: steps/s over nodes and step durations, beside peers and beside independent processes."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rayvec.config.schema import Bounds, check, plain
from rayvec.errors import ConfigError, RayvecError

if TYPE_CHECKING:
    from rayvec.bench.peers import PeerProcess
    from rayvec.bench.results import Results
    from rayvec.bench.simulate import Nodes
    from rayvec.bench.terminal import Ticker

__all__ = ["Scaling", "Stepper", "check_any", "emulated_task", "parse_jitter"]

Count = Annotated[int, Bounds(1)]
Positive = Annotated[float, Bounds(0, above=True)]
ENOUGH = 0.8
"""Share of the ideal that independent processes must reach for a cell to say anything about anybody."""
_CHUNK_S, _MOST_CHUNK_STEPS = 2.0, 128
_QUICK_NODES, _QUICK_DURATION_S, _QUICK_WINDOW_S, _QUICK_REPEATS = 2, 0.1, 0.8, 2
_START_S = {"tianshou-ray": 2.6}
"""Seconds to start an environment, of who takes long."""
_ONE_MACHINE = ("gymnasium-sync", "gymnasium-async", "tianshou-subproc", "tianshou-shmem")
"""Peers that know of no cluster: on one, all their processes are on the driver's machine."""


def parse_jitter(text: str | None) -> float:
    """Returns the standard deviation of the logarithm of step durations.

    Raises:
        ConfigError: The text is not of the form ``lognormal:SIGMA``.

    >>> parse_jitter("lognormal:0.5"), parse_jitter(None)
    (0.5, 0.0)
    """
    if text is None:
        return 0.0
    kind, _, sigma = text.partition(":")
    try:
        if kind == "lognormal" and 0 < float(sigma) <= 3:
            return float(sigma)
    except ValueError:
        pass
    raise ConfigError(
        "--jitter says how step durations vary around their mean.",
        expected="lognormal:SIGMA with SIGMA above 0 up to 3",
        got=text,
        remedy="Pass for example --jitter lognormal:0.5, or leave it out for steps of equal length.",
    )


def chunk_length(step_s: float, chosen: int | None = None) -> int:
    """Returns T of a chunk: about two seconds' worth, at most 128 steps, unless chosen.

    >>> [chunk_length(step_s) for step_s in (1.0, 0.1, 0.001)]
    [2, 20, 128]
    """
    return chosen or min(_MOST_CHUNK_STEPS, max(1, round(_CHUNK_S / step_s)))


def check_any(settings: Any, *names: str) -> None:
    """Refuses settings that list nothing.

    Raises:
        ConfigError: One of them is empty.
    """
    for name in names:
        if not getattr(settings, name):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} lists what is measured.",
                expected="at least one value",
                got="none",
                remedy=f"Pass values after {option}, or leave it out.",
            )


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Measure steps/s over nodes and step durations, beside peers and beside independent processes.

    Without --address the nodes are simulated on this machine: cores are emulated by environments that sleep.
    """

    nodes: tuple[Count, ...] = (1, 2, 4)
    """Numbers of nodes."""

    cores_per_node: Count = 8
    """Environments on each node, one for each core, which is emulated where there are fewer."""

    step_duration: tuple[Positive, ...] = (1.0, 0.1, 0.01, 0.001)
    """Seconds that an environment takes for a step."""

    inference: tuple[Literal["driver", "worker"], ...] = ("driver", "worker")
    """Where the policy of rayvec acts: in the driver, every step, or in the workers, whole chunks."""

    peer: tuple[str, ...] = ("tianshou-ray", "tianshou-subproc")
    """What is measured beside it: gymnasium-sync, gymnasium-async, tianshou-ray, tianshou-subproc, tianshou-shmem,
    floor (independent processes, which are always measured)."""

    work: Literal["sleep", "busy"] = "sleep"
    """Whether a step sleeps, like a core of its own, or burns that much CPU time."""

    jitter: str | None = None
    """How durations vary around their mean, such as lognormal:0.5; unset: not at all."""

    obs_size: Count = 4
    """Numbers in an observation, float32."""

    chunk_steps: Count | None = None
    """Steps of a chunk; unset: about two seconds' worth, at most 128."""

    repeats: Count = 3
    """Windows of each cell, in turns with the floor's."""

    window: Positive = 1.5
    """Seconds of a window at least; of long steps it has six, or twenty where they take less than half a second."""

    quick: bool = False
    """At most 2 nodes, steps of at most 0.1 s, short windows, and no tianshou-ray: under three minutes."""

    resume: Path | None = None
    """Go on with this result file, with its own settings."""

    address: str | None = None
    """Measure on the Ray cluster at this address; unset: simulate nodes on this machine."""

    out: Path = Path("runs/bench-scaling")
    """Directory for scaling.json, scaling.csv and the plots."""

    def run(self, mentioned: frozenset[str] = frozenset()) -> None:
        """Measures, prints the table, and writes the files."""
        check(self)
        parse_jitter(self.jitter)
        check_any(self, "nodes", "step_duration", "inference")
        from rayvec.bench.peers import SCALING_PEERS, check_peers

        check_peers(self.peer, tuple(name for name in SCALING_PEERS if name != "rayvec"))
        from rayvec.bench.scaling_run import run

        run(self, mentioned)

    def narrowed(self) -> Scaling:
        """Returns the settings that are in force, --quick worked in."""
        if not self.quick:
            return self
        return dataclasses.replace(
            self,
            nodes=tuple(n for n in self.nodes if n <= _QUICK_NODES) or (min(self.nodes),),
            step_duration=tuple(d for d in self.step_duration if d <= _QUICK_DURATION_S) or (min(self.step_duration),),
            peer=tuple(name for name in self.peer if name != "tianshou-ray"),
            repeats=min(self.repeats, _QUICK_REPEATS),
            window=min(self.window, _QUICK_WINDOW_S),
        )

    def window_s(self, step_s: float) -> float:
        """Returns the seconds of a window for steps of this duration."""
        return max(self.window, (20 if step_s < 0.5 else 6) * step_s * (0.5 if self.quick else 1.0))

    def ways(self) -> list[str]:
        """Returns what is measured in turns with the floor, by the names of rows."""
        return [f"rayvec-{where}" for where in self.inference] + [name for name in self.peer if name != "floor"]

    def cells(self) -> Iterator[tuple[int, str, float]]:
        """Yields nodes, way and step duration of each row; the floor's come last for each number of nodes."""
        for count in sorted(set(self.nodes)):
            for way in [*self.ways(), "floor"]:
                for step_s in sorted(set(self.step_duration), reverse=True):
                    yield count, way, step_s

    def expected_s(self, cell: tuple[int, str, float]) -> float:
        """Returns about how long a cell takes, without its peer's start."""
        _, way, step_s = cell
        if way == "floor":  # its windows are those beside all others
            return 0.0
        call_s = (chunk_length(step_s, self.chunk_steps) if way == "rayvec-worker" else 1) * step_s
        own_s = max(self.window_s(step_s), 2.0 * call_s) + 1.5 * call_s  # the last calls end after the window
        return self.repeats * (self.window_s(step_s) + own_s) + 2.0 * call_s

    def start_s(self, way: str, num_envs: int) -> float:
        """Returns about how long a way takes to start."""
        return 2.0 + _START_S.get(way, 0.05) * num_envs


def emulated_task(settings: Scaling, way: str, num_nodes: int, address: str) -> dict[str, Any]:
    """Returns the fields of a :class:`~rayvec.bench.harness.task.Task` for a way of stepping."""
    num_envs = num_nodes * settings.cores_per_node
    return {
        "num_envs": num_envs,
        "workers": num_envs,
        "nodes": num_nodes,
        "workers_per_node": settings.cores_per_node,
        "emulated": {
            "step_s": 0.0,
            "busy": settings.work == "busy",
            "sigma": parse_jitter(settings.jitter),
            "obs_size": settings.obs_size,
        },
        "inference": way.removeprefix("rayvec-") if way.startswith("rayvec-") else "driver",
        "prefetch": way == "rayvec-worker",
        "address": address,
    }


class Stepper:
    """Measures the cells of one number of nodes.

    Args:
        settings: Narrowed.
        nodes: To measure on.
        results: Where rows go.
        ticker: The bar.
    """

    def __init__(self, settings: Scaling, nodes: Nodes, results: Results, ticker: Ticker) -> None:
        self._settings = settings
        self._nodes = nodes
        self._results = results
        self._ticker = ticker

    def measure(self, num_nodes: int, todo: list[tuple[str, float]]) -> None:
        """Measures the cells (way, step duration) that are left for a number of nodes."""
        from rayvec.bench.peers import peer_process

        self._nodes.grow(num_nodes, self._settings.cores_per_node)
        floor_task = emulated_task(self._settings, "floor", num_nodes, self._nodes.address)
        windows: dict[float, list[dict[str, Any]]] = {}
        with ExitStack() as stack:
            which = "floor" if self._nodes.simulated else "cluster-floor"
            floor, _ = stack.enter_context(peer_process(which, self._nodes.environment, floor_task))
            self._ticker.advance(self._settings.start_s("floor", floor_task["num_envs"]))
            for way in dict.fromkeys(way for way, _ in todo if way != "floor"):
                durations = [step_s for name, step_s in todo if name == way]
                self._ticker.say(f"{num_nodes} nodes, starting {way}")
                try:
                    self._measure_way(floor, num_nodes, way, durations, windows)
                except RayvecError as error:
                    self._results.notes.append(f"{way} on {num_nodes} nodes could not be measured: {error}")
                    self._results.write()
            for step_s in [step_s for name, step_s in todo if name == "floor"]:
                taken = windows.get(step_s, ())
                own = [*taken] or [self._window(floor, step_s, 1, split=False) for _ in range(self._settings.repeats)]
                self._add(num_nodes, "floor", step_s, own, own, "none", None)
                self._ticker.advance(self._settings.expected_s((num_nodes, "floor", step_s)))

    def _measure_way(
        self,
        floor: PeerProcess,
        num_nodes: int,
        way: str,
        durations: list[float],
        windows: dict[float, list[dict[str, Any]]],
    ) -> None:
        from rayvec.bench.peers import peer_process

        settings = self._settings
        task = emulated_task(settings, way, num_nodes, self._nodes.address)
        peer = "rayvec" if way.startswith("rayvec-") else way
        with peer_process(peer, self._nodes.environment, task) as (process, started):
            if "missing" in started:
                self._results.notes.append(f"{way}: not installed ({started['missing']})")
                return
            self._ticker.advance(settings.start_s(way, task["num_envs"]))
            for step_s in durations:
                self._ticker.say(f"{num_nodes} nodes, {way}, steps of {step_s:g} s")
                length = chunk_length(step_s, settings.chunk_steps) if way == "rayvec-worker" else 1
                process.do("set_step", step_s=step_s, chunk_steps=length)
                own, others = [], []
                for _ in range(settings.repeats):
                    others.append(self._window(floor, step_s, 1, split=False))
                    own.append(self._window(process, step_s, length, split=True))
                windows.setdefault(step_s, []).extend(others)
                transport = started["transport"]
                if not self._nodes.simulated and way in _ONE_MACHINE:
                    transport += ", driver's machine alone"
                self._add(num_nodes, way, step_s, own, others, transport, started["start_s"])
                self._ticker.advance(settings.expected_s((num_nodes, way, step_s)))

    def _window(self, process: PeerProcess, step_s: float, length: int, split: bool) -> dict[str, Any]:
        if not split:
            process.do("set_step", step_s=step_s, chunk_steps=1)
        seconds = max(self._settings.window_s(step_s), 2.0 * length * step_s)
        return process.do("measure", seconds=seconds, with_split=split)

    def _add(
        self,
        num_nodes: int,
        way: str,
        step_s: float,
        windows: list[dict[str, Any]],
        floors: list[dict[str, Any]],
        transport: str,
        start_s: float | None,
    ) -> None:
        cores = num_nodes * self._settings.cores_per_node
        ideal = cores / step_s
        rates = [window["steps_per_s"] for window in windows]
        of_floor = [own / floor["steps_per_s"] for own, floor in zip(rates, floors, strict=False)]
        floor_efficiency = statistics.median(f["steps_per_s"] for f in floors) / ideal
        names = windows[0]["split"]
        self._results.add(
            {
                "nodes": num_nodes,
                "cores": cores,
                "step_duration_s": step_s,
                "way": way,
                "transport": transport,
                "chunk_steps": chunk_length(step_s, self._settings.chunk_steps) if way == "rayvec-worker" else None,
                "steps_per_s": statistics.median(rates),
                "steps_per_s_all": rates,
                "steps_per_s_per_core": statistics.median(rates) / cores,
                "ideal_steps_per_s": ideal,
                "efficiency": statistics.median(rates) / ideal,
                "of_floor": statistics.median(of_floor),
                "of_floor_all": of_floor,
                "floor_efficiency": floor_efficiency,
                "marked": floor_efficiency < ENOUGH,
                "split": {name: statistics.fmean(w["split"].get(name, 0.0) for w in windows) for name in names},
                "cpu_s_per_step": sum(w["cpu_s"] for w in windows) / max(1, sum(w["steps"] for w in windows)),
                "start_s": start_s,
                "simulated": self._nodes.simulated,
            }
        )


def stored(settings: Scaling) -> dict[str, Any]:
    """Returns the settings as a result file keeps them: without what says where it goes."""
    values = plain(settings)
    del values["resume"]
    values["out"] = str(values["out"])
    return values
