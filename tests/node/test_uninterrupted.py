"""Signals that come within a block of statements that must complete."""

from __future__ import annotations

import signal

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
