"""Signals that come within a block of statements that must complete."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from rayvec.node.deferred_signals import Uninterrupted


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_handled_when_the_block_is_complete(signum: int) -> None:
    events: list[str] = []
    before = signal.signal(signum, lambda *_: events.append("signal"))
    try:
        with Uninterrupted():
            signal.raise_signal(signum)
            events.append("block")
        assert events == ["block", "signal"]
        signal.raise_signal(signum)
        assert len(events) == 3
    finally:
        signal.signal(signum, before)


def test_a_signal_without_a_handler_stays_as_it_is() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Uninterrupted():
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What a handler of SIGTERM was called with."""
    calls: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: calls.append(number))
    yield calls
    monkeypatch.undo()
    signal.signal(signal.SIGTERM, before)


def test_sigterm_is_handled_although_ctrl_c_came_too(ended: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt), Uninterrupted():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert ended == [signal.SIGTERM]


def test_ctrl_c_while_handlers_are_restored_leaves_none_deferred(
    ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_handler = signal.signal

    def interrupted(number: int, handler: Any) -> Any:
        before = set_handler(number, handler)
        if number == signal.SIGINT and handler is signal.default_int_handler:
            raise KeyboardInterrupt
        return before

    with pytest.raises(KeyboardInterrupt), Uninterrupted():
        monkeypatch.setattr(signal, "signal", interrupted)
    signal.raise_signal(signal.SIGTERM)
    assert ended == [signal.SIGTERM]
