"""The block that a machine's fleet and its workers share."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from rayvec.node.memory import BlockSpec, ChunkPlace, MachineBlock

SLOTS, ROUNDS = 4, 500
SPEC = BlockSpec(Box(-1, 1, (3,), np.float32), Discrete(2), tuple(range(SLOTS + 1)))
PLACE = ChunkPlace(number=1, slot=0, num_bytes=1 << 16, first_row=0, num_envs=SLOTS, num_weights=0)


def write_slots_at_once() -> None:
    threading.excepthook = lambda failed: os._exit(1)
    together = threading.Barrier(SLOTS)

    def write(fd: int, slot: int) -> None:
        block = MachineBlock(SPEC, os.dup(fd))
        together.wait()
        block.slot(PLACE._replace(slot=slot))[:] = slot
        block.close()

    for _ in range(ROUNDS):
        block = MachineBlock(SPEC)
        threads = [threading.Thread(target=write, args=(block.file.fileno(), slot)) for slot in range(SLOTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        block.close()


def test_slots_that_are_added_at_once_do_not_cut_each_other() -> None:
    """A slot beyond the end of the file would kill its process by SIGBUS."""
    process = multiprocessing.get_context("spawn").Process(target=write_slots_at_once)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_a_thread_that_uses_a_closed_block_changes_no_other_file(tmp_path: Path) -> None:
    block = MachineBlock(SPEC)
    number = block.file.fileno()
    block.close()
    with (tmp_path / "other").open("wb") as other:
        assert other.fileno() == number
        with pytest.raises(ValueError, match="closed file"):
            block.slot(PLACE)
        assert os.fstat(number).st_size == 0
