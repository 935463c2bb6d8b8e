"""A machine's fleet of worker processes: what workers get, and what happens when workers fail."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gymnasium import spaces
from helpers.fleet_kit import Steps, reset, step
from helpers.kinds import env_fns
from helpers.waiting import alive, wait_until

from rayvec.envs.factory import EnvFactory
from rayvec.fleet.commands import Autoreset, Command, Op
from rayvec.fleet.restarts import NO_RESTARTS, RestartPolicy
from rayvec.node.machine import Machine

RESTART = RestartPolicy(restart=True)


@contextmanager
def machine(
    fns: Sequence[Callable[[], Any]],
    num_workers: int = 2,
    policy: RestartPolicy = NO_RESTARTS,
    native: bool = False,
    **settings: Any,
) -> Iterator[Machine]:
    made = Machine(EnvFactory.build(list(fns), native=native), num_workers, restart_policy=policy, **settings)
    try:
        made.allocate(made.spaces.observation, made.spaces.action)
        yield made
    finally:
        made.close()


def call(fleet: Any, name: str, *args: Any) -> list[Any]:
    values: list[Any] = fleet.run(Command(Op.CALL, np.arange(fleet.num_envs), rest=(name, args, {}))).value
    return values


def steps_here(pipe: Any) -> None:
    """Sends the process id of a fork server of this process."""
    with machine([Odd] * 2) as fleet:
        pipe.send(psutil.Process(fleet.worker_pids()[0]).ppid())


class Odd(Steps):
    """Does what a call asks for."""

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def has(self, module: str) -> bool:
        return module in sys.modules

    def where(self) -> tuple[int, str]:
        return os.getpid(), os.getcwd()

    def big(self, value: bytes) -> bytes:
        return value * 2

    def start(self) -> int:
        self.process = subprocess.Popen(["sleep", "1000"])
        return self.process.pid


class TestMessages:
    def test_messages_of_any_size(self) -> None:
        with machine([Odd] * 2) as fleet:
            for size in (1, 1 << 13, 1 << 14, 1 << 20):
                assert [len(value) for value in call(fleet, "big", b"x" * size)] == [2 * size] * 2


class TestStart:
    def test_workers_get_the_variables_the_folder_and_the_modules_of_this_moment(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """The script has a fork server of its own, with other modules."""
        context = multiprocessing.get_context("forkserver")
        with context.Pool(1) as pool:
            assert pool.apply(abs, (-1,)) == 1
        monkeypatch.setenv("RAYVEC_TEST", "a")
        with machine([Odd] * 2) as fleet:
            assert call(fleet, "variable", "RAYVEC_TEST") == ["a"] * 2
            assert call(fleet, "has", "wave") == [False] * 2
        monkeypatch.setenv("RAYVEC_TEST", "b")
        monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
        monkeypatch.chdir(tmp_path)
        with machine([Odd] * 2, preload=["wave"]) as fleet:
            assert call(fleet, "variable", "RAYVEC_TEST") == ["b"] * 2
            assert call(fleet, "variable", "RAY_AUTH_TOKEN") == [None] * 2
            assert call(fleet, "has", "wave") == [True] * 2
            assert {folder for _, folder in call(fleet, "where")} == {str(tmp_path)}
        assert os.environ["RAY_AUTH_TOKEN"] == "secret" and "RAYVEC_PRELOAD" not in os.environ

    def test_a_preloaded_module_that_is_missing(self, capfd: pytest.CaptureFixture[str]) -> None:
        with machine([Odd] * 2, preload=["not_there"]) as fleet:
            assert len(call(fleet, "where")) == 2
        assert "preload can't import 'not_there'" in capfd.readouterr().err

    def test_workers_have_neither_torch_nor_ray(self) -> None:
        with machine([Odd] * 2) as fleet:
            assert not any(call(fleet, "has", "torch") + call(fleet, "has", "ray"))


class TestFaults:
    def test_objects_of_a_killed_worker_stay(self) -> None:
        space = spaces.Dict(mission=spaces.Text(5), x=spaces.Box(0, 1))
        with machine(env_fns(2, space), policy=RESTART) as fleet:
            reset(fleet)
            last = fleet.arrays["obs"]["mission"].copy()
            os.kill(fleet.worker_pids()[1], signal.SIGKILL)
            answer = step(fleet, Autoreset.SAME_STEP)
            assert answer.infos["final_obs"][1]["mission"] == last[1]


class TestEnd:
    def test_a_process_of_multiprocessing_leaves_the_folder_of_its_parent(self) -> None:
        with machine([Odd] * 2):
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.get_context("spawn").Process(target=steps_here, args=(theirs,))
            process.start()
            server: int = ours.recv()
            process.join()
            wait_until(lambda: not alive(server), "the fork server of the process has ended")
            with machine([Odd] * 2) as another:
                reset(another)

    @pytest.mark.parametrize("then", ["", "made.close()"], ids=["open", "closed"])
    def test_workers_end_with_their_owner(self, tmp_path: Path, then: str) -> None:
        """SIGKILL leaves neither workers, nor what environments have started, nor folders."""
        script = tmp_path / "script.py"
        script.write_text(
            "import sys, time\nfrom multiprocessing import util\n"
            f"sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]!r}\n"
            "from test_machine import *\n"
            "made = Machine(EnvFactory.build([Odd] * 2), 2)\n"
            "made.allocate(made.spaces.observation, made.spaces.action)\n"
            "started = [*made.worker_pids(), *call(made, 'start'), util.get_temp_dir()]\n"
            f"{then}\n"
            "print(*started, flush=True)\n"
            "time.sleep(1000)\n"
        )
        with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdout is not None
            *pids, folder = owner.stdout.readline().split()
            assert len(pids) == 4 and Path(folder).exists()
            owner.kill()
        wait_until(lambda: not any(alive(int(pid)) for pid in pids), "no process is left")
        wait_until(lambda: not Path(folder).exists(), "no folder is left")
