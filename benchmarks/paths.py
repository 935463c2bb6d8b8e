"""How much code a reader passes on four paths: an action, a chunk, weights, and one update of PPO.

    python benchmarks/paths.py
    PYTHONPATH=OTHER_CHECKOUT python benchmarks/paths.py --names

An action goes from ``env.step`` to an environment on another, simulated, node and back; a chunk from ``env.rollout`` to
that node's workers and back; weights from a policy that has changed to those workers. Modules and functions of rayvec
that are entered in any process are counted, by a profile function in each. Envelopes are the dataclasses and named
tuples of rayvec that these functions hold. Weights are what a chunk with changed weights enters beyond one without. An
update of PPO is uncompiled, in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

FOLDER = "RAYVEC_PATHS"
"""Environment variable with the folder where processes write what they enter."""


class Entered(NamedTuple):
    """What was entered on a path, each as ``module:name``."""

    functions: frozenset[str]
    envelopes: frozenset[str]

    @property
    def modules(self) -> frozenset[str]:
        """The modules of the functions."""
        return frozenset(name.partition(":")[0] for name in self.functions)


def trace() -> None:
    """Lets this process write which functions of rayvec it enters while the flag is set, its children included."""
    with open(Path(os.environ[FOLDER]) / "flag", "r+b") as file:
        flag = mmap.mmap(file.fileno(), 1)
    seen: set[tuple[bytes, CodeType]] = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        path = flag[:1]
        if path == b"0" or event != "return":
            return
        module = frame.f_globals.get("__name__", "")
        if module.startswith("rayvec.") and (path, frame.f_code) not in seen:
            seen.add((path, frame.f_code))
            held = {name_of(type(value)) for value in frame.f_locals.values() if is_envelope(type(value))}
            lines = [f"f {module}:{frame.f_code.co_qualname}", *(f"e {name}" for name in held)]
            with open(Path(os.environ[FOLDER]) / f"path-{path.decode()}-{os.getpid()}", "a") as file:
                file.write("\n".join(lines) + "\n")

    threading.setprofile(profile)
    sys.setprofile(profile)


def name_of(kind: type) -> str:
    """Returns ``module:name`` of a class."""
    return f"{kind.__module__}:{kind.__qualname__}"


def is_envelope(kind: type) -> bool:
    """Whether a class of rayvec only carries values."""
    return kind.__module__.startswith("rayvec.") and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"))


class Paths:
    """Records paths by number.

    Args:
        folder: Where processes write.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "flag").write_bytes(b"0")
        os.environ[FOLDER] = str(folder)
        self._number = 0

    @contextlib.contextmanager
    def recording(self) -> Iterator[int]:
        """Records what is entered within the block; yields the number of the path."""
        self._number += 1
        with open(self._folder / "flag", "r+b") as file, mmap.mmap(file.fileno(), 1) as flag:
            flag[:1] = str(self._number).encode()
            try:
                yield self._number
            finally:
                flag[:1] = b"0"

    def entered(self, number: int) -> Entered:
        """Returns what was entered on a path."""
        lines = [line for file in self._folder.glob(f"path-{number}-*") for line in file.read_text().splitlines()]
        return Entered(*(frozenset(line[2:] for line in lines if line[0] == kind) for kind in "fe"))


def stepping(paths: Paths) -> dict[str, Entered]:
    """Returns the paths of an action, a chunk and weights, on a node that the driver reaches by TCP."""
    from measure import simulated_cluster

    with simulated_cluster(0, 2) as cluster:
        import ray

        ray.shutdown()
        ray.init(cluster.address, log_to_driver=False, runtime_env={"worker_process_setup_hook": "paths.trace"})
        import rayvec

        with rayvec.RayVecEnv("CartPole-v1", 2, num_nodes=1, workers_per_node=2, preload=("paths_traced",)) as env:
            assert env.transports == ("tcp",)
            learner = ppo_learner(env)
            policy = rayvec.Policy(learner.module)
            env.reset(seed=0)
            env.step(env.action_space.sample())
            with paths.recording() as action:
                env.step(env.action_space.sample())
            for _ in range(2):
                env.rollout(policy, 4)
            with paths.recording() as chunk:
                env.rollout(policy, 4)
            policy.load_weights(learner.weights() + 1)
            with paths.recording() as weights:
                env.rollout(policy, 4)
    same, changed = paths.entered(chunk), paths.entered(weights)
    beyond = Entered(changed.functions - same.functions, changed.envelopes - same.envelopes)
    return {"an action": paths.entered(action), "a chunk": same, "weights": beyond}


def ppo_learner(env: Any) -> Any:
    """Returns an uncompiled learner for some environments."""
    import rayvec
    from rayvec.learners.ppo import PPOLearner

    config = rayvec.PPOConfig(env_id="CartPole-v1", num_envs=4, num_steps=16, minibatch_size=32, compile=False)
    return PPOLearner(env.single_observation_space, env.single_action_space, config)


def updating(paths: Paths) -> Entered:
    """Returns the path of an uncompiled update of PPO."""
    import rayvec

    with rayvec.RayVecEnv("CartPole-v1", 4, num_nodes=0, workers_per_node=0) as env:
        learner = ppo_learner(env)
        batch = rayvec.Collector(env, rayvec.Policy(learner.module)).collect(n_step=64)
        learner.update(batch)
        with paths.recording() as update:
            learner.update(batch)
    return paths.entered(update)


def main() -> None:
    """Records the paths and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="print the modules and envelopes too")
    args = parser.parse_args()
    from measure import heading, share_modules

    from rayvec.bench.terminal import show_table

    share_modules()
    with tempfile.TemporaryDirectory() as folder:
        paths = Paths(Path(folder))
        trace()
        found = {"an update of PPO": updating(paths), **stepping(paths)}
    sys.setprofile(None)
    print(heading())
    rows = [[name, *(str(len(part)) for part in (each.modules, *each))] for name, each in found.items()]
    show_table("What a reader passes", ["path", "modules", "functions", "envelopes"], rows)
    for name, each in found.items() if args.names else ():
        print(
            f"\n{name}\n  modules: {', '.join(sorted(each.modules))}\n  envelopes: {', '.join(sorted(each.envelopes))}"
        )


if __name__ == "__main__":
    main()
