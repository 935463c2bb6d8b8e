"""Nodes that the network no longer reaches are found by several silent looks, not by one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rayvec.cluster import reachability
from rayvec.cluster.reachability import NodeWatch


class Looks:
    """A watch of two nodes, whose answers and whose clock the test decides."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now_s, self._silent = 0.0, set[str]()
        here = SimpleNamespace(get_node_id=lambda: "here")
        monkeypatch.setattr(reachability, "ray", SimpleNamespace(get_runtime_context=lambda: here))
        monkeypatch.setattr(reachability, "time", SimpleNamespace(monotonic=lambda: self._now_s))
        monkeypatch.setattr(reachability, "raylets", lambda: {"a": ("10.0.0.1", 1), "b": ("10.0.0.2", 1)})
        monkeypatch.setattr(reachability, "unreachable", lambda addresses: self._silent & set(addresses))
        monkeypatch.setattr(reachability, "check_head", lambda: None)
        self._watch = NodeWatch()

    def lost(self, at_s: float, *silent: str) -> set[str]:
        self._now_s, self._silent = at_s, set(silent)
        return self._watch.lost(["here", "a", "b"])


def test_silence_counts_from_the_first_silent_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    assert looks.lost(0) == set()
    assert looks.lost(1000, "a") == set()  # nobody looked for a long time
    assert looks.lost(1009, "a", "b") == set()
    assert looks.lost(1011, "a", "b") == {"a"}
    assert looks.lost(1018) == set()
    assert looks.lost(1020, "a", "b") == set()
    assert looks.lost(1031, "a", "b") == {"a", "b"}


def test_a_node_that_never_answered_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    assert looks.lost(0, "a") == looks.lost(100, "a") == set()
