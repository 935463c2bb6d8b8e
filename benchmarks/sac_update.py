"""How long one SAC update takes: rayvec's, and those of other libraries, interleaved on the same core.

    python benchmarks/sac_update.py --venvs VENVS          (what is not installed is left out)

Every peer updates two critics, the actor and the temperature on minibatches of 256 rows, sampling included: 17
observations, 6 actions, two hidden layers. Each is an adapter of the harness in a process of its own, and imports only
its own library. Libraries that rayvec does not depend on live in virtual environments of their own:

    benchmarks/make_peer_venvs.sh VENVS stable-baselines3 jax
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

D, A, B, STORED = 17, 6, 256, 10_000
GAMMA, TAU, POLICY_LR, Q_LR = 0.99, 0.005, 3e-4, 1e-3

Updates = Callable[[int], Any]


def transitions() -> dict[str, Any]:
    """Returns a replay of random transitions."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    act = rng.uniform(-1, 1, (STORED, A)).astype(np.float32)
    return {"obs": normal(STORED, D), "next_obs": normal(STORED, D), "act": act, "rew": normal(STORED)}


def rayvec(width: int, *, compile: bool) -> Updates:
    """Our learner, as ``train`` calls it with its default settings: 16 updates after each 16 steps."""
    from rayvec.bench.harness.learners import LearnerTask

    task = LearnerTask(
        "sac", num_envs=1, num_steps=16, minibatch_size=B, hidden_sizes=(width, width), obs_size=D, act_size=A,
        compile=compile,
    )  # fmt: skip
    learner = task.learner(learning_starts=STORED, policy_lr=POLICY_LR, q_lr=Q_LR)()
    batch = task.batch(learner)
    for _ in range(STORED // 16):
        learner.update(batch)
    return lambda count: [learner.update(batch) for _ in range(count // 16)]


def cleanrl_style(width: int) -> Updates:
    """A single-file implementation in the way of CleanRL: modules, autograd, an optimizer for each part."""
    import torch
    from cleanrl_style import SAC
    from gymnasium import spaces

    agent, data = SAC(D, spaces.Box(-1, 1, (A,), np.float32), width), transitions()
    columns = [data["obs"], data["act"], data["rew"][:, None], data["next_obs"], np.zeros((STORED, 1), np.float32)]

    def update() -> None:
        index = np.random.randint(0, STORED, B)
        agent.update(*(torch.as_tensor(column[index]) for column in columns), actor_updates=1)

    return lambda count: [update() for _ in range(count)]


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


def tianshou(width: int) -> Updates:
    """Tianshou's ``update``."""
    from gymnasium import spaces
    from tianshou.data import Batch, ReplayBuffer

    space = spaces.Box(-1, 1, (A,), np.float32)
    algorithm = tianshou_algorithm(D, space, width, POLICY_LR, Q_LR, alpha_lr=Q_LR, conditioned_sigma=True)
    data, buffer = transitions(), ReplayBuffer(STORED)
    for i in range(STORED):
        buffer.add(
            Batch(
                obs=data["obs"][i], act=data["act"][i], rew=data["rew"][i], terminated=False, truncated=False,
                obs_next=data["next_obs"][i], info={},
            )
        )  # fmt: skip
    algorithm.policy.is_within_training_step = True
    return lambda count: [algorithm.update(buffer=buffer, sample_size=B) for _ in range(count)]


def stable_baselines3(width: int) -> Updates:
    """Stable-Baselines3's ``train``."""
    import gymnasium
    from gymnasium import spaces
    from stable_baselines3 import SAC
    from stable_baselines3.common.logger import configure

    class Spaces(gymnasium.Env):  # type: ignore[type-arg]
        observation_space = spaces.Box(-np.inf, np.inf, (D,), np.float32)
        action_space = spaces.Box(-1, 1, (A,), np.float32)

    model: Any = SAC(
        "MlpPolicy", Spaces(), learning_rate=POLICY_LR, buffer_size=STORED, batch_size=B, device="cpu",
        policy_kwargs={"net_arch": [width, width]},
    )  # fmt: skip
    model.set_logger(configure(None, []))
    data = transitions()
    for i in range(STORED):
        row = (data[key][i : i + 1] for key in ("obs", "next_obs", "act", "rew"))
        model.replay_buffer.add(*row, np.zeros(1), [{}])

    return lambda count: [model.train(gradient_steps=1, batch_size=B) for _ in range(count)]


def jax(width: int, *, scan: int = 0) -> Updates:
    """The update as one jitted function of donated state; with `scan`, that many in one call."""
    import jax
    import jax.numpy as jnp

    def layers(key: Any, ins: int, outs: int) -> Any:
        sizes = [(ins, width), (width, width), (width, outs)]
        keys = jax.random.split(key, 3)
        draw = lambda k, s: jax.random.uniform(k, s, minval=-1, maxval=1) / np.sqrt(s[0])  # noqa: E731
        return [(draw(k, s), jnp.zeros(s[1])) for k, s in zip(keys, sizes, strict=True)]

    def mlp(net: Any, x: Any) -> Any:
        for weight, bias in net[:-1]:
            x = jax.nn.relu(x @ weight + bias)
        return x @ net[-1][0] + net[-1][1]

    def q(nets: Any, obs: Any, act: Any) -> Any:
        return jax.vmap(mlp, (0, None))(nets, jnp.concatenate([obs, act], 1))[..., 0]

    def draw(net: Any, obs: Any, noise: Any) -> tuple[Any, Any]:
        mean, raw = jnp.split(mlp(net, obs), 2, 1)
        log_std = -5 + 3.5 * (jnp.tanh(raw) + 1)
        x = mean + jnp.exp(log_std) * noise
        logp = -0.5 * noise**2 - log_std - 0.919 - 2 * (jnp.log(2) - x - jax.nn.softplus(-2 * x))
        return jnp.tanh(x), logp.sum(1)

    def adam(state: Any, grads: Any, rate: float, step: Any) -> Any:
        param, mean, square = state
        tree = jax.tree_util.tree_map
        mean = tree(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
        square = tree(lambda v, g: 0.999 * v + 0.001 * g * g, square, grads)
        one, two = rate / (1 - 0.9**step), 1 / jnp.sqrt(1 - 0.999**step)
        param = tree(lambda p, m, v: p - one * m / (jnp.sqrt(v) * two + 1e-8), param, mean, square)
        return param, mean, square

    def update(state: Any, batch: Any) -> Any:
        critic, target, actor, log_alpha, key, step = state
        obs, act, rew, next_obs = batch
        step, alpha = step + 1, jnp.exp(log_alpha[0])
        key, one, two = jax.random.split(key, 3)
        next_act, next_logp = draw(actor[0], next_obs, jax.random.normal(one, (B, A)))
        y = rew + GAMMA * (q(target, next_obs, next_act).min(0) - alpha * next_logp)
        grads = jax.grad(lambda nets: 0.5 * ((q(nets, obs, act) - y) ** 2).mean(1).sum())(critic[0])
        critic = adam(critic, grads, Q_LR, step)

        def actor_loss(net: Any) -> Any:
            pi, logp = draw(net, obs, jax.random.normal(two, (B, A)))
            return (alpha * logp - q(critic[0], obs, pi).min(0)).mean(), logp

        grads, logp = jax.grad(actor_loss, has_aux=True)(actor[0])
        actor = adam(actor, grads, POLICY_LR, step)
        log_alpha = adam(log_alpha, -alpha * (logp.mean() - A), Q_LR, step)
        target = jax.tree_util.tree_map(lambda slow, fast: slow + TAU * (fast - slow), target, critic[0])
        return (critic, target, actor, log_alpha, key, step), None

    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    pair = jax.vmap(lambda key: layers(key, D + A, 1))(keys[:2])
    zeros = lambda tree: jax.tree_util.tree_map(jnp.zeros_like, tree)  # noqa: E731
    fresh = lambda tree: (tree, zeros(tree), zeros(tree))  # noqa: E731
    copied = jax.tree_util.tree_map(jnp.copy, pair)
    alpha_and_key = fresh(jnp.zeros(())), jax.random.PRNGKey(1), jnp.zeros(())
    state: Any = (fresh(pair), copied, fresh(layers(keys[2], D, 2 * A)), *alpha_and_key)
    data = transitions()
    names = ("obs", "act", "rew", "next_obs")
    one = jax.jit(lambda state, batch: update(state, batch)[0], donate_argnums=0)
    many = jax.jit(lambda state, batches: jax.lax.scan(update, state, batches)[0], donate_argnums=0)

    def updates(count: int) -> None:
        nonlocal state
        for _ in range(count // scan if scan else count):
            index = np.random.randint(0, STORED, (scan, B) if scan else B)
            state = (many if scan else one)(state, tuple(data[name][index] for name in names))
        jax.block_until_ready(state)

    return updates


PEERS: dict[str, Callable[[int], Updates]] = {
    "rayvec": lambda width: rayvec(width, compile=False),
    "rayvec compiled": lambda width: rayvec(width, compile=True),
    "CleanRL-style": cleanrl_style,
    "Tianshou": tianshou,
    "Stable-Baselines3": stable_baselines3,
    "JAX jit": jax,
    "JAX jit, scanned over 32": lambda width: jax(width, scan=32),
}


class Peer:
    """An adapter of the harness that makes updates of one library.

    Args:
        task: ``name`` of the peer, ``width`` of the two hidden layers, number of ``threads`` and cores, and how many
            ``updates`` it makes at a time.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: task["threads"]])  # XLA ignores a number of threads
        if not task["name"].startswith("JAX"):
            import torch

            torch.set_num_threads(task["threads"])
        self._updates, self._count = PEERS[task["name"]](task["width"]), task["updates"]

    def advance(self) -> int:
        """Updates; returns how often."""
        self._updates(self._count)
        return int(self._count)

    def close(self) -> None:
        """Ends it."""


VENVS = {"Stable-Baselines3": "stable-baselines3", "JAX jit": "jax", "JAX jit, scanned over 32": "jax"}


def main(
    venvs: Path = Path("venvs"),
    widths: tuple[int, ...] = (256, 128),
    threads: tuple[int, ...] = (1, 2),
    repeats: int = 15,
    updates: int = 96,
    only: tuple[str, ...] = tuple(PEERS),
) -> None:
    """Prints a table for each width and number of threads.

    Args:
        venvs: Directory of the virtual environments.
        widths: Units of the hidden layers.
        threads: To compute with.
        repeats: Turns of each peer.
        updates: In each of the three runs of a turn; a multiple of 32.
        only: Which peers.
    """
    from measure import check_only, heading, show_updates

    check_only(only, PEERS)
    print(heading())
    for count, width in product(threads, widths):
        eigen = f"--xla_cpu_multi_thread_eigen={str(count > 1).lower()} intra_op_parallelism_threads={count}"
        show_updates(
            "sac_update:Peer",
            {name: {"name": name, "width": width, "threads": count, "updates": updates} for name in only},
            {name: venvs / directory for name, directory in VENVS.items()},
            {"OMP_NUM_THREADS": str(count), "XLA_FLAGS": eigen},
            update_ms,
            repeats,
            f"{width}x{width}, {count} thread{'s' * (count > 1)}",
            ["", "ms", "time / rayvec compiled"],
            lambda name: "rayvec compiled",
        )


def update_ms(process: Any) -> float:
    """Returns the milliseconds of an update."""
    found = process.do("update", seconds=0.0)
    return 1e3 * float(sum(found["times_s"])) / int(found["samples"])


if __name__ == "__main__":
    import tyro

    tyro.cli(main, description=__doc__)
