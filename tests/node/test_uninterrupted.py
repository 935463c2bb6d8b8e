"""Signals that come within a block of statements that must complete."""

from __future__ import annotations

import signal
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


def test_both_signals_are_handled_although_both_handlers_raise() -> None:
    calls: list[int] = []

    def handle(number: int, frame: Any) -> None:
        calls.append(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(KeyboardInterrupt), uninterrupted():
            for number in before:
                signal.raise_signal(number)
        assert sorted(calls) == sorted(before)
        assert [signal.getsignal(number) for number in before] == [handle] * 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
