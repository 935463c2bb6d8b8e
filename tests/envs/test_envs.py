"""How environments are made: from what, how many, with which seeds."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import SyncVectorEnv
from helpers.exact import SpaceEnv
from helpers.testing import CountingEnv

from rayvec.config.references import import_plugins, resolve
from rayvec.envs.factory import EnvFactory, env_seeds
from rayvec.envs.pickled_parts import load_part
from rayvec.errors import ConfigError


class WarnsWhenMade(CountingEnv):
    def __init__(self) -> None:
        super().__init__()
        warnings.warn("it was made", stacklevel=1)


CARTPOLE = "gymnasium.envs.classic_control:CartPoleEnv"
MODULE = """
from helpers.testing import CountingEnv

class Beside(CountingEnv):
    name = "beside"
"""
SCRIPT = """
import os, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "folder"))
import rv_beside
import rayvec

if __name__ == "__main__":
    with rayvec.RayVecEnv([rv_beside.Beside] * 2, num_nodes=1, workers_per_node=2) as env:
        env.reset(seed=0)
        env.step([0, 0])
        print(*env.get_attr("name"))
"""


class TestSeeds:
    def test_lists_and_nothing(self) -> None:
        assert env_seeds(None, 2) == [None, None] and env_seeds(np.int64(3), 2) == [3, 4]  # type: ignore[arg-type]
        assert env_seeds([3, None, np.int64(5)], 3) == [3, None, 5]
        with pytest.raises(ValueError, match="seeds for 2 environments"):
            env_seeds([1, 2, 3], 2)

    def test_they_are_those_of_gymnasium(self) -> None:
        sync = SyncVectorEnv([partial(SpaceEnv, spaces.Discrete(2))] * 3)
        sync.reset(seed=40)
        assert list(sync.np_random_seed) == env_seeds(40, 3)
        sync.close()


class TestFactory:
    def test_from_an_id(self) -> None:
        factory = EnvFactory.build("CartPole-v1", 3, {"max_episode_steps": 9})
        env = factory.make(2)
        assert factory.num_envs == 3 and factory.spec is not None and factory.spec.id == "CartPole-v1"
        assert env.spec is not None and env.spec.max_episode_steps == 9
        assert EnvFactory.build("CartPole-v1").num_envs == 1

    def test_from_a_spec_or_callables_with_wrappers_in_order(self) -> None:
        limit = partial(gymnasium.wrappers.TimeLimit, max_episode_steps=4)
        spec = gymnasium.spec("Blackjack-v1")
        env = EnvFactory.build(spec, 2, wrappers=[limit, gymnasium.wrappers.FlattenObservation]).make(0)
        assert type(env) is gymnasium.wrappers.FlattenObservation
        assert type(env.env) is gymnasium.wrappers.TimeLimit
        factory = EnvFactory.build((partial(CountingEnv, i) for i in (2, 3)), wrappers=[limit])  # type: ignore[arg-type]
        made = [factory.make(i) for i in range(factory.num_envs)]
        assert [type(env) for env in made] == [gymnasium.wrappers.TimeLimit] * 2 and factory.spec is None
        assert made[1].unwrapped._max == 3  # type: ignore[attr-defined]

    def test_a_part_makes_its_own(self) -> None:
        factory = EnvFactory.build([partial(CountingEnv, i + 1) for i in range(5)])
        parts = factory.in_parts([0, 2, 4])
        part: EnvFactory = load_part(parts.fd, parts.places[1])
        assert [part.make(i).unwrapped._max for i in range(part.num_envs)] == [3, 4]  # type: ignore[attr-defined]

    def test_it_takes_registrations_to_a_process_that_has_none(self) -> None:
        gymnasium.register("rayvec-tests/Carried-v3", entry_point=lambda size: SpaceEnv(spaces.Discrete(size)))
        try:
            data = EnvFactory.build("rayvec-tests/Carried-v3", 1, {"size": 4}).to_bytes()
        finally:
            del gymnasium.registry["rayvec-tests/Carried-v3"]
        code = (
            "import pickle, sys, gymnasium; factory = pickle.loads(sys.stdin.buffer.read());"
            "print(factory.make(0).observation_space, gymnasium.make('rayvec-tests/Carried-v3', size=5).action_space)"
        )
        done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=False)
        assert (done.stdout, done.returncode) == (b"Discrete(4) Discrete(2)\n", 0), done.stderr.decode()

    @pytest.mark.parametrize("env_id", ["CartPole-v1", "rayvec-tests/Short-v0"])
    def test_registrations_of_the_driver_replace_those_of_gymnasium(self, env_id: str) -> None:
        before = dict(gymnasium.registry)
        try:
            gymnasium.registry[env_id] = EnvSpec(env_id, CARTPOLE, max_episode_steps=3)
            gymnasium.register("rayvec-tests/Array-v0", CARTPOLE, kwargs={"table": np.zeros(3)})  # equals nothing
            data = EnvFactory.build([partial(gymnasium.make, env_id)]).to_bytes()
            gymnasium.registry.clear()
            gymnasium.registry.update(before)
            factory: EnvFactory = pickle.loads(data)
            for _ in range(2):
                spec = factory.make(0).spec
                assert spec is not None and spec.max_episode_steps == 3
                gymnasium.registry.update(before)  # as a module does that is imported with the first environment
        finally:
            gymnasium.registry.clear()
            gymnasium.registry.update(before)

    def test_modules_are_found_where_the_driver_finds_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By their folder in ``sys.path``, also a relative one; the other process keeps its own folders behind them.

        It also gets the arguments of the program, which an environment may read.
        """
        (tmp_path / "rv_beside.py").write_text(MODULE)
        monkeypatch.chdir(tmp_path.parent)
        monkeypatch.syspath_prepend(tmp_path.name)
        monkeypatch.setattr(sys, "argv", ["program", "--size=3"])
        module = importlib.import_module("rv_beside")
        data = EnvFactory.build([module.Beside]).to_bytes()
        code = (
            "import pickle, sys; sys.path.append('mine'); factory = pickle.loads(sys.stdin.buffer.read());"
            "print(type(factory.make(0)).__name__, sys.path[0], sys.path[-1], len(sys.path) == len(set(sys.path)));"
            "print(sys.argv)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], input=data, capture_output=True, cwd=Path(__file__).parents[2], check=False
        )
        assert (done.stdout.decode(), done.returncode) == (
            f"Beside {tmp_path} mine True\n['program', '--size=3']\n",
            0,
        ), done.stderr.decode()

    @pytest.mark.slow
    def test_workers_on_ray_find_what_a_script_finds(self, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        folder.mkdir()
        (folder / "rv_beside.py").write_text(MODULE)
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        done = subprocess.run(
            [sys.executable, script],
            capture_output=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RAY_ADDRESS": ""},
            check=False,
        )
        assert (done.stdout.decode(), done.returncode) == ("beside beside\n", 0), done.stderr.decode()

    def test_a_warning_of_constructors_is_shown_once(self) -> None:
        data = EnvFactory.build([WarnsWhenMade] * 3).to_bytes()
        code = (
            "import pickle, sys; factory = pickle.loads(sys.stdin.buffer.read()); "
            "[factory.make(i) for i in range(factory.num_envs)]"
        )
        done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
        assert done.stderr.count(b"UserWarning: it was made") == 1

    def test_an_id_with_its_module(self) -> None:
        assert EnvFactory.build("helpers.registers_one:rayvec-tests/ByModule-v0").make(
            0
        ).observation_space == spaces.Discrete(11)

    def test_a_module_that_raises_or_exits_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "rv_exits.py").write_text("import sys; sys.exit(3)")
        (tmp_path / "rv_raises.py").write_text("raise RuntimeError('no licence')")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ConfigError, match=r"'rv_raises', which 'rv_raises:Some-v0' .*RuntimeError: no licence"):
            EnvFactory.build("rv_raises:Some-v0")
        with pytest.raises(ConfigError, match=r"'rv_exits', which .*SystemExit: 3"):
            EnvFactory.build("rv_exits:Some-v0")
        with pytest.raises(ConfigError, match="SystemExit: 3"):
            resolve("network", "rv_exits:net")
        with pytest.raises(ConfigError, match=r"rv_exits' can't be imported \(SystemExit: 3\)"):
            import_plugins(["rv_exits"])

    @pytest.mark.filterwarnings("ignore:.*latest:UserWarning")
    def test_an_id_without_a_version_is_what_gymnasium_makes_of_it(self) -> None:
        expected, got = gymnasium.make("CartPole").spec, EnvFactory.build("CartPole").make(0).spec
        assert expected is not None and got is not None and got.id == expected.id

    @pytest.mark.parametrize(
        "kwargs",
        [
            {"env": "NoSuch-v0"},
            {"env": "no_such_module:CartPole-v1"},
            {"env": "CartPole-v1", "num_envs": 0},
            {"env": "CartPole-v1", "num_envs": False},
            {"env": []},
            {"env": [CountingEnv, 3]},
            {"env": [CountingEnv], "num_envs": 2},
            {"env": [CountingEnv], "env_kwargs": {"x": 1}},
            {"env": [CountingEnv], "native": "yes"},
        ],
        ids=repr,
    )
    def test_mistakes_are_explained(self, kwargs: dict[str, Any]) -> None:
        with pytest.raises(ConfigError) as caught:
            EnvFactory.build(**kwargs)
        assert repr(next(reversed(kwargs.values()))) in str(caught.value)
        if isinstance(kwargs["env"], str) and "num_envs" not in kwargs:
            assert isinstance(caught.value, gymnasium.error.NameNotFound)
