"""How long updates take: rayvec's, and those of other libraries and of scripts, interleaved on the same core.

    python benchmarks/updates.py --venvs VENVS          (what is not installed is left out)
    python benchmarks/updates.py --algorithm sac --width 128
    python benchmarks/updates.py --quick

17 observations, 6 actions, two hidden layers, one thread. A figure is milliseconds of CPU time, which other programs on
the machine change less than the clock's: of a minibatch of PPO, of an update of IMPALA (four minibatches of 320 rows),
and of an update of SAC on 256 rows, sampling included. rayvec's learners do everything that they do in a training. With
GRU in its name, the network is recurrent, with sequences of 16 steps. LeanRL-style is the script in the way of CleanRL,
compiled, with torch's fused Adam. Stable-Baselines3 lives in a virtual environment of its own:
``benchmarks/make_peer_venvs.sh VENVS stable-baselines3``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

D, A, STORED = 17, 6, 10_000
GAMMA, TAU, POLICY_LR, Q_LR = 0.99, 0.005, 3e-4, 1e-3
EPOCHS, MINIBATCHES, SAC_UPDATES = 4, 8, 32
Algorithm = Literal["ppo", "impala", "sac"]

Update = Callable[[], int]
"""Updates, and returns over how many minibatches; for IMPALA 1."""


def rayvec(algorithm: str, rows: int, width: int, *, compile: bool = False, recurrent: str | None = None) -> Update:
    """Our learner, as ``train`` calls it."""
    from learner_task import LearnerTask

    sizes: dict[str, Any] = {
        "ppo": {"num_steps": rows * MINIBATCHES // 16, "minibatch_size": rows},
        "impala": {"num_envs": 64, "num_steps": 20, "minibatch_size": 320},
        "sac": {"num_envs": 1, "num_steps": 16, "minibatch_size": rows},
    }[algorithm]
    task = LearnerTask(algorithm, hidden_sizes=(width, width), obs_size=D, act_size=A, compile=compile, **sizes)
    own = {
        "ppo": {"preset": "none", "recurrent": recurrent, "num_epochs": EPOCHS},
        "impala": {"preset": "none", "recurrent": recurrent},
        "sac": {"learning_starts": STORED, "policy_lr": POLICY_LR, "q_lr": Q_LR},
    }
    learner = task.learner(**own[algorithm])
    batch = task.batch(learner)
    for _ in range(STORED // 16 if algorithm == "sac" else 0):
        learner.update(batch)

    def update() -> int:
        learner.update(batch)
        return {"ppo": EPOCHS * MINIBATCHES, "impala": 1, "sac": 16}[algorithm]

    return update


def ppo_script(algorithm: str, rows: int, width: int, *, lean: bool = False) -> Update:
    """PPO in the way of CleanRL, or of LeanRL, as in ``gpu_learner.py``."""
    from gpu_learner import plain
    from learner_task import LearnerTask

    sizes: dict[str, Any] = {"num_steps": rows * MINIBATCHES // 16, "minibatch_size": rows}
    task = LearnerTask("ppo", hidden_sizes=(width, width), obs_size=D, act_size=A, **sizes)
    learn = plain(task, "float32", lean=lean)

    def update() -> int:
        learn()
        return task.samples // rows

    return update


def transitions() -> dict[str, Any]:
    """Returns a replay of random transitions."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    act = rng.uniform(-1, 1, (STORED, A)).astype(np.float32)
    return {"obs": normal(STORED, D), "next_obs": normal(STORED, D), "act": act, "rew": normal(STORED)}


def sac_script(algorithm: str, rows: int, width: int) -> Update:
    """SAC in the way of CleanRL: modules, autograd, an optimizer for each part."""
    import torch
    from cleanrl_style import SAC
    from gymnasium import spaces

    agent, data = SAC(D, spaces.Box(-1, 1, (A,), np.float32), width), transitions()
    columns = [data["obs"], data["act"], data["rew"][:, None], data["next_obs"], np.zeros((STORED, 1), np.float32)]

    def update() -> int:
        for _ in range(SAC_UPDATES):
            index = np.random.randint(0, STORED, rows)
            agent.update(*(torch.as_tensor(column[index]) for column in columns), actor_updates=1)
        return SAC_UPDATES

    return update


def tianshou_algorithm(
    ins: int,
    space: Any,
    width: int,
    policy_lr: float,
    q_lr: float,
    *,
    alpha_lr: float,
    deterministic_eval: bool = False,
    **settings: Any,
) -> Any:
    """Returns Tianshou's SAC with two hidden layers of one width."""
    from tianshou.algorithm import SAC
    from tianshou.algorithm.modelfree.sac import AutoAlpha, SACPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic

    outs, hidden = space.shape, (width, width)

    def critic() -> Any:
        return ContinuousCritic(
            preprocess_net=Net(state_shape=(ins,), action_shape=outs, hidden_sizes=hidden, concat=True)
        )

    actor = ContinuousActorProbabilistic(
        preprocess_net=Net(state_shape=(ins,), hidden_sizes=hidden),
        action_shape=outs,
        unbounded=True,
        conditioned_sigma=settings.pop("conditioned_sigma", False),
    )
    return SAC(
        policy=SACPolicy(actor=actor, action_space=space, deterministic_eval=deterministic_eval),
        policy_optim=AdamOptimizerFactory(lr=policy_lr),
        critic=critic(),
        critic_optim=AdamOptimizerFactory(lr=q_lr),
        critic2=critic(),
        critic2_optim=AdamOptimizerFactory(lr=q_lr),
        tau=TAU,
        gamma=GAMMA,
        alpha=AutoAlpha(-float(outs[0]), 0.0, AdamOptimizerFactory(lr=alpha_lr)),
        **settings,
    )


def tianshou(algorithm: str, rows: int, width: int) -> Update:
    """Tianshou's SAC."""
    from gymnasium import spaces
    from tianshou.data import Batch, ReplayBuffer

    space = spaces.Box(-1, 1, (A,), np.float32)
    learner = tianshou_algorithm(D, space, width, POLICY_LR, Q_LR, alpha_lr=Q_LR, conditioned_sigma=True)
    data, buffer = transitions(), ReplayBuffer(STORED)
    for i in range(STORED):
        row = {"obs": data["obs"][i], "act": data["act"][i], "rew": data["rew"][i], "obs_next": data["next_obs"][i]}
        buffer.add(Batch(**row, terminated=False, truncated=False, info={}))
    learner.policy.is_within_training_step = True

    def update() -> int:
        for _ in range(SAC_UPDATES):
            learner.update(buffer=buffer, sample_size=rows)
        return SAC_UPDATES

    return update


def stable_baselines3(algorithm: str, rows: int, width: int) -> Update:
    """Stable-Baselines3's SAC."""
    import gymnasium
    from gymnasium import spaces
    from stable_baselines3 import SAC
    from stable_baselines3.common.logger import configure

    class Spaces(gymnasium.Env):  # type: ignore[type-arg]
        observation_space = spaces.Box(-np.inf, np.inf, (D,), np.float32)
        action_space = spaces.Box(-1, 1, (A,), np.float32)

    settings: dict[str, Any] = {"learning_rate": POLICY_LR, "buffer_size": STORED, "batch_size": rows, "device": "cpu"}
    model: Any = SAC("MlpPolicy", Spaces(), policy_kwargs={"net_arch": [width, width]}, **settings)
    model.set_logger(configure(None, []))
    data = transitions()
    for i in range(STORED):
        row = (data[key][i : i + 1] for key in ("obs", "next_obs", "act", "rew"))
        model.replay_buffer.add(*row, np.zeros(1), [{}])

    def update() -> int:
        model.train(gradient_steps=SAC_UPDATES, batch_size=rows)
        return SAC_UPDATES

    return update


OURS: dict[str, Callable[..., Update]] = {"rayvec compiled": partial(rayvec, compile=True), "rayvec": rayvec}
GRU = {f"{name}, GRU": partial(make, recurrent="gru") for name, make in OURS.items()}
PEERS: dict[Algorithm, dict[str, Callable[..., Update]]] = {
    "ppo": {**OURS, "CleanRL-style": ppo_script, "LeanRL-style": partial(ppo_script, lean=True), **GRU},
    "impala": {**OURS, **GRU},
    "sac": {**OURS, "CleanRL-style": sac_script, "Tianshou": tianshou, "Stable-Baselines3": stable_baselines3},
}


def peer(task: dict[str, Any]) -> Iterator[Update]:
    """Makes updates in one way; see :mod:`peer_process`."""
    import torch

    torch.set_num_threads(1)
    yield PEERS[task["algorithm"]][task["name"]](task["algorithm"], task["rows"], task["width"])


def main(
    algorithm: tuple[Algorithm, ...] = ("ppo", "impala", "sac"),
    rows: int = 256,
    width: int | None = None,
    venvs: Path = Path("venvs"),
    repeats: int = 15,
    quick: bool = False,
) -> None:
    """Prints a table for each algorithm.

    Args:
        algorithm: Which.
        rows: Of a minibatch of PPO and SAC.
        width: Units of each hidden layer; unset: 64, for SAC 256.
        venvs: Directory of the virtual environments.
        repeats: Windows of each peer.
        quick: Two windows of PPO and IMPALA, without what compiles or is recurrent: less than a minute.
    """
    from measure import heading, measure_peers, show_ms

    print(heading())
    for each in ("ppo", "impala") if quick else algorithm:
        left_out = ("compiled", "Lean", "GRU") if quick else ()
        names = [name for name in PEERS[each] if not any(word in name for word in left_out)]
        units = width or (256 if each == "sac" else 64)
        tasks = {name: {"algorithm": each, "name": name, "rows": rows, "width": units} for name in names}
        places = {"Stable-Baselines3": venvs / "stable-baselines3"}
        found = measure_peers("updates:peer", tasks, places, {"OMP_NUM_THREADS": "1"}, 0.0, 2 if quick else repeats)
        show_ms(f"{each.upper()}, {units}x{units}, minibatches of {rows}", names, found)


if __name__ == "__main__":
    import tyro

    tyro.cli(main, description=__doc__)
