"""Which nodes answer: a busy one does, a dead raylet does not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.waiting import DEADLINE_S

from rayvec.cluster import reachability
from rayvec.cluster.reachability import unreachable


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """A port that drops what arrives, as a machine does that is gone: its queue of connections is full."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(server.getsockname())
        yield server.getsockname()


def test_a_node_answers_if_it_accepts_connections(silent: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "_ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        busy = server.getsockname()  # accepts nothing, but its machine does
        with socket.create_server(("127.0.0.1", 0)) as closed:
            refuses = closed.getsockname()
        assert unreachable({"busy": busy, "refuses": refuses, "silent": silent}) == {"refuses", "silent"}
    assert unreachable({}) == set()


def test_a_head_that_gave_no_answer_is_asked_again_after_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, answers, asked = [100.0], [False], [0]

    def answer(address: tuple[str, int], *, refused_is_answer: bool) -> bool:
        asked[0] += 1
        return answers[0]

    context = SimpleNamespace(gcs_address="10.0.0.9:6379")
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setattr(reachability, "ray", ray)
    monkeypatch.setattr(reachability, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(reachability, "_answers", answer)
    monkeypatch.setattr(reachability, "_serves", lambda: True)
    monkeypatch.setattr(reachability, "_head_was_silent_s", {})
    assert not reachability.can_call_ray() and not reachability.can_call_ray() and asked == [1]
    now_s[0], answers[0] = 111.0, True
    assert reachability.can_call_ray() and reachability.can_call_ray() and asked == [3]
    answers[0] = False
    assert not reachability.head_answers() and not reachability.can_call_ray() and asked == [4]
    answers[0] = True
    assert reachability.head_answers() and reachability.can_call_ray()  # it answered meanwhile


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
