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

from rayvec.distributed.memory_file import MemoryFile

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
    first, second = (pickle.loads(pickle.dumps(file)) for _ in range(2))
    assert all(array.ctypes.data % 64 == 0 for array in first)
    first[1][:] = 7.0
    assert second[1].tolist() == [1.0] * 5


def test_another_process_reads_it_and_the_file_ends_with_its_owner() -> None:
    before = open_files()
    file = MemoryFile(np.arange(1000))
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer).sum())"
    result = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(file), capture_output=True, check=True)
    assert result.stdout.split() == [b"499500"]
    array = pickle.loads(pickle.dumps(file))
    del file
    assert array.sum() == 499_500  # its memory outlives the object
    del array
    assert open_files() == before
