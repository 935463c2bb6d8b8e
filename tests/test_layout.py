"""The layout of the package: rooms in one order, imports that point down it, no circles, modules of a readable size."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "rayvec"
ROOMS = [
    "errors",
    "env_server",
    "servers",
    "wrappers",
    "config",
    "data",
    "fleet",
    "envs",
    "policies",
    "rollout",
    "node",
    "cluster",
    "vector",
    "collect",
    "learners",
    "distributed",
    "training",
    "stable_baselines3",
    "tianshou",
    "rayvec",  # the public names, all of them lazy
    "bench",
    "doctor",
    "cli",
    "__main__",
]
"""Packages and modules at the top of rayvec; each imports only what stands before it, lazily too."""

LONGEST_MODULE = 480
MOST_LOOSE_MODULES = 12


def modules() -> dict[str, Path]:
    """Returns the files of all modules by name; a package has that of its ``__init__.py``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(path: Path) -> Iterator[str]:
    """Yields the modules of rayvec that a file imports anywhere in it, but not those that only type checkers read."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for part in block.body
        for node in ast.walk(part)
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{path}: imports are absolute"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in whole]
        if id(node) not in for_types:
            yield from (name for name in names if name in MODULES)


IMPORTS = {name: set(imported(path)) - {name} for name, path in MODULES.items()}


def room(module: str) -> str:
    """Returns the room of a module: the part of its name after ``rayvec``."""
    return (module.split(".")[1:2] or ["rayvec"])[0]


def circle_from(start: str) -> list[str]:
    """Returns a way of imports from a module back to itself, or nothing."""
    ways, seen = [[start]], set()
    while ways:
        way = ways.pop()
        for name in sorted(IMPORTS[way[-1]] - seen):
            if name == start:
                return [*way, start]
            seen.add(name)
            ways.append([*way, name])
    return []


def test_every_room_has_a_place() -> None:
    assert {room(name) for name in MODULES} <= set(ROOMS)


def test_imports_point_down_the_list_of_rooms() -> None:
    upward = [
        f"{name} imports {other}"
        for name, others in IMPORTS.items()
        for other in sorted(others)
        if ROOMS.index(room(other)) > ROOMS.index(room(name))
    ]
    assert not upward


def test_imports_make_no_circles() -> None:
    assert not [" -> ".join(circle) for circle in map(circle_from, MODULES) if circle]


def test_modules_can_be_read_in_one_sitting() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert not {name: count for name, count in lines.items() if count > LONGEST_MODULE}


def test_few_modules_lie_loose() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_LOOSE_MODULES
