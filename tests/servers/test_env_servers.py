"""Environments in servers that dial in: equal to local ones, and what happens when servers fail."""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import os
import re
import select
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from helpers.training_kit import SMALL, options
from helpers.waiting import DEADLINE_S, alive, wait_until

import rayvec
from rayvec.cli import main
from rayvec.data.cores import usable_cores
from rayvec.env_server import dial
from rayvec.errors import ConfigError
from rayvec.servers.env_servers import dialled

SERVER = Path(rayvec.__file__).parent / "env_server.py"
KEY = "0123456789abcdef"


def command(env: str, kwargs: str = "{}", server: Path = SERVER) -> list[str]:
    return [sys.executable, str(server), env, "--kwargs", kwargs]


def make_cartpole() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1")


@dataclass
class Dialler:
    """Starts servers that dial in, and ends what is left of them."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __call__(self, port: int, key_file: Path, **settings: Any) -> subprocess.Popen[bytes]:
        options = ["--connect", f"127.0.0.1:{port}", "--key-file", str(key_file)]
        with self.errors.open("ab") as errors:
            words = command("helpers.served:Plant", **settings)
            self.processes.append(subprocess.Popen([*words, *options], stderr=errors))
        return self.processes[-1]

    @property
    def errors(self) -> Path:
        return self.folder / "stderr"


@pytest.fixture
def dial_in(tmp_path: Path) -> Iterator[Dialler]:
    dialler = Dialler(tmp_path)
    yield dialler
    for process in dialler.processes:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def where_helpers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(KEY + "\n")
    return path


def plants(count: int, fault: str = "", **settings: Any) -> rayvec.EnvServers:
    return rayvec.EnvServers(count, command=command("helpers.served:Plant", f'{{"fault": "{fault}"}}'), **settings)


@pytest.fixture
def one_env(request: pytest.FixtureRequest) -> Iterator[rayvec.RayVecEnv]:
    fault, settings = request.param
    with plants(1, fault) as servers:
        env = rayvec.RayVecEnv(servers, num_nodes=0, **settings)
        env.reset(seed=1)
        yield env
        env.close()


def test_servers_equal_sync_vector_env_by_step_and_in_chunks() -> None:
    with rayvec.EnvServers(2, command=command("CartPole-v1")) as servers:
        env = rayvec.RayVecEnv(servers, num_nodes=0)
        reference = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
        assert env.single_observation_space == reference.single_observation_space
        assert env.single_action_space == reference.single_action_space
        np.testing.assert_array_equal(env.reset(seed=3)[0], reference.reset(seed=3)[0])
        reference.action_space.seed(1)
        for _ in range(60):
            actions = reference.action_space.sample()
            found, expected = env.step(actions), reference.step(actions)
            for one, other in zip(found[:4], expected[:4], strict=True):
                np.testing.assert_array_equal(one, other, strict=True)
            assert found[4] == expected[4]

        local = rayvec.RayVecEnv("CartPole-v1", 2, num_nodes=0, workers_per_node=0)
        chunk, same = (each.rollout(lambda obs: (obs[:, 2] > 0).astype(int), 50, seed=7) for each in (env, local))
        np.testing.assert_array_equal(chunk.obs, same.obs)
        np.testing.assert_array_equal(chunk.final_obs, same.final_obs)
        np.testing.assert_array_equal(chunk.terminated, same.terminated)
        env.close()


def test_more_servers_are_started_for_more_environments() -> None:
    with plants(1) as servers:
        envs = [rayvec.RayVecEnv(servers, num_nodes=0) for _ in range(2)]
        pids = set()
        for env in envs:
            env.reset()
            pids.add(env.step(np.array([1]))[4]["where"]["pid"][0])
            env.close()
    assert len(pids) == 2


def test_rayvec_train_with_servers_equals_a_training_with_local_environments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"num_envs": 2, "num_steps": 64, "minibatch_size": 64, "total_steps": 256, "eval_episodes": 2}
    local = rayvec.train(rayvec.PPOConfig(**settings, run_dir=tmp_path / "local"), env=[make_cartpole] * 2)
    there = tmp_path / "there"
    servers = ["--env-servers", "command", shlex.join(command("CartPole-v1"))]
    assert main(["train", "ppo", *options({**settings, "run_dir": there}), *servers]) == 0
    assert f"greedy return {local.eval_return_mean:.2f}" in capsys.readouterr().out
    assert main(["train", "--resume", str(there), "--total-steps", "384"]) == 0
    assert main(["eval", str(there), "--episodes", "1"]) == 0
    with pytest.raises(ConfigError, match="env_servers"):
        rayvec.PPOConfig(env_servers={"prot": 9000})


@pytest.mark.parametrize("one_env", [("", {})], indirect=True)
def test_a_plain_object_with_four_values_is_an_environment(one_env: rayvec.RayVecEnv) -> None:
    np.testing.assert_array_equal(one_env.reset(seed=100)[0], [[0.1, 0.1]])
    for _ in range(5):
        _, rewards, terminated, truncated, infos = one_env.step(np.array([1]))
    assert (rewards[0], terminated[0], truncated[0]) == (1.0, False, True)
    assert infos["count"].dtype == np.int16 and infos["count"][0] == 5
    assert infos["path"][0] == [5, "a"] and infos["where"]["pid"][0] != os.getpid()

    assert one_env.call("set_difficulty", 3, times=2) == (6,)
    assert one_env.get_attr("difficulty") == (6,)
    for difficulty in (4, -(2**63), 2**63, -(2**80)):  # also those that 64 bits don't hold
        one_env.set_attr("difficulty", difficulty)
        assert one_env.get_attr("difficulty") == (difficulty,)
    with pytest.raises(AttributeError, match="no attribute 'valve'"):
        one_env.get_attr("valve")


@pytest.mark.parametrize(
    ("one_env", "error", "text"),
    [
        (("raises", {}), KeyError, "valve"),
        (("raises_own", {}), RuntimeError, "helpers.served.BrokenValve: valve"),
        (("unsendable", {}), TypeError, r"\['obs'\] is a SimpleNamespace, which can't be sent"),
        (("dies", {}), ConnectionError, "environment server 127.0.0.1:.* was lost in step"),
    ],
    indirect=["one_env"],
)
def test_errors_of_an_environment_are_raised_here(one_env: rayvec.RayVecEnv, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as raised:
        one_env.step(np.array([2]))
    assert "environment 0" in str(raised.value.__cause__)


@pytest.mark.parametrize(
    "one_env",
    [("dies", {"on_env_error": "restart"}), ("hangs", {"on_env_error": "restart", "step_timeout_s": 1.0})],
    indirect=True,
    ids=["killed", "hung"],
)
def test_a_lost_server_is_started_again_and_its_episode_is_cut(one_env: rayvec.RayVecEnv) -> None:
    pid = one_env.step(np.array([1]))[4]["where"]["pid"][0]
    obs = one_env.step(np.array([1]))[0]
    lost = one_env.step(np.array([2]))
    assert lost[3][0] and not lost[2][0]
    np.testing.assert_array_equal(lost[0], obs)  # the last true observation
    one_env.step(np.array([1]))
    again = one_env.step(np.array([1]))[4]["where"]["pid"][0]
    assert again != pid
    wait_until(lambda: not alive(pid), "the server has ended")


def test_a_server_that_dials_in_again_takes_the_place_of_its_lost_connection(key_file: Path, dial_in: Dialler) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door, rayvec.EnvServers(1, key_file=key_file) as servers:
        cables: list[socket.socket] = []

        def forward() -> None:  # a network whose cables the test cuts
            while True:
                near = door.accept()[0]
                try:
                    ends = near, socket.create_connection(("127.0.0.1", servers.port))
                except ConnectionRefusedError:  # no environment waits for a server
                    near.close()
                    continue
                cables.append(near)
                for one, other in (ends, ends[::-1]):
                    Thread(target=pump, args=(one, other), daemon=True).start()

        Thread(target=forward, daemon=True).start()
        server = dial_in(door.getsockname()[1], key_file)
        env = rayvec.RayVecEnv(servers, num_nodes=0, on_env_error="restart")
        env.reset(seed=1)
        pid = env.step(np.array([1]))[4]["where"]["pid"][0]
        cables[-1].shutdown(socket.SHUT_RDWR)
        assert env.step(np.array([1]))[3][0]
        env.step(np.array([1]))
        assert env.step(np.array([1]))[4]["where"]["pid"][0] == pid == server.pid
        env.close()
    assert server.wait(DEADLINE_S) == 0


def pump(source: socket.socket, target: socket.socket) -> None:
    with source, contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


def test_strangers_and_other_keys_and_versions_are_refused(
    key_file: Path, dial_in: Dialler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other_key, newer = tmp_path / "other", tmp_path / "env_server.py"
    other_key.write_text("another key of some length")
    newer.write_text(SERVER.read_text().replace("rayvec 7", "rayvec 8"))
    codes: list[int] = []

    def visit(port: int) -> None:
        codes.append(dial_in(port, other_key).wait(DEADLINE_S))
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(100):
                    pass
        codes.append(dial_in(port, key_file, server=newer).wait(DEADLINE_S))
        dial_in(port, key_file)

    with caplog.at_level(logging.WARNING), rayvec.EnvServers(1, key_file=key_file) as servers:
        visitors = Thread(target=visit, args=(servers.port,))
        visitors.start()
        env = rayvec.RayVecEnv(servers, num_nodes=0, workers_per_node=0)
        visitors.join()
        env.reset()
        env.close()
    assert codes == [1, 1] and dial_in.processes[-1].wait(DEADLINE_S) == 0
    refusals = [record.message for record in caplog.records if "refused" in record.message]
    assert "it has another key" in refusals[0] and all("another protocol, or" in each for each in refusals[1:])
    assert len(refusals) == 3 and KEY not in caplog.text
    errors = dial_in.errors.read_text()
    assert "it has another key\n" in errors and "another version: both sides need the same" in errors


@pytest.mark.parametrize(
    ("env", "options", "error"),
    [
        ("helpers.served:Plnat", {}, "has no attribute 'Plnat'"),
        ("no_such_module:Plant", {}, "No module named 'no_such_module'"),
        ("CartPole-v1", {"--connect": "127.0.0.1:99999"}, "--connect is '127.0.0.1:99999'"),
        ("CartPole-v1", {"--key-file": "nowhere"}, "No such file or directory: 'nowhere'"),
        ("CartPole-v1", {"--key-file": os.devnull}, "has 0 bytes"),
    ],
)
def test_a_server_refuses_arguments_before_it_connects(
    env: str, options: dict[str, str], error: str, key_file: Path
) -> None:
    options = {"--connect": "127.0.0.1:1", "--key-file": str(key_file), **options}
    words = [*command(env), "--once", *(word for pair in options.items() for word in pair)]
    server = subprocess.run(words, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert server.returncode == 2 and error in server.stderr.splitlines()[-1] and "Traceback" not in server.stderr


def test_what_a_module_raises_has_its_traceback(key_file: Path, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("{}.plant")
    words = [*command("fails:Plant"), "--connect", "127.0.0.1:1", "--key-file", str(key_file), "--once"]
    server = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert server.returncode == 2 and 'fails.py", line 1' in server.stderr


def test_a_server_that_has_dialled_in_is_accepted_although_its_launcher_has_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        socket.create_connection(listener.getsockname()).close()  # of a stranger
        server = Thread(target=lambda: dial(listener.getsockname(), KEY.encode()).close())
        server.start()
        select.select([listener], [], [], DEADLINE_S)
        found = dialled(listener, KEY.encode(), DEADLINE_S, has_ended=lambda: True)
        assert found is not None
        found[0].close()
        server.join()


STRANGER = """
import os, socket, sys
host, port = sys.argv[sys.argv.index("--connect") + 1].split(":")
socket.create_connection((host, int(port))).close()
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_a_stranger_does_not_stop_a_server_that_a_worker_starts(tmp_path: Path) -> None:
    script = tmp_path / "stranger.py"
    script.write_text(STRANGER)
    with rayvec.EnvServers(1, command=[sys.executable, str(script), str(SERVER), "CartPole-v1"]) as servers:
        env = rayvec.RayVecEnv(servers, num_nodes=0)
        assert env.reset(seed=1)[0].shape == (1, 4)
        env.close()


def test_neither_servers_that_open_slowly_nor_silent_strangers_keep_others_waiting(
    key_file: Path, dial_in: Dialler, tmp_path: Path
) -> None:
    """Each opens when all of them open; a stranger is refused after 10 s."""
    strangers: list[socket.socket] = []
    (tmp_path / "opening").mkdir()

    def connect() -> None:
        while not strangers:
            with contextlib.suppress(ConnectionRefusedError):
                strangers.append(socket.create_connection(("127.0.0.1", servers.port)))

    with rayvec.EnvServers(4, key_file=key_file, start_timeout_s=9) as servers:
        stranger = Thread(target=connect)
        stranger.start()
        for _ in range(4):
            dial_in(servers.port, key_file, kwargs=json.dumps({"folder": str(tmp_path / "opening"), "together": 4}))
        with rayvec.RayVecEnv(servers, num_nodes=0, workers_per_node=4) as env:
            assert env.reset(seed=1)[0].shape == (4, 2)
    stranger.join()
    strangers[0].close()


def test_servers_whose_spaces_differ_are_refused(key_file: Path, dial_in: Dialler) -> None:
    with rayvec.EnvServers(2, key_file=key_file) as servers:
        processes = [dial_in(servers.port, key_file, kwargs=f'{{"size": {size}}}') for size in (2, 3)]
        with pytest.raises((ConfigError, ValueError), match="space"):
            rayvec.RayVecEnv(servers, num_nodes=0)
    assert [process.wait(DEADLINE_S) for process in processes] == [0, 0]


def test_what_servers_need_is_checked(key_file: Path, tmp_path: Path) -> None:
    (tmp_path / "short").write_text("short")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for settings, text in [
            ({}, "got no key_file. Pass key_file .* or command"),
            ({"key_file": key_file, "command": ["x"]}, "got command and key_file"),
            ({"command": ["x"], "port": 9000, "host": "here"}, "got command and port and host"),
            ({"key_file": tmp_path / "short"}, "has 5 bytes. It must have at least 16"),
            ({"key_file": tmp_path / "none"}, "No such file"),
            ({"key_file": key_file, "host": "127.0.0.1", "port": taken.getsockname()[1]}, "already in use"),
        ]:
            with pytest.raises(ConfigError, match=text):
                rayvec.EnvServers(1, **settings)
    with pytest.raises(ConfigError, match=r"has not dialled in: it has ended with exit code 2"):
        rayvec.RayVecEnv(rayvec.EnvServers(1, command=[sys.executable, "-c", "exit(2)"]), num_nodes=0)
    with rayvec.EnvServers(1, key_file=key_file, start_timeout_s=0.1) as servers:
        with pytest.raises(ConfigError, match=f"has waited 0.1 s for an environment server at port {servers.port}"):
            rayvec.RayVecEnv(servers, num_nodes=0)
    with rayvec.EnvServers(1, command=command("helpers.served:cannot_be_made")) as servers:
        with pytest.raises(ValueError, match="no licence"):
            rayvec.RayVecEnv(servers, num_nodes=0)


def test_a_run_says_where_it_waits_for_servers(
    key_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = options(
        {**SMALL, "start_timeout_s": 0.1, "num_nodes": 0, "workers_per_node": 0, "run_dir": tmp_path / "a"}
    )
    command_line = ["train", "ppo", *settings, "--env-servers", "key_file", str(key_file)]
    assert main(command_line) == 2
    expected = r"rayvec: waiting for 4 environment servers at port (\d+)\nrayvec: .* waited 0.09 s .* at port \1 of"
    assert re.match(expected, capsys.readouterr().err)
    (tmp_path / "a").mkdir()
    assert main(command_line) == 2
    assert "which exists" in (error := capsys.readouterr().err) and "waiting" not in error


@pytest.mark.parametrize(
    ("settings", "env"),
    [
        ({"env_id": "Acrobot-v1"}, None),
        ({"native": "a:b"}, None),
        ({"env_kwargs": {"a": 1}}, None),
        ({}, "CartPole-v1"),
    ],
)
def test_servers_are_the_only_environment(settings: dict[str, Any], env: str | None) -> None:
    with pytest.raises(ConfigError, match="env_servers was passed to a run that has"):
        rayvec.train(rayvec.PPOConfig(env_servers={"command": "x"}, **settings), env=env)


def test_servers_end_with_the_process_that_waits_for_them() -> None:
    program = f"""
import rayvec
servers = rayvec.EnvServers(1, command={command("helpers.served:Plant")!r})
env = rayvec.RayVecEnv(servers, num_nodes=0)
env.reset()
print(env.step([1])[4]["where"]["pid"][0])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
    pid = int(ended.stdout)
    wait_until(lambda: not alive(pid))


def test_servers_that_dial_in_end_with_a_script_that_closes_nothing_but_not_with_its_child(
    key_file: Path, dial_in: Dialler
) -> None:
    program = f"""
import os, sys, rayvec
servers = rayvec.EnvServers(1, key_file={str(key_file)!r}, start_timeout_s=100)
print(servers.port, flush=True)
rayvec.RayVecEnv(servers, num_nodes=0).close()
if os.fork() == 0:
    sys.exit()
os.wait()
env = rayvec.RayVecEnv(servers, num_nodes=0)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        server = dial_in(int(script.stdout.readline()), key_file)
        assert script.wait(DEADLINE_S) == 0
    assert server.wait(DEADLINE_S) == 0


def test_the_file_of_the_server_is_for_python_3_8_with_numpy_alone() -> None:
    tree = ast.parse(SERVER.read_text(), feature_version=(3, 8))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert set(names) - set(sys.stdlib_module_names) == {"numpy"}


def test_servers_that_only_the_environments_have_stay() -> None:
    with rayvec.RayVecEnv(rayvec.EnvServers(1, command=command("CartPole-v1")), num_nodes=0) as env:
        env.reset(seed=1)


def test_each_has_a_worker_by_default_and_none_is_tried() -> None:
    count = usable_cores() + 1
    with rayvec.EnvServers(count, command=command("helpers.served:Plant")) as servers:
        with rayvec.RayVecEnv(servers, num_nodes=0, probe=False) as env:
            assert env.topology.nodes[0].num_workers == count
        with rayvec.RayVecEnv(servers, num_nodes=0) as env:
            assert env.topology.nodes[0].num_workers == count
            assert env.get_attr("steps") == (0,) * count
