"""A checkpoint is whole or absent, holds nothing that could run, and says what is wrong with it."""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from rayvec.errors import CheckpointError
from rayvec.training import checkpoint

STATE = {
    "weights": torch.arange(5.0),
    "nested": {"list": [1, 2.5, "three", None, True], "tuple": (b"x", torch.tensor([1, 2]))},
    "by_index": {0: torch.ones(2, dtype=torch.float64)},
}


def test_state_comes_back_equal(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "checkpoint.pt", STATE)
    state = checkpoint.load(tmp_path / "checkpoint.pt")
    assert torch.equal(state["weights"], STATE["weights"])
    assert state["nested"]["list"] == STATE["nested"]["list"]
    assert state["nested"]["tuple"][0] == b"x" and torch.equal(state["nested"]["tuple"][1], torch.tensor([1, 2]))
    assert state["by_index"][0].dtype == torch.float64
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]


@pytest.mark.parametrize("value", [np.ones(2), {1, 2}, Path("x"), np.float64(1.0), object(), {(1, 2): 3}, print])
def test_objects_are_refused_and_the_old_checkpoint_stays(tmp_path: Path, value: object) -> None:
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, {"step": 1})
    with pytest.raises(CheckpointError, match=r"state\['deep'\]\[0\] is a .*tensors and plain values only"):
        checkpoint.save(path, {"deep": [value]})
    assert checkpoint.load(path) == {"step": 1}


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, STATE)
    whole = path.read_bytes()
    for size in [0, 1, *range(7, len(whole), len(whole) // 40), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="no undamaged checkpoint"):
            checkpoint.load(path)


def test_a_flipped_bit_in_a_tensor_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    weights = torch.arange(1000.0)
    checkpoint.save(path, {"weights": weights})
    content = bytearray(path.read_bytes())
    content[content.index(weights.numpy().tobytes()[1000:1100])] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(path)


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("exploded",)


def test_foreign_files_are_refused_and_nothing_in_them_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "checkpoint.pt"
    kind = {"kind": "rayvec checkpoint"}
    for write, words in (
        (lambda: path.write_text("# not a checkpoint\n"), "another program"),
        (lambda: torch.save({"model": torch.ones(2)}, path), "another program"),
        (lambda: path.write_bytes(pickle.dumps(_Bomb())), "another program"),
        (lambda: torch.save({**kind, "format": 1, "state": {"bomb": _Bomb()}}, path), "another program"),
        (lambda: torch.save({**kind, "format": 99, "state": {}}, path), r"format version 99\. .* version 5"),
    ):
        write()
        with pytest.raises(CheckpointError, match=words):
            checkpoint.load(path)
    assert not (tmp_path / "exploded").exists()


SAVE_FOR_EVER = """
import sys, torch
from pathlib import Path
from rayvec.training import checkpoint
step = 0
while True:
    step += 1
    checkpoint.save(Path(sys.argv[1]), {"step": step, "weights": torch.full((200_000,), float(step))})
    print(step, flush=True)
"""


def test_sigkill_while_saving_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    pause = random.Random(0)
    with subprocess.Popen([sys.executable, "-c", SAVE_FOR_EVER, str(path)], stdout=subprocess.PIPE, text=True) as saver:
        assert saver.stdout is not None
        assert saver.stdout.readline() == "1\n"
        os.kill(saver.pid, signal.SIGSTOP)
        for _ in range(40):  # stopped is as good as killed: what is on the disk now is what a kill would leave
            os.kill(saver.pid, signal.SIGCONT)
            time.sleep(pause.uniform(0.0005, 0.01))
            os.kill(saver.pid, signal.SIGSTOP)
            _assert_whole(path)
        os.kill(saver.pid, signal.SIGCONT)
        time.sleep(pause.uniform(0.0005, 0.01))
        saver.kill()
        reported = [int(line) for line in saver.stdout]
    assert saver.returncode == -signal.SIGKILL
    assert _assert_whole(path) >= reported[-1]


def _assert_whole(path: Path) -> int:
    state = checkpoint.load(path)
    assert torch.equal(state["weights"], torch.full((200_000,), float(state["step"])))
    return int(state["step"])
