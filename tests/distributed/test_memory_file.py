"""Values that processes of one machine pass through memory."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayvec.distributed.memory_file import MemoryFile, can_open

VALUE: dict[str, Any] = {
    "matrix": np.arange(70_000.0).reshape(7, -1),
    "no numbers": np.zeros((0, 3), np.float32),
    "scalar": np.float32(2.5),
    "every other": np.arange(9)[::2],
    "transposed": np.arange(6).reshape(2, 3).T,
    "objects": np.array([None, {"a": 1}], object),
    "plain": ("text", 3, None),
}


def open_files() -> int:
    """Returns how many memory files this process holds open."""
    gc.collect()
    links = [Path("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    return sum("rayvec-value" in os.readlink(link) for link in links if link.is_symlink())


def test_a_value_comes_back_as_it_was() -> None:
    file = MemoryFile(VALUE)
    again = pickle.loads(pickle.dumps(file))
    assert again.keys() == VALUE.keys()
    for name, value in VALUE.items():
        assert type(again[name]) is type(value)
        np.testing.assert_array_equal(again[name], value)
        assert getattr(again[name], "dtype", None) == getattr(value, "dtype", None)


def test_arrays_are_aligned_and_the_readers_own() -> None:
    file = MemoryFile([np.ones(3, np.uint8), np.ones(5)])
    first, second = file.value(), file.value()
    assert all(array.ctypes.data % 64 == 0 for array in first)
    first[1][:] = 7.0
    assert second[1].tolist() == file.value()[1].tolist() == [1.0] * 5


def test_another_process_reads_it_and_the_file_ends_with_its_owner() -> None:
    before = open_files()
    file = MemoryFile(np.arange(1000))
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer).sum())"
    result = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(file), capture_output=True, check=True)
    assert result.stdout.split() == [b"499500"]
    array = file.value()
    del file
    assert array.sum() == 499_500  # its memory outlives the object
    del array
    assert open_files() == before


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_file() -> None:
    file = MemoryFile(np.arange(1000))
    pid = os.fork()
    if pid == 0:
        os._exit(open_files())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert file.value().sum() == 499_500


def test_a_reader_knows_the_file_by_its_bytes(tmp_path: Path) -> None:
    file = MemoryFile(b"secret")
    content = file.content()
    assert can_open(file.path, content)
    assert not can_open(file.path, content[:-1] + b"?")
    assert not can_open(file.path, content[:-1])
    assert not can_open(str(tmp_path / "missing"), content)
    assert not can_open(str(tmp_path), content)
    os.mkfifo(tmp_path / "fifo")
    assert not can_open(str(tmp_path / "fifo"), content)  # at once, though no process writes into it
