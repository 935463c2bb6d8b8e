"""The tests of ``tests/gpu`` themselves, on a machine that has no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_GPU = Path(__file__).parents[1] / "gpu"
_PROGRAM = """
import sys

sys.modules.update(dict.fromkeys({absent!r}))  # as if they were not installed
import pytest
sys.exit(pytest.main({arguments!r}))
"""
_ABSENT = {"ray", "yaml", "tyro", "psutil", "tianshou", "hypothesis", "tensorboard", "scipy", "numba", "pandas"}


def run(*arguments: str, **environment: str) -> str:
    """Runs the folder's tests where nothing but torch, NumPy, Gymnasium and pytest is installed."""
    program = _PROGRAM.format(absent=_ABSENT, arguments=["-q", str(_GPU), *arguments])
    variables = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_without_a_gpu_they_are_skipped_and_say_why() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "this machine has no GPU that torch" in run("-k", "lost or (captured and sac-numbers-box)")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_a_cpu_they_pass() -> None:
    assert " passed" in run(RAYVEC_GPU_TESTS_ON="cpu")
