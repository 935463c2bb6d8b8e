"""``rayvec bench scaling --hosts`` at its smallest, and that Ctrl-C leaves no host behind."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from helpers.hosts import long, on_hosts
from helpers.processes import Command, assert_nothing_left, running

from rayvec.cluster.ray_session import CLUSTER_MARK

pytestmark = on_hosts
TINY = "--nodes 2 --cores-per-node 1 --step-duration 0.01 --repeats 1 --window 0.1 --chunk-steps 8".split()
OURS = ["rayvec-driver", "rayvec-worker", "rayvec-decentralized"]


def rows_on(place: str, path: Path) -> dict[str, Any]:
    """Returns the rows that a result file has of a place, by way."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {row["way"]: row for row in rows if row["place"] == place}


def is_measured(place: str, way: str, path: Path) -> bool:
    return way in rows_on(place, path)


def directories(command: Command) -> set[Path]:
    """Returns where the clusters of a command keep their files."""
    name, found = f"{CLUSTER_MARK}=".encode(), set()
    for pid in command.pids():
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found |= {Path(each.removeprefix(name).decode()) for each in variables if each.startswith(name)}
    return found


@long
def test_the_table_on_hosts_beside_simulated_nodes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["bench", "scaling", "--hosts", *TINY, "--peer", "gymnasium-sync", "--out", str(out)]
    with running(arguments, tmp_path) as command:
        for place, way in product(("simulated", "hosts"), OURS):
            command.wait_until(partial(is_measured, place, way, out / "scaling.json"))
        used = directories(command)
        assert used and all(each.exists() for each in used)
        assert command.interrupt() == 130
        assert_nothing_left(command)
        assert not any(each.exists() for each in used)
        printed = command.stdout.read_text()
    simulated, hosts = (rows_on(place, out / "scaling.json") for place in ("simulated", "hosts"))
    assert list(simulated) == [*OURS, "gymnasium-sync", "upper-bound"] and list(hosts)[:3] == OURS
    for way in OURS:
        assert hosts[way]["steps_per_s"] > 0 and hosts[way]["split"]["unattributed"] <= 0.05, way
        assert hosts[way]["transport"] == simulated[way]["transport"]
        assert hosts[way]["network_bytes_per_step"] == pytest.approx(simulated[way]["network_bytes_per_step"], rel=0.1)
    assert hosts["rayvec-driver"]["transport"] == "tcp x 2"
    for words in ("hosts in network namespaces, nodes of 1 cores", "rayvec-decentralized, hosts", "--resume"):
        assert words in printed + command.stderr.read_text()
    for name in ("efficiency", "steps", "split"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
