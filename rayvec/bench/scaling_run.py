"""How ``rayvec bench scaling`` goes: resume, measure, show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from rayvec.bench.peers import SCALING_PEERS
from rayvec.bench.results import Results
from rayvec.bench.scaling import ENOUGH, Scaling, Stepper, stored
from rayvec.bench.simulate import check_memory, nodes
from rayvec.bench.terminal import console, number, show_split, show_table, ticking
from rayvec.errors import ConfigError

__all__ = ["run"]


def run(given: Scaling, mentioned: frozenset[str]) -> None:
    """Measures what is left to be measured, prints the table, writes JSON, CSV and plots."""
    settings, results = _begin(given, mentioned)
    if settings.address is None:
        _check_memory(settings)
    terminal = console()
    done = {(row["nodes"], row["way"], row["step_duration_s"]) for row in results.rows}
    todo = [cell for cell in settings.cells() if cell not in done]
    seconds = sum(settings.expected_s(cell) for cell in todo)
    seconds += sum(settings.start_s(way, n * settings.cores_per_node) for n, way in {cell[:2] for cell in todo})
    terminal.print(
        f"{len(todo)} of {len(list(settings.cells()))} cells to measure, about {max(1, round(seconds / 60))} minutes"
    )
    try:
        if todo:
            with nodes(settings.address) as found:
                found.check(max(settings.nodes), settings.cores_per_node)
                where = f"Measured on {found.describe(settings.cores_per_node)}."
                results.notes = list(dict.fromkeys([*results.notes, where]))
                results.write()
                terminal.print(where)
                with ticking(seconds, terminal) as ticker:
                    stepper = Stepper(settings, found, results, ticker)
                    for count in sorted({cell[0] for cell in todo}):
                        stepper.measure(count, [cell[1:] for cell in todo if cell[0] == count])
    except KeyboardInterrupt:
        _show(settings, results, terminal)
        raise KeyboardInterrupt(
            f"interrupted; the finished rows are in {results.path}, go on with --resume {results.path}"
        ) from None
    _show(settings, results, terminal)


def _begin(given: Scaling, mentioned: frozenset[str]) -> tuple[Scaling, Results]:
    """Returns the settings in force and the results so far."""
    if given.resume is None:
        settings = given.narrowed()
        path = settings.out / "scaling.json"
        if path.exists():
            raise ConfigError(
                "A result file is not overwritten.",
                expected="--out DIR without a scaling.json",
                got=str(path),
                remedy=f"Go on with it by --resume {path}, or pass another --out.",
            )
        return settings, Results("scaling", stored(settings), path)
    changed = [f"--{name.replace('_', '-')}" for name in sorted(mentioned - {"resume"})]
    if changed:
        raise ConfigError(
            "A resumed benchmark keeps the settings that it began with.",
            expected="--resume FILE alone",
            got=", ".join(changed),
            remedy="Leave these out, or start a new one without --resume.",
        )
    results = Results.read(given.resume, "scaling")
    values = {**results.settings, "out": given.resume.parent}
    for name, value in values.items():
        values[name] = tuple(value) if isinstance(value, list) else value
    try:
        return Scaling(**values), results
    except TypeError as error:
        raise ConfigError(
            "A benchmark is resumed by the version that began it.",
            expected="the settings of rayvec bench scaling",
            got=f"{given.resume} ({error})",
            remedy="Measure anew, without --resume.",
        ) from error


def _check_memory(settings: Scaling) -> None:
    names = {"rayvec", "floor", *settings.peer}
    most = max(settings.nodes)
    check_memory(most, {name: SCALING_PEERS[name] for name in names}, most * settings.cores_per_node)


def _show(settings: Scaling, results: Results, terminal: Console) -> None:
    """Prints the table of what there is, and writes CSV and plots."""
    if not results.rows:
        terminal.print("nothing was measured")
        return
    order = {way: place for place, way in enumerate([*settings.ways(), "floor"])}
    rows = sorted(results.rows, key=lambda r: (r["nodes"], -r["step_duration_s"], order.get(r["way"], 99)))
    work = "sleep" if settings.work == "sleep" else "burn CPU"
    show_table(
        terminal,
        f"Environments that {work}, one for each core{', jitter ' + settings.jitter if settings.jitter else ''}; "
        "efficiency = steps/s over\n"
        "(cores / step duration), floor = independent processes, T = steps of chunks, prefetched",
        (
            "nodes\nx cores",
            "step, s",
            "",
            "transport",
            "steps/s",
            "per\ncore",
            "ideal",
            "efficiency",
            "of floor\n+- half the range",
        ),
        [_cells(row) for row in rows],
        sections=True,
    )
    show_split(
        terminal,
        "Where the time of the emulated cores goes, percent",
        ("nodes", "step, s", ""),
        [
            ((row["nodes"], f"{row['step_duration_s']:g}", row["way"]), row["split"])
            for row in rows
            if row["way"] != "floor"
        ],
    )
    if any(row["marked"] for row in rows):
        terminal.print(
            f"* Independent processes themselves reach less than {ENOUGH:g} of the ideal here: this machine can't "
            "emulate so many cores at such a step duration."
        )
    for note in results.notes:
        terminal.print(note)
    written: list[Path] = [results.path, results.write_csv()]
    from rayvec.bench.plots import plot_scaling

    written += plot_scaling(results.rows, results.path.parent)
    terminal.print("written: " + ", ".join(map(str, written)))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    half = 0.5 * (max(row["of_floor_all"]) - min(row["of_floor_all"]))
    of_floor = "" if row["way"] == "floor" else f"{row['of_floor']:.3f} +-{half:.3f}"
    return (
        f"{row['nodes']} x {row['cores'] // row['nodes']}",
        f"{row['step_duration_s']:g}",
        row["way"] + (f" T={row['chunk_steps']}" if row["chunk_steps"] else ""),
        row["transport"],
        number(row["steps_per_s"]),
        number(row["steps_per_s_per_core"]),
        f"{row['ideal_steps_per_s']:,.0f}",
        f"{100 * row['efficiency']:.1f}%" + ("*" if row["marked"] else ""),
        of_floor,
    )
