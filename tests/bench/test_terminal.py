"""What the benchmarks print."""

from __future__ import annotations

import io

import pytest

from rayvec.bench.terminal import console


class Ended(io.StringIO):
    """A pipe whose reader has ended."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_reader_that_has_ended_is_a_broken_pipe_and_no_exit() -> None:
    printed = console()
    printed.file = Ended()
    with pytest.raises(BrokenPipeError):
        printed.print("a table")
