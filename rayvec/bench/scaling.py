"""``rayvec bench scaling``: steps/s over nodes and step durations, beside the ideal and independent processes."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from rayvec.bench.emulated import EmulatedEnv
from rayvec.bench.nodes import check_memory, cluster_at, simulated_nodes
from rayvec.bench.plots import plot_efficiency
from rayvec.bench.results import Results
from rayvec.bench.settings import Scaling
from rayvec.bench.terminal import number, show_table
from rayvec.bench.upper_bound import UpperBound
from rayvec.envs.factory import EnvFactory
from rayvec.errors import counted, first_line, require

if TYPE_CHECKING:
    from rayvec.bench.ways import Env, Way

_ENOUGH = 0.8
"""Share of the ideal that independent processes must reach for a row to say anything."""
_ALONE_S = 1.0
_CHUNK_S, _MAX_CHUNK_STEPS = 2.0, 128


def run(given: Scaling) -> int:
    """Measures, prints the table, and writes JSON, CSV and a plot; returns 1 if no row could be measured."""
    settings = given.narrowed()
    require(
        settings.nodes and settings.step_duration and settings.way,
        "--nodes, --step-duration or --way has no value. Pass at least one value of each.",
    )
    if settings.address is None:
        check_memory(max(settings.nodes), settings.cores_per_node)
    env, factory = _environment(settings)
    results = Results("scaling", settings)
    if settings.address is None:
        results.write()  # what can't be written is refused before nodes start
    place = simulated_nodes() if settings.address is None else cluster_at(settings.address)
    with place as (address, grow), results.shown(_show):
        results.write()
        where = f"the cluster at {address}" if settings.address else "simulated nodes of this machine, reached by TCP"
        results.notes.append(f"Measured on {where}, {counted(settings.cores_per_node, 'core')} of each node.")
        print(results.notes[0], flush=True)
        began = time.monotonic()
        for num_nodes in sorted(set(settings.nodes)):
            grow(num_nodes, settings.cores_per_node)
            for row in _measured(settings, env, factory, num_nodes, address):
                results.add(row)
                print(_progress(settings, row, time.monotonic() - began, len(results.rows)), flush=True)
    return int(all("failed" in row for row in results.rows))


def _environment(settings: Scaling) -> tuple[Env, bytes]:
    """Returns what makes an environment, and the same pickled for independent processes."""
    env: Any = settings.env_id or functools.partial(EmulatedEnv, busy=settings.work == "busy")
    return env, EnvFactory.build(env, 1).to_bytes()


def chunk_length(settings: Scaling, way: str, step_s: float) -> int:
    """Returns T of a chunk: about two seconds' worth, at most 128 steps, unless chosen; 1 without chunks.

    >>> [chunk_length(Scaling(), "worker", step_s) for step_s in (1.0, 0.1, 0.001)]
    [2, 20, 128]
    """
    if way == "driver":
        return 1
    return settings.chunk_steps or min(_MAX_CHUNK_STEPS, max(1, round(_CHUNK_S / step_s)))


def _measured(settings: Scaling, env: Env, factory: bytes, num_nodes: int, address: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of one number of nodes. Ways that share environments alternate, window by window."""
    from rayvec.bench.ways import Central, Decentralized  # here: Ray reads its settings when it is imported

    cores = num_nodes * settings.cores_per_node
    kinds: dict[Callable[..., Way], list[str]] = {}
    for each in settings.way:
        kinds.setdefault(Decentralized if each == "decentralized" else Central, []).append(each)
    for make, ways in kinds.items():
        try:
            with (
                closing(UpperBound(factory, cores if settings.address is None else 1)) as bound,
                closing(make(env, num_nodes, settings.cores_per_node, address)) as stepped,
            ):
                alone_s = 1 / bound.measure(_ALONE_S, num_envs=1) if settings.env_id else None
                for step_s in [alone_s] if alone_s else sorted(set(settings.step_duration), reverse=True):
                    yield from _rows(settings, bound, stepped, ways, num_nodes, step_s)
        except Exception as error:  # of the environment, or of a cluster that is too small
            for way in ways:
                failed = f"{type(error).__name__}: {first_line(error)}"
                yield {"nodes": num_nodes, "cores": cores, "way": way, "failed": failed}


def _rows(
    settings: Scaling, bound: UpperBound, stepped: Way, ways: list[str], num_nodes: int, step_s: float
) -> Iterator[dict[str, Any]]:
    cores, simulated = num_nodes * settings.cores_per_node, settings.address is None
    if settings.env_id is None:
        stepped.set_step(step_s)
    window_s = _window_s(settings, step_s)
    found: dict[str, list[float]] = {way: [] for way in [*ways, "bound"]}
    for _, way in itertools.product(range(settings.repeats), found):
        if way != "bound":
            length = chunk_length(settings, way, step_s)
            stepped.measure(way, 0.0, 1)  # a call to warm up
            found[way].append(stepped.measure(way, max(window_s, 2.0 * length * step_s), length))
        elif simulated:
            found[way].append(bound.measure(window_s, None if settings.env_id else step_s))
    ideal = cores / step_s
    of_bound = statistics.median(found["bound"]) / ideal if simulated else None
    for way in ways:
        rate = statistics.median(found[way])
        yield {
            "nodes": num_nodes,
            "cores": cores,
            "step_duration_s": step_s,
            "way": way,
            "chunk_steps": chunk_length(settings, way, step_s),
            "steps_per_s": rate,
            "steps_per_s_per_core": rate / cores,
            "ideal_steps_per_s": ideal,
            "efficiency": rate / ideal,
            "bound_efficiency": of_bound,
            "is_overloaded": of_bound is not None and of_bound < _ENOUGH,
            "min_steps_per_s": min(found[way]),
            "max_steps_per_s": max(found[way]),
        }


def _window_s(settings: Scaling, step_s: float) -> float:
    steps = 20 if step_s < 0.5 else 6
    return max(settings.window, steps * step_s * (0.5 if settings.quick else 1.0))


def _progress(settings: Scaling, row: dict[str, Any], elapsed_s: float, done: int) -> str:
    """Returns a line about a row that is finished, and how much remains."""
    durations = 1 if settings.env_id else len(set(settings.step_duration))
    total = len(set(settings.nodes)) * len(settings.way) * durations
    found = f"failed: {row['failed']}" if "failed" in row else f"{number(row['steps_per_s'])} steps/s"
    what = f"{counted(row['nodes'], 'node')}, {row['way']}"
    step = f", steps of {row['step_duration_s']:.3g} s" if "step_duration_s" in row else ""
    left_s = max(0.0, elapsed_s * (total / done - 1))
    return f"{what}{step}: {found} ({done} of {total}, about {left_s:.0f} s left)"


def _show(results: Results) -> None:
    """Prints the table of the rows so far, and draws the plot."""
    rows = [row for row in results.rows if "failed" not in row]
    if rows:
        header = ("nodes", "cores", "step duration, s", "way", "steps/s", "per core", "ideal", "efficiency", "bound")
        show_table(
            "Efficiency = steps/s over (cores / step duration); bound = efficiency of independent processes;\n"
            "T = steps of a chunk",
            header,
            [_texts(row) for row in rows],
        )
        plot = results.path.with_name("efficiency.png")
        plot_efficiency(rows, plot)
        print(f"drawn: {plot}")
    if any(row["is_overloaded"] for row in rows):
        print(
            f"* Independent processes themselves reach less than {_ENOUGH:g} of the ideal: this machine can't emulate "
            "so many cores at such a step duration."
        )
    for row in results.rows:
        if "failed" in row:
            print(f"failed: {row['way']}, {counted(row['nodes'], 'node')}: {row['failed']}")


def _texts(row: dict[str, Any]) -> tuple[str, ...]:
    bound = row["bound_efficiency"]
    return (
        str(row["nodes"]),
        str(row["cores"]),
        f"{row['step_duration_s']:.3g}",
        row["way"] + ("" if row["way"] == "driver" else f" T={row['chunk_steps']}"),
        number(row["steps_per_s"]),
        number(row["steps_per_s_per_core"]),
        number(row["ideal_steps_per_s"]),
        f"{100 * row['efficiency']:.1f}%" + ("*" if row["is_overloaded"] else ""),
        "" if bound is None else f"{100 * bound:.1f}%",
    )
