"""``rayvec bench scaling``: steps/s over nodes and step durations, beside peers and independent processes.

Nodes are simulated on this machine, or those of a cluster; hosts in network namespaces are measured beside simulated
ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from rayvec.bench.harness.time_split import STATES
from rayvec.bench.measured_processes import SCALING_PEERS, PeerProcess, check_peers, peer_process, rates, short_name
from rayvec.bench.plots import plot_scaling, series
from rayvec.bench.results import Results
from rayvec.bench.settings import Scaling, check_any, jitter_sigma
from rayvec.bench.simulate import Nodes, Place, check_hosts, check_memory, nodes
from rayvec.bench.terminal import number, show_split, show_table, spread, ticking
from rayvec.config.schema import check
from rayvec.errors import ConfigError, RayvecError, counted

__all__ = ["cells", "chunk_length", "run"]

ENOUGH = 0.8
"""Share of the ideal that independent processes must reach for a cell to say anything."""
_CHUNKED = ("rayvec-worker", "rayvec-decentralized")
_ADAPTERS = {"rayvec-driver": "rayvec", "rayvec-worker": "rayvec", "rayvec-decentralized": "decentralized"}
_CHUNK_S, _MOST_CHUNK_STEPS = 2.0, 128
Cell = tuple[int, str, float]
"""Nodes, way and step duration of a row."""


def run(given: Scaling, mentioned: frozenset[str] = frozenset()) -> None:
    """Measures the missing cells, prints the table, writes JSON, CSV and plots.

    Args:
        given: The settings.
        mentioned: Names of those that the command line sets, of which --resume allows no other.
    """
    check(given)
    jitter_sigma(given.jitter)
    check_any(given, "nodes", "step_duration", "inference", "learners")
    check_peers(given.peer, SCALING_PEERS)
    settings, results = _begin(given, mentioned)
    check(settings)
    places = _places(settings)
    done = {(row.get("place", places[0]), row["nodes"], row["way"], row["step_duration_s"]) for row in results.rows}
    todo = {
        place: [cell for cell in cells(settings) if (place, cell[0], short_name(cell[1]), cell[2]) not in done]
        for place in places
    }
    if settings.address is None and any(todo.values()):
        most = max(settings.nodes)
        check_memory(most, ("rayvec", "upper-bound", *settings.peer), most * settings.cores_per_node)
    minutes = max(1, round(sum(expected_total_s(settings, each) for each in todo.values()) / 60))
    cells_to_do = counted(sum(map(len, todo.values())), "cell")
    print(f"{cells_to_do} to measure, {len(done)} done, about {counted(minutes, 'minute')}")
    with results.shown(partial(_show, settings), f", continue with --resume {results.path}"):
        for place in filter(todo.get, places):
            _measure(settings, results, todo[place], place)


def _places(settings: Scaling) -> tuple[Place, ...]:
    """Returns what nodes are measured on, one after another.

    Raises:
        ConfigError: Hosts are asked for, and this machine can't make them, or a cluster is too.
    """
    if not settings.hosts:
        return ("simulated",) if settings.address is None else ("cluster",)
    if settings.address is not None:
        raise ConfigError(
            "--hosts measures on this machine, --address on a cluster.",
            expected="one of the two",
            got=f"--hosts and --address {settings.address}",
            remedy="Leave one out.",
        )
    check_hosts()
    return "simulated", "hosts"


def _begin(given: Scaling, mentioned: frozenset[str]) -> tuple[Scaling, Results]:
    """Returns the settings that apply and the results so far."""
    if given.resume is None:
        settings = given.narrowed()
        results = Results.of("scaling", settings)
        del results.settings["resume"]
        if results.path.exists():
            raise ConfigError(
                "A result file is not overwritten.",
                expected="--out DIR without a scaling.json",
                got=str(results.path),
                remedy=f"Continue it with --resume {results.path}, or pass another --out.",
            )
        return settings, results
    changed = [f"--{name.replace('_', '-')}" for name in sorted(mentioned - {"resume"})]
    if changed:
        raise ConfigError(
            "A resumed benchmark keeps its settings.",
            expected="--resume FILE alone",
            got=", ".join(changed),
            remedy="Leave these out, or start a new one without --resume.",
        )
    results = Results.read(given.resume, "scaling")
    values: dict[str, Any] = {**results.settings, "out": given.resume.parent}
    try:
        return Scaling(**values), results  # check turns lists into tuples
    except TypeError as error:
        raise ConfigError(
            "A benchmark can be resumed by the version that started it.",
            expected="the settings of rayvec bench scaling",
            got=f"{given.resume} ({error})",
            remedy="Measure again, without --resume.",
        ) from error


def cells(settings: Scaling) -> Iterator[Cell]:
    """Yields nodes, way and step duration of each row; the upper bound's come last for each number of nodes."""
    learners = settings.learners or (("driver", "decentralized") if settings.hosts else ("driver",))
    ways = [f"rayvec-{where}" for where in settings.inference if "driver" in learners]
    ways += ["rayvec-decentralized"] * ("decentralized" in learners)
    ways += [name for name in settings.peer if name != "upper-bound"]
    for count in sorted(set(settings.nodes)):
        for way in [*ways, "upper-bound"]:
            for step_s in sorted(set(settings.step_duration), reverse=True):
                yield count, way, step_s


def chunk_length(settings: Scaling, way: str, step_s: float) -> int:
    """Returns T of a chunk: about two seconds' worth, at most 128 steps, unless chosen; 1 without chunks.

    >>> [chunk_length(Scaling(), "rayvec-worker", step_s) for step_s in (1.0, 0.1, 0.001)]
    [2, 20, 128]
    """
    if way not in _CHUNKED:
        return 1
    return settings.chunk_steps or min(_MOST_CHUNK_STEPS, max(1, round(_CHUNK_S / step_s)))


def _window_s(settings: Scaling, step_s: float) -> float:
    steps = 20 if step_s < 0.5 else 6
    return max(settings.window, steps * step_s * (0.5 if settings.quick else 1.0))


def _expected_s(settings: Scaling, cell: Cell) -> float:
    """Returns about how long a cell takes, without its peer's start."""
    _, way, step_s = cell
    if way == "upper-bound":  # its windows are those beside all others
        return 0.0
    call_s = chunk_length(settings, way, step_s) * step_s
    own_s = max(_window_s(settings, step_s), 2.0 * call_s) + 1.5 * call_s  # the last calls end after the window
    return settings.repeats * (_window_s(settings, step_s) + own_s) + 2.0 * call_s


def _start_s(settings: Scaling, num_nodes: int) -> float:
    return 2.0 + 0.05 * num_nodes * settings.cores_per_node


def expected_total_s(settings: Scaling, todo: list[Cell]) -> float:
    """Returns about how long cells take with the starts of their peers."""
    starts = sum(_start_s(settings, num_nodes) for num_nodes, _ in {cell[:2] for cell in todo})
    return starts + sum(_expected_s(settings, cell) for cell in todo)


def _measure(settings: Scaling, results: Results, todo: list[Cell], place: Place) -> None:
    with nodes(settings.address, place) as found:
        found.check(max(settings.nodes), settings.cores_per_node)
        where = f"Measured on {found.describe(settings.cores_per_node)}."
        results.notes = list(dict.fromkeys([*results.notes, where]))
        results.write()
        print(where)
        with ticking(expected_total_s(settings, todo)) as tick:
            for count in sorted({cell[0] for cell in todo}):
                found.grow(count, settings.cores_per_node)
                _Stepper(settings, found, results, tick, count).measure([c for c in todo if c[0] == count])


class _Stepper:
    """Measures the cells of one number of nodes.

    Args:
        settings: Narrowed.
        nodes: To measure on.
        results: Where rows go.
        tick: Advances the progress bar.
        num_nodes: How many of the nodes.
    """

    def __init__(
        self, settings: Scaling, nodes: Nodes, results: Results, tick: Callable[[str, float], None], num_nodes: int
    ) -> None:
        self._settings, self._nodes, self._results, self._tick = settings, nodes, results, tick
        self._num_nodes, self._cores = num_nodes, num_nodes * settings.cores_per_node
        self._bounds: dict[float, list[dict[str, Any]]] = {}

    def measure(self, todo: list[Cell]) -> None:
        """Measures cells."""
        which = "upper-bound" if self._nodes.share_machine else "cluster-upper-bound"
        with self._started(which, "upper-bound") as (bound, _):
            for way in dict.fromkeys(way for _, way, _ in todo if way != "upper-bound"):
                try:
                    self._measure_way(bound, way, [cell for cell in todo if cell[1] == way])
                except RayvecError as error:
                    self._note(f"{short_name(way)} on {self._num_nodes} nodes could not be measured: {error}")
            for _, way, step_s in todo:
                if way == "upper-bound":
                    repeats = range(self._settings.repeats)
                    own = self._bounds.get(step_s) or [self._window(bound, way, step_s) for _ in repeats]
                    self._add(way, step_s, own, own, {"transport": "none", "start_s": None})

    def _started(self, peer: str, way: str) -> AbstractContextManager[tuple[PeerProcess, dict[str, Any]]]:
        self._tick(f"{self._num_nodes} nodes, starting {short_name(way)}", _start_s(self._settings, self._num_nodes))
        enter = () if way == "upper-bound" else self._nodes.enter
        return peer_process(peer, self._nodes.environment, self._task(way), record=True, enter=enter)

    def _measure_way(self, bound: PeerProcess, way: str, todo: list[Cell]) -> None:
        settings = self._settings
        with self._started(_ADAPTERS.get(way, way), way) as (process, started):
            if "missing" in started:
                self._note(f"{short_name(way)}: not installed ({started['missing']})")
                return
            if self._nodes.place != "simulated" and not started["spans_nodes"]:
                started["transport"] += ", driver's machine alone"
            for cell in todo:
                step_s = cell[2]
                self._tick(f"{self._num_nodes} nodes, {short_name(way)}, steps of {step_s:g} s", 0.0)
                process.do("set_step", step_s=step_s, chunk_steps=chunk_length(settings, way, step_s))
                own, bounds = [], []
                for _ in range(settings.repeats):
                    bounds.append(self._window(bound, "upper-bound", step_s))
                    own.append(self._window(process, way, step_s))
                self._bounds.setdefault(step_s, []).extend(bounds)
                self._add(way, step_s, own, bounds, started)
                self._tick("", _expected_s(settings, cell))

    def _task(self, way: str) -> dict[str, Any]:
        settings = self._settings
        return {
            "num_envs": self._cores,
            "workers": self._cores,
            "nodes": self._num_nodes,
            "workers_per_node": settings.cores_per_node,
            "emulated": {
                "busy": settings.work == "busy",
                "sigma": jitter_sigma(settings.jitter),
                "obs_size": settings.obs_size,
            },
            "inference": way.removeprefix("rayvec-") if way.startswith("rayvec-") else "driver",
            "prefetch": way in _CHUNKED,
            "address": self._nodes.address,
        }

    def _window(self, process: PeerProcess, way: str, step_s: float) -> dict[str, Any]:
        if way == "upper-bound":
            process.do("set_step", step_s=step_s, chunk_steps=1)
        length = chunk_length(self._settings, way, step_s)
        seconds = max(_window_s(self._settings, step_s), 2.0 * length * step_s)
        return process.do("measure", seconds=seconds, with_split=way != "upper-bound")

    def _note(self, text: str) -> None:
        self._results.notes.append(text)
        self._results.write()

    def _add(
        self,
        way: str,
        step_s: float,
        windows: list[dict[str, Any]],
        bounds: list[dict[str, Any]],
        started: dict[str, Any],
    ) -> None:
        ideal, row = self._cores / step_s, rates(windows, bounds)
        bound_efficiency = statistics.median(bound["steps_per_s"] for bound in bounds) / ideal
        splits = [window["split"] or {"unattributed": 1.0} for window in windows]
        self._results.add(
            {
                "nodes": self._num_nodes,
                "cores": self._cores,
                "step_duration_s": step_s,
                "way": short_name(way),
                "transport": started["transport"],
                "chunk_steps": chunk_length(self._settings, way, step_s) if way in _CHUNKED else None,
                **row,
                "steps_per_s_per_core": row["steps_per_s"] / self._cores,
                "ideal_steps_per_s": ideal,
                "efficiency": row["steps_per_s"] / ideal,
                "bound_efficiency": bound_efficiency,
                "marked": bound_efficiency < ENOUGH,
                "network_bytes_per_step": windows[-1].get("network_bytes_per_step", 0.0),
                "split": {state: statistics.fmean(split.get(state, 0.0) for split in splits) for state in STATES},
                "start_s": started["start_s"],
                "simulated": self._nodes.place == "simulated",
                "place": self._nodes.place,
            }
        )


def _show(settings: Scaling, results: Results) -> None:
    """Prints the table of the rows so far, and draws the plots."""
    order = {short_name(way): place for place, (_, way, _) in enumerate(cells(settings))}
    rows = sorted(results.rows, key=lambda r: (r["nodes"], -r["step_duration_s"], order.get(r["way"], len(order))))
    ours = [row for row in rows if row["way"] != "upper-bound"]
    work = "sleep" if settings.work == "sleep" else "use CPU time"
    jitter = f", jitter {settings.jitter}" if settings.jitter else ""
    show_table(
        f"Environments that {work}, one for each core{jitter}; efficiency = steps/s over (cores / step duration),\n"
        "bound = upper bound: independent processes; T = steps of chunks, prefetched; "
        "B/step = bytes between nodes for each step",
        (
            "nodes x cores",
            "step, s",
            "",
            "transport",
            "steps/s",
            "per core",
            "ideal",
            "efficiency",
            "B/step",
            "of bound",
        ),
        [_texts(row) for row in rows],
    )
    show_split(
        "Where the time of the emulated cores goes, percent",
        ("nodes", "step, s", ""),
        [((row["nodes"], f"{row['step_duration_s']:g}", series(row)), row["split"]) for row in ours],
    )
    if pairs := list(_pairs(ours)):
        show_table(
            "Hosts in network namespaces beside simulated nodes; overhead = time per step less the step's duration",
            ("nodes", "step, s", "", "of bound, simulated", "of bound, hosts", "overhead, ms, simulated", "hosts"),
            pairs,
        )
    if any(row["marked"] for row in rows):
        print(
            f"* Independent processes themselves reach less than {ENOUGH:g} of the ideal here: this machine can't "
            "emulate so many cores at such a step duration."
        )
    print(*results.notes, sep="\n")
    plots = plot_scaling(results.rows, results.path.parent)
    print("drawn:", ", ".join(map(str, plots)))


def _pairs(rows: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yields a line for each cell that was measured both on simulated nodes and on hosts."""
    simulated = {_cell(row): row for row in rows if series(row) == row["way"]}
    for row in rows:
        if series(row) != row["way"] and (other := simulated.get(_cell(row))):
            overheads = (1e3 * (each["cores"] / each["steps_per_s"] - each["step_duration_s"]) for each in (other, row))
            shares = (spread(each["of_bound_all"], ".3f") for each in (other, row))
            times = (f"{overhead:.3f}" for overhead in overheads)
            yield str(row["nodes"]), f"{row['step_duration_s']:g}", row["way"], *shares, *times


def _cell(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["nodes"], row["way"], row["step_duration_s"], row["chunk_steps"]


def _texts(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['nodes']} x {row['cores'] // row['nodes']}",
        f"{row['step_duration_s']:g}",
        series(row) + (f" T={row['chunk_steps']}" if row["chunk_steps"] else ""),
        row["transport"],
        number(row["steps_per_s"]),
        number(row["steps_per_s_per_core"]),
        f"{row['ideal_steps_per_s']:,.0f}",
        f"{100 * row['efficiency']:.1f}%" + ("*" if row["marked"] else ""),
        f"{row.get('network_bytes_per_step', 0.0):.1f}",
        "" if row["way"] == "upper-bound" else spread(row["of_bound_all"], ".3f"),
    )
