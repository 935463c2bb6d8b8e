"""Result files: measurements with their settings, versions and machine, written after every row."""

from __future__ import annotations

import csv
import json
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from rayvec.data.cores import usable_cores
from rayvec.errors import ConfigError
from rayvec.training.atomic_files import installed_versions, written_whole

_ACTOR_PER_ENV = Path(__file__).with_name("ray_per_env_scaling_2024.csv")


def machine() -> dict[str, Any]:
    """Returns the cores, processor, memory, system and interpreter that the benchmark ran on.

    A virtual machine may call processors of several generations by one name; family and model tell them apart.
    """
    first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first)}
    generation = [f"{key.removeprefix('cpu ')} {found[key]}" for key in ("cpu family", "model") if key in found]
    return {
        "cores": usable_cores(),
        "processor": ", ".join([found.get("model name", platform.machine()), *generation]),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


@dataclass
class Results:
    """One result file.

    Attributes:
        kind: The command: ``scaling`` or ``model``.
        settings: Of the command; `out` is the directory.
        rows: What was measured, one dict of plain values for each.
        notes: Sentences about the rows.
    """

    kind: str
    settings: Any
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """The JSON file."""
        out: Path = self.settings.out
        return out.expanduser() / f"{self.kind}.json"

    def write(self) -> None:
        """Writes the JSON, so that the file is always whole.

        Raises:
            ConfigError: The directory can't be made or written to.
        """
        content = {
            "schema": f"rayvec-bench-{self.kind}",
            "command": " ".join(["rayvec", *sys.argv[1:]]),
            "time": datetime.now().astimezone().isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": installed_versions(),
            "settings": asdict(self.settings),
            "notes": self.notes,
            "rows": self.rows,
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(self.path) as file:
                file.write((json.dumps(content, indent=1, default=str) + "\n").encode())
        except OSError as error:
            raise ConfigError(f"{self.path} can't be written: {error}. Pass another --out.") from error

    def add(self, row: dict[str, Any]) -> None:
        """Adds a row, and writes the file."""
        self.rows.append(row)
        self.write()

    @contextmanager
    def shown(self, show: Callable[[Results], None]) -> Iterator[None]:
        """Shows the finished rows when the block ends, also where Ctrl-C ends it."""
        try:
            yield
        except KeyboardInterrupt:
            self._finish(show)
            raise KeyboardInterrupt(f"interrupted; the finished rows are in {self.path}") from None
        self._finish(show)

    def _finish(self, show: Callable[[Results], None]) -> None:
        show(self)
        self.write()
        path = self.path.with_suffix(".csv")
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(name for row in self.rows for name in row)))
            writer.writeheader()
            writer.writerows(self.rows)
        print(f"written: {self.path}, {path}")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a ``scaling.json`` that were measured.

    Raises:
        ConfigError: The file is not what `rayvec bench scaling` has written.
    """
    try:
        content = json.loads(path.expanduser().read_text())
        if content["schema"] != "rayvec-bench-scaling":
            raise ValueError(f"its schema is {content['schema']}")
        return [row for row in content["rows"] if "failed" not in row]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} can't be read: {type(error).__name__}: {error}. Pass the scaling.json of a finished "
            "`rayvec bench scaling`."
        ) from error


def actor_per_env() -> list[dict[str, float]]:
    """Returns the published measurement of one Ray actor for each environment, on nodes of 48 cores.

    It was made with Tianshou's ``RayVectorEnv`` by one of its users (issue 1172 of that project, 2024).
    """
    with _ACTOR_PER_ENV.open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
