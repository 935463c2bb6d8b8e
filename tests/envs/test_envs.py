"""How environments are made: from what, how many, with which seeds."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import SyncVectorEnv
from helpers.exact import SpaceEnv

from rayvec.envs.factory import EnvFactory, env_seeds
from rayvec.errors import ConfigError

CARTPOLE = "gymnasium.envs.classic_control:CartPoleEnv"
MODULE = """
from helpers.testing import CountingEnv

class Beside(CountingEnv):
    name = "beside"
"""


@pytest.fixture
def registry() -> Iterator[dict[str, EnvSpec]]:
    """The registry of environments, which the test may change."""
    before = dict(gymnasium.registry)
    yield gymnasium.registry
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


def elsewhere(factory: bytes, code: str) -> list[str]:
    """Returns what code prints in another process, in which `factory` has been unpickled."""
    code = f"import pickle, sys, gymnasium; factory = pickle.loads(sys.stdin.buffer.read()); {code}"
    done = subprocess.run([sys.executable, "-c", code], input=factory, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


def test_seeds_are_those_of_gymnasium() -> None:
    sync = SyncVectorEnv([partial(SpaceEnv, spaces.Discrete(2))] * 3)
    sync.reset(seed=40)
    assert list(sync.np_random_seed) == env_seeds(40, 3) == env_seeds(np.int64(40), 3)  # type: ignore[arg-type]
    sync.close()
    assert env_seeds(None, 2) == [None, None] and env_seeds([3, None, np.int64(5)], 3) == [3, None, 5]
    for seeds, kind in (([1, 2, 3], ValueError), ([1, 2.5], gymnasium.error.Error)):
        with pytest.raises(kind, match="each of the 2 environments"):
            env_seeds(seeds, 2)  # type: ignore[arg-type]


def test_registrations_reach_a_process_that_has_none_or_others(registry: dict[str, EnvSpec]) -> None:
    gymnasium.register("rayvec-tests/Carried-v3", entry_point=lambda size: SpaceEnv(spaces.Discrete(size)))
    gymnasium.register("rayvec-tests/Array-v0", CARTPOLE, kwargs={"table": np.zeros(3)})  # equals nothing
    registry["CartPole-v1"] = EnvSpec("CartPole-v1", CARTPOLE, max_episode_steps=3)
    factory = EnvFactory.build("rayvec-tests/Carried-v3", 1, {"size": 4}).to_bytes()
    code = (
        "print(factory.make(0).observation_space)"
        "; print(gymnasium.make('rayvec-tests/Carried-v3', size=5).action_space)"
        "; print(gymnasium.make('CartPole-v1').spec.max_episode_steps)"
    )
    assert elsewhere(factory, code) == ["Discrete(4)", "Discrete(2)", "3"]


def test_modules_are_found_where_the_driver_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their folder in ``sys.path``, also a relative one. The arguments of the program reach the other process."""
    (tmp_path / "rv_beside.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.syspath_prepend(tmp_path.name)
    factory = EnvFactory.build([importlib.import_module("rv_beside").Beside]).to_bytes()
    monkeypatch.chdir("/")
    found = elsewhere(factory, "print(factory.make(0).name, sys.path[0]); print(sys.argv)")
    assert found == [f"beside {tmp_path}", str(sys.argv)]


@pytest.mark.parametrize(
    ("content", "words"),
    [("import sys; sys.exit(3)", "SystemExit: 3"), ("raise RuntimeError('no licence')", "RuntimeError: no licence")],
)
def test_a_module_that_raises_or_exits_is_named(
    content: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rv_raises.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "rv_raises", raising=False)
    with pytest.raises(ConfigError, match=f"'rv_raises', which 'rv_raises:Some-v0' .*{words}"):
        EnvFactory.build("rv_raises:Some-v0")
