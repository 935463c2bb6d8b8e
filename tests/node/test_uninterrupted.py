"""Signals that come within a block of statements that must complete."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from rayvec.fleet.deferred_signals import uninterrupted


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_handled_when_the_block_is_complete(signum: int) -> None:
    events: list[str] = []
    before = signal.signal(signum, lambda *_: events.append("signal"))
    try:
        with uninterrupted():
            signal.raise_signal(signum)
            events.append("block")
        assert events == ["block", "signal"]
        signal.raise_signal(signum)
        assert len(events) == 3
    finally:
        signal.signal(signum, before)


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What the handlers of SIGINT and SIGTERM were called with. Each raises KeyboardInterrupt."""
    calls: list[int] = []

    def handle(number: int, frame: Any) -> None:
        calls.append(number)
        raise KeyboardInterrupt

    before = [signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)]
    yield calls
    monkeypatch.undo()
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
        signal.signal(number, handler)


def assert_not_deferred(calls: list[int]) -> None:
    calls.clear()
    for number in (signal.SIGINT, signal.SIGTERM):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert calls == [signal.SIGINT, signal.SIGTERM]


def test_both_signals_are_handled_although_both_handlers_raise(raising: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert sorted(raising) == [signal.SIGINT, signal.SIGTERM]
    assert_not_deferred(raising)


@pytest.mark.parametrize("at", ["first", "last"])
@pytest.mark.parametrize("when", ["deferred", "restored"])
def test_a_signal_while_handlers_change_leaves_none_deferred(
    raising: list[int], at: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it came right after the first, or the last, of the two handlers was set."""
    set_handler, num_set = signal.signal, [0]

    def interrupted(number: int, handler: Any) -> Any:
        before = set_handler(number, handler)
        num_set[0] += 1
        if num_set[0] == (1 if at == "first" else 2):
            raise KeyboardInterrupt
        return before

    with pytest.raises(KeyboardInterrupt):
        if when == "deferred":
            monkeypatch.setattr(signal, "signal", interrupted)
        with uninterrupted():
            monkeypatch.setattr(signal, "signal", interrupted)
    monkeypatch.undo()
    assert_not_deferred(raising)
