"""Keys stay with the processes that need them: none is in a log, a command line, or the environment of a worker."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import pytest
from helpers.testing import CountingEnv

import rayvec


class ShowsEnvironment(CountingEnv):
    """Shows the environment variables of its worker."""

    @property
    def variables(self) -> dict[str, str]:
        return dict(os.environ)


def test_workers_do_not_get_the_token_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef")
    monkeypatch.setenv("OF_THE_USER", "kept")
    with rayvec.RayVecEnv([ShowsEnvironment] * 2, num_nodes=0, workers_per_node=1) as env:
        for variables in env.get_attr("variables"):
            assert "RAY_AUTH_TOKEN" not in variables and variables["OF_THE_USER"] == "kept"
        (pids,) = env.worker_pids().values()
        for pid in pids:
            assert b"0123456789abcdef" not in Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.slow
def test_keys_of_streams_are_in_no_log_command_line_or_environment(
    ray_cluster: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the token of the cluster, which only processes of Ray have in their environment."""
    import ray

    keys: list[bytes] = []
    draw = secrets.token_bytes

    def drawn(size: int) -> bytes:
        keys.append(draw(size))
        return keys[-1]

    monkeypatch.setattr("rayvec.cluster.node_actor.secrets.token_bytes", drawn)
    with caplog.at_level("DEBUG"), rayvec.RayVecEnv([ShowsEnvironment] * 4, num_nodes=2, workers_per_node=2) as env:
        assert env.transports == ("shm", "tcp") and keys
        env.reset(seed=1)
        environments = {key: value.encode() for each in env.get_attr("variables") for key, value in each.items()}
        pids = [pid for found in env.worker_pids().values() for pid in found]
        texts = [Path(f"/proc/{pid}/{name}").read_bytes() for pid in pids for name in ("environ", "cmdline")]
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    texts += [path.read_bytes() for path in logs.rglob("*") if path.is_file()]
    token = os.environ["RAY_AUTH_TOKEN"].encode()
    for secret in (token, *keys, *[key.hex().encode() for key in keys]):
        assert not any(secret in text for text in (*texts, *environments.values(), caplog.text.encode()))
