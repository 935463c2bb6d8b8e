"""examples/servers: a simulator in a virtual environment with an older NumPy and Gymnasium."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "servers" / "other_python.py"


@pytest.mark.slow
def test_an_older_numpy_and_gymnasium(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It installs packages, for which it needs an index."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "other"], check=True)
    python = str(tmp_path / "other" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", "numpy<2", "gymnasium==0.29.1"], check=True)
    runpy.run_path(str(EXAMPLE))["main"](python)
    printed = capsys.readouterr().out.split()
    assert printed[:6] == ["200", "steps", "of", "4", "environments", "in"] and int(printed[-2]) > 4
