"""The border between the script and its workers: what of the script's process reaches them, and what does not."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MakeVec
from helpers.testing import PlainEnv
from helpers.waiting import DEADLINE_S

import rayvec


class Shows(PlainEnv):
    """Shows in its infos what a function returns on a worker."""

    def __init__(self, show: Callable[[], Any]) -> None:
        self._show = show

    def info(self) -> dict[str, Any]:
        return {"shown": self._show()}


def shown(show: Callable[[], Any], **settings: Any) -> list[Any]:
    """Returns what a function returns on each of two workers of this machine."""
    with rayvec.RayVecEnv(partial(Shows, show), 2, num_nodes=0, workers_per_node=2, **settings) as env:
        return list(env.reset()[1]["shown"])


class TestVariables:
    NAMES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ({}, "1 1 1"),
            ({"OMP_NUM_THREADS": "3"}, "3 3 3"),
            ({"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "2"}, "3 3 2"),
            ({"OPENBLAS_NUM_THREADS": "5"}, "1 5 1"),
        ],
        ids=str,
    )
    def test_threads_that_the_user_has_set_stay(
        self, given: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in self.NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        command = "echo " + " ".join(f"${name}" for name in self.NAMES)  # in what the environment starts
        assert shown(partial(subprocess.getoutput, command)) == [expected] * 2

    def test_gpus_are_those_of_the_node_whatever_ray_hides(self, ray_cluster: Any, make_vec: MakeVec) -> None:
        names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
        variables = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1", "CUDA_VISIBLE_DEVICES": "3,5", "OMP_NUM_THREADS": "2"}
        pretended = ray_cluster.add_node(num_cpus=30, num_gpus=2, env_vars=variables)
        hiding = ray_cluster.add_node(num_cpus=30, env_vars={"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"})
        try:
            env = make_vec(partial(Shows, partial(_variables, names)), num_envs=12, nodes=4, workers=3)
            seen = env.reset()[1]["shown"].reshape(4, 3)
            env.close()
        finally:
            ray_cluster.remove_node(pretended)
            ray_cluster.remove_node(hiding)
        assert sorted(map(str, seen[:, 0])) == ["('3,5', '2')", *["(None, '1')"] * 3]
        assert all(len(set(node)) == 1 for node in seen)


def _variables(names: tuple[str, ...]) -> tuple[str | None, ...]:
    return tuple(map(os.environ.get, names))


SPAWNED = """
import multiprocessing
import numpy as np
from helpers.own_parts import TwoHeads
from helpers.testing import PlainEnv

class Walk(PlainEnv):
    length = 5

    def info(self):
        return {"mark": Mark()}

class Mark:
    pass

class Broken(Exception):
    pass

class Net(TwoHeads):
    def __init__(self, observation_space, action_space, config):
        super().__init__(observation_space, action_space)

def policy(obs):
    return np.ones(len(obs), np.int64)

def fails():
    raise Broken

def main(run_dir):
    import rayvec
    with rayvec.RayVecEnv(Walk, 2, num_nodes=0, workers_per_node=2) as env:
        assert isinstance(env.reset()[1]["mark"][0], Mark)
        assert env.rollout(policy, num_steps=2).act.tolist() == [[1, 1], [1, 1]]
    try:
        rayvec.RayVecEnv(fails, 2, num_nodes=0)
    except Broken:
        pass
    sizes = dict(total_steps=64, num_envs=2, num_steps=16, minibatch_size=32, eval_episodes=1)
    config = rayvec.PPOConfig(num_nodes=0, workers_per_node=2, run_dir=run_dir, num_learners=2, **sizes)
    rayvec.train(config, env=Walk, network=Net)
    assert "passed in Python" in open(f"{run_dir}/config.yaml").read()

if __name__ == "__main__":
    import sys
    process = multiprocessing.get_context("spawn").Process(target=main, args=sys.argv[1:])
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


HANGS = """
import time
import numpy as np
import rayvec
from helpers.testing import CountingEnv

class Hangs(CountingEnv):
    def step(self, action):
        time.sleep(600)

env = rayvec.RayVecEnv([Hangs] * 2, num_nodes=0, workers_per_node=2)
env.reset(seed=0)
env.step_async(np.zeros(2, int))
"""


def test_a_step_that_hangs_delays_the_end_of_the_script_for_a_second() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, check=True)
    assert "killed after 1 s, since their environments had not closed" in done.stderr


def test_what_the_script_defines_works_in_a_process_that_multiprocessing_has_spawned(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWNED)
    done = subprocess.run([sys.executable, script, tmp_path / "run"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


MODULE = """
import functools
import numpy as np
import rayvec
from helpers.testing import CountingEnv

spaces = rayvec.make_vec(CountingEnv, 1, num_nodes=0, workers_per_node=0)  # starts no process

class Mine(CountingEnv):
    @functools.cached_property
    def own(self):
        return type(self) is Mine

with rayvec.RayVecEnv({make}, 2, num_nodes=0, workers_per_node=2) as env:
    env.reset(seed=0)
    print(env.step(np.zeros(2, int))[1].tolist(), env.get_attr("own"))
"""

LOADED = """
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("folder", "module.py")
sys.modules["folder"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["folder"])
"""


@pytest.mark.parametrize(
    ("run", "make", "words"),
    [
        (["-X", "dev", "-W", "error", "module.py"], "Mine", ""),
        (["-c", "import module"], "Mine", ""),
        (["-c", "import runpy; runpy.run_path('module.py')"], "Mine", ""),
        (["-c", "import sys; sys.modules['odd'] = sys; exec(open('module.py').read(), {})"], "Mine", ""),
        (["-c", "import os, sys; sys.modules['odd'] = object(); os.mkdir('folder'); " + LOADED], "Mine", ""),
        (["-c", "import module"], "lambda: __import__('module').Mine()", "'module' makes environments when it is"),
    ],
)
def test_a_module_that_makes_environments_when_it_runs(
    run: list[str], make: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("module.py").write_text(MODULE.format(make=make))
    done = subprocess.run([sys.executable, *run], capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert words in done.stderr if words else (done.stdout, done.stderr) == ("[1.0, 1.0] (True, True)\n", "")


class TestSharedObjects:
    def test_a_manager_reaches_the_environments_of_all_nodes(self, make_vec: MakeVec) -> None:
        with multiprocessing.get_context("spawn").Manager() as manager:
            board = manager.dict(level=3)
            makes = partial(Shows, partial(board.get, "level"))
            env = make_vec(makes, num_envs=2, nodes=2)
            assert env.reset()[1]["shown"].tolist() == [3, 3]
            board["level"] = 4
            assert env.step(np.zeros(2, np.int64))[4]["shown"].tolist() == [4, 4]

    @pytest.mark.parametrize("kind", ["Value", "Lock", "Queue"])
    def test_the_error_about_other_shared_objects_names_the_manager(self, kind: str) -> None:
        made = getattr(multiprocessing, kind)(*(["i"] if kind == "Value" else []))
        with pytest.raises(TypeError, match=r"multiprocessing\.Manager\(\)"):
            shown(lambda: made)


def test_a_module_that_starts_a_thread_is_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        textwrap.dedent("""
        import threading, time
        threading.Thread(target=time.sleep, args=[3600], name="the poller", daemon=True).start()
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(rayvec.errors.ConfigError, match=r"'starts_a_thread' starts a thread .*the poller"):
        shown(os.getpid, preload=("threading", "starts_a_thread"))
