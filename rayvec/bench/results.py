"""Result files: measurements with their settings, versions and machine, written after every row."""

from __future__ import annotations

import csv
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from rayvec.config.schema import plain
from rayvec.errors import ConfigError
from rayvec.training.atomic_files import written_whole
from rayvec.training.versions import installed_versions

__all__ = ["SCHEMA_VERSION", "Results", "machine", "old_design"]

SCHEMA_VERSION = 2
_WRITTEN = ("schema", "schema_version", "time", "machine", "versions")
"""What every file begins with; each write replaces it."""
_OLD_DESIGN = Path(__file__).with_name("ray_per_env_scaling_2024.csv")


def machine() -> dict[str, Any]:
    """Returns the cores, processor, memory, system and interpreter that the benchmark ran on.

    A virtual machine may call processors of several generations by one name; family and model tell them apart.
    """
    first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first)}
    generation = [f"{key.removeprefix('cpu ')} {found[key]}" for key in ("cpu family", "model") if key in found]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": ", ".join([found.get("model name", platform.machine()), *generation]),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


@dataclass
class Results:
    """One result file.

    Attributes:
        kind: The command: ``scaling``, ``compare``, ``model``, ``cost`` or ``learner``.
        settings: Of the command.
        path: Where the JSON goes.
        rows: What was measured, one dict of plain values for each.
        notes: Sentences about the rows.
        extra: Other values.
        command: The one that started it, also where another one resumes it.
    """

    kind: str
    settings: dict[str, Any]
    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    command: str = field(default_factory=lambda: " ".join(["rayvec", *sys.argv[1:]]))

    @classmethod
    def of(cls, kind: str, settings: Any) -> Results:
        """Returns an empty file for a command's settings, in the directory that they name.

        Raises:
            ConfigError: That can't be made, or can't be written to.
        """
        _check_directory(settings.out)
        values = {name: str(value) if isinstance(value, Path) else value for name, value in plain(settings).items()}
        return cls(kind, values, settings.out / f"{kind}.json")

    def add(self, row: dict[str, Any]) -> None:
        """Adds a row, and writes the file."""
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """Writes the JSON, so that the file is always whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "schema": f"rayvec-bench-{self.kind}",
            "schema_version": SCHEMA_VERSION,
            "command": self.command,
            "time": datetime.now().astimezone().isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": installed_versions(),
            "settings": self.settings,
            "notes": self.notes,
            "rows": self.rows,
            **self.extra,
        }
        with written_whole(self.path) as file:
            file.write((json.dumps(content, indent=1) + "\n").encode())

    @contextmanager
    def shown(self, show: Callable[[Results], None], advice: str = "") -> Iterator[None]:
        """Shows the finished rows when the block ends, also where Ctrl-C ends it.

        Args:
            show: Prints them.
            advice: What Ctrl-C prints after the path of the file.
        """
        try:
            yield
        except KeyboardInterrupt:
            if not self.rows:
                raise KeyboardInterrupt("interrupted; nothing was measured") from None
            self._show(show)
            raise KeyboardInterrupt(f"interrupted; the finished rows are in {self.path}{advice}") from None
        self._show(show)

    def _show(self, show: Callable[[Results], None]) -> None:
        if not self.rows:
            print("nothing was measured")
            return
        show(self)
        self.finish()

    def finish(self) -> None:
        """Writes JSON, and beside it the rows as CSV, nested values with dots in their names; prints where."""
        self.write()
        flat = [_flat(row) for row in self.rows]
        names = list(dict.fromkeys(name for row in flat for name in row))
        path = self.path.with_suffix(".csv")
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(flat)
        print(f"written: {self.path}, {path}")

    @classmethod
    def read(cls, path: Path, kind: str) -> Results:
        """Reads a result file of a command.

        Raises:
            ConfigError: It is no result file, or one of another command or version of the schema.
        """
        try:
            content = json.loads(path.read_text())
            got = f"{content['schema']}, version {content['schema_version']}"
            settings, rows, notes, command = (content.pop(name) for name in ("settings", "rows", "notes", "command"))
        except (OSError, ValueError, TypeError, KeyError) as error:
            got, content = f"{path} ({type(error).__name__}: {error})", {}
        expected = f"rayvec-bench-{kind}, version {SCHEMA_VERSION}"
        if got != expected:
            raise ConfigError(
                "A result file can be read by the command and version that wrote it.",
                expected=expected,
                got=got,
                remedy="Pass another file, or measure again.",
            )
        extra = {name: value for name, value in content.items() if name not in _WRITTEN}
        return cls(kind, settings, path, rows, notes, extra, command)


def _check_directory(directory: Path) -> None:
    there = next(each for each in (directory, *directory.absolute().parents) if os.path.exists(each))
    is_directory = os.path.isdir(there)
    if not is_directory or not os.access(there, os.W_OK):
        raise ConfigError(
            "--out names the directory for the results.",
            expected="a directory that can be written to, or a path where one can be made",
            got=f"{directory}: {there} {'is not writable' if is_directory else 'is no directory'}",
            remedy="Pass another --out.",
        )


def _flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = " ".join(f"{item:.6g}" for item in value) if _numbers(value) else value
    return flat


def _numbers(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(v, int | float) for v in value)


def old_design() -> list[dict[str, float]]:
    """Returns the published measurement of one Ray actor for each environment, on nodes of 48 cores.

    It was made with Tianshou's ``RayVectorEnv`` by one of its users (issue 1172 of that project, 2024).
    """
    with _OLD_DESIGN.open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
