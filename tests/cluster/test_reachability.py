"""Which nodes answer: a busy one does, a dead raylet does not; and a run whose head answers no more."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.waiting import DEADLINE_S

from rayvec.cluster.ray_session import unreachable


def test_a_node_answers_if_it_accepts_connections() -> None:
    with ExitStack() as stack:
        busy, full, closed = (socket.create_server(("127.0.0.1", 0), backlog=backlog) for backlog in (9, 0, 9))
        stack.enter_context(busy)  # accepts nothing, but its machine does
        stack.enter_context(full)  # drops what arrives, as a machine does that is gone
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        addresses = {"busy": busy.getsockname(), "silent": full.getsockname(), "refuses": closed.getsockname()}
        closed.close()
        assert unreachable(addresses) == {"refuses", "silent"}
    assert unreachable({}) == set()


STOPS_THE_HEAD = """
import sys
import psutil, rayvec

class Stop:
    def on_iteration(self, context):
        if context.progress.steps == 128:
            [head] = [each for each in psutil.Process().children(recursive=True) if each.name() == "gcs_server"]
            head.suspend()

sizes = {"num_envs": 2, "num_steps": 64, "minibatch_size": 64, "total_steps": 512, "eval_episodes": 1}
config = rayvec.PPOConfig(env_id="CartPole-v1", run_dir=sys.argv[1], num_nodes=1, workers_per_node=1, **sizes)
rayvec.train(config, callbacks=[Stop()])
"""


@pytest.mark.slow
def test_a_run_whose_head_is_stopped_ends_with_its_result(tmp_path: Path) -> None:
    """The system still accepts connections for the head's process. The name of TMPDIR is too long for Ray's sockets."""
    long_dir = tmp_path / ("temporary" * 5)
    long_dir.mkdir()
    environ = {**os.environ, "TMPDIR": str(long_dir)}
    environ.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-c", STOPS_THE_HEAD, str(tmp_path / "run")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=3 * DEADLINE_S)
    result = tmp_path / "run" / "result.json"
    assert result.exists() and json.loads(result.read_text())["total_steps"] == 512, done.stderr
    assert done.returncode == 1  # that of every program whose cluster has lost its head
    assert "the head of the Ray cluster does not answer" in done.stderr
