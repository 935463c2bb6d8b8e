"""How long a minibatch of PPO and an update of IMPALA take: rayvec's, and those of other ways of writing them.

    python benchmarks/learner_updates.py --venvs VENVS          (what is not installed is left out)

17 observations, 6 actions, two hidden layers of 64 tanh units for the actor and for the critic, one thread. Every peer
is a process of its own on one core, and all take turns. Figures are milliseconds of CPU time, which other programs on
the machine change less than the clock's:

- rayvec: ``PPOLearner.update`` and ``IMPALALearner.update``, with everything they do, over the number of minibatches;
- arithmetic alone: matrix products and tanh of one minibatch, forward and backward, into memory that exists already;
- CleanRL-style: modules, autograd, torch's Adam for each tensor, advantages normalised in each minibatch;
- LeanRL-style: the same compiled, with torch's fused Adam;
- PureJaxRL-style: one jitted scan over the minibatches of an epoch, Adam included.

With GRU or LSTM in its name, the learner's network is recurrent: 64 units, sequences of 16 steps.

JAX lives in a virtual environment of its own: ``benchmarks/make_peer_venvs.sh VENVS jax``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

D, A, WIDTH = 17, 6, 64
MINIBATCHES, EPOCHS = 8, 4
CLIP, VALUE_COEF, ENTROPY_COEF, MAX_NORM, LR, EPS = 0.2, 0.5, 0.01, 0.5, 2.5e-4, 1e-5
ENVS, STEPS = 64, 20

Update = Callable[[], int]
"""Updates, and returns over how many minibatches, or for IMPALA 1."""


def learner_task(algorithm: str, rows: int, *, compile: bool) -> Any:
    """Returns what is updated: IMPALA's batch has one size, PPO's grows with its minibatches."""
    from rayvec.bench.harness.learners import LearnerTask

    sizes: Any = {"num_envs": 16, "num_steps": rows * MINIBATCHES // 16, "minibatch_size": rows}
    if algorithm == "impala":
        sizes = {"num_envs": ENVS, "num_steps": STEPS, "minibatch_size": ENVS * STEPS // 4}
    return LearnerTask(algorithm, hidden_sizes=(WIDTH, WIDTH), obs_size=D, act_size=A, compile=compile, **sizes)


def rayvec(algorithm: str, rows: int, *, compile: bool, recurrent: str | None = None) -> Update:
    """Our learner, as ``train`` calls it."""
    task = learner_task(algorithm, rows, compile=compile)
    own: dict[str, Any] = {"num_epochs": EPOCHS} if algorithm == "ppo" else {}
    learner = task.learner(preset="none", recurrent=recurrent, **own)()
    batch = task.batch(learner)

    def update() -> int:
        learner.update(batch)
        return EPOCHS * MINIBATCHES if algorithm == "ppo" else 1

    return update


def arithmetic(rows: int) -> Update:
    """Products and tanh of two MLPs, forward and backward, without autograd."""
    import torch

    sizes = [(D, WIDTH, WIDTH, A), (D, WIDTH, WIDTH, 1)]
    nets = [[torch.randn(ins, outs) for ins, outs in itertools.pairwise(each)] for each in sizes]
    inputs = [[torch.randn(rows, ins) for ins in each] for each in sizes]
    gradients = [[torch.empty_like(weight) for weight in net] for net in nets]

    def update() -> int:
        for net, values, found in zip(nets, inputs, gradients, strict=True):
            for k, weight in enumerate(net):
                torch.mm(values[k], weight, out=values[k + 1])
                if k < 2:
                    values[k + 1].tanh_()
            flowing = values[3]
            for k in (2, 1, 0):
                torch.mm(values[k].T, flowing, out=found[k])
                flowing = flowing @ net[k].T if k else flowing
            values[3] = torch.zeros_like(values[3])
        return 1

    return update


def script(rows: int, *, lean: bool) -> Update:
    """A minibatch in the way of CleanRL, or of LeanRL, as in ``gpu_learner.py``."""
    from gpu_learner import plain

    task = learner_task("ppo", rows, compile=False)
    learn = plain(task, "float32", lean=lean)

    def update() -> int:
        learn()
        return int(task.samples // rows)

    return update


def jax(rows: int) -> Update:
    """The minibatches of all epochs as jitted scans."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)

    def layers(outs: int) -> list[tuple[Any, Any]]:
        sizes = (D, WIDTH, WIDTH, outs)
        draw = lambda ins, outs: jnp.asarray(rng.normal(0, ins**-0.5, (ins, outs)).astype(np.float32))  # noqa: E731
        return [(draw(ins, outs), jnp.zeros(outs)) for ins, outs in itertools.pairwise(sizes)]

    def mlp(net: Any, x: Any) -> Any:
        for weight, bias in net[:-1]:
            x = jnp.tanh(x @ weight + bias)
        return x @ net[-1][0] + net[-1][1]

    def loss(params: Any, batch: Any) -> Any:
        obs, act, logp, value, advantage, target = batch
        log_std = params["log_std"]
        deviation = (act - mlp(params["actor"], obs)) * jnp.exp(-log_std)
        ratio = jnp.exp((-0.5 * deviation**2 - log_std - 0.919).sum(1) - logp)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy_loss = -jnp.minimum(advantage * ratio, advantage * ratio.clip(1 - CLIP, 1 + CLIP)).mean()
        new_value = mlp(params["critic"], obs)[:, 0]
        near = value + (new_value - value).clip(-CLIP, CLIP)
        value_loss = 0.5 * jnp.maximum((new_value - target) ** 2, (near - target) ** 2).mean()
        return policy_loss + VALUE_COEF * value_loss - ENTROPY_COEF * (1.419 + log_std).sum()

    tree = jax.tree_util.tree_map

    def step(state: Any, batch: Any) -> Any:
        params, mean, square, count = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        norm = jnp.sqrt(sum((leaf**2).sum() for leaf in jax.tree_util.tree_leaves(grads)))
        scale, count = jnp.minimum(1.0, MAX_NORM / (norm + 1e-6)), count + 1
        mean = tree(lambda m, g: 0.9 * m + 0.1 * scale * g, mean, grads)
        square = tree(lambda v, g: 0.999 * v + 0.001 * (scale * g) ** 2, square, grads)
        one, two = LR / (1 - 0.9**count), 1 / (1 - 0.999**count)
        params = tree(lambda p, m, v: p - one * m / (jnp.sqrt(v * two) + EPS), params, mean, square)
        return (params, mean, square, count), value

    def epoch(carry: Any, _: Any) -> Any:
        state, key, data = carry
        key, own = jax.random.split(key)
        order = jax.random.permutation(own, rows * MINIBATCHES)
        batches = tree(lambda leaf: leaf[order].reshape(MINIBATCHES, rows, *leaf.shape[1:]), data)
        state, values = jax.lax.scan(step, state, batches)
        return (state, key, data), values

    run = jax.jit(lambda carry: jax.lax.scan(epoch, carry, None, EPOCHS))
    total = rows * MINIBATCHES
    shapes = (total, D), (total, A), *[(total,)] * 4
    data = tuple(jnp.asarray(rng.normal(size=shape).astype(np.float32)) for shape in shapes)
    params = {"actor": layers(A), "critic": layers(1), "log_std": jnp.zeros(A)}
    state = params, tree(jnp.zeros_like, params), tree(jnp.zeros_like, params), jnp.zeros(())
    carry = state, jax.random.PRNGKey(0), data

    def update() -> int:
        nonlocal carry
        carry, values = run(carry)
        jax.block_until_ready(values)
        return EPOCHS * MINIBATCHES

    return update


PEERS: dict[str, Callable[[int], Update]] = {
    "rayvec compiled": lambda rows: rayvec("ppo", rows, compile=True),
    "rayvec": lambda rows: rayvec("ppo", rows, compile=False),
    "arithmetic alone": arithmetic,
    "CleanRL-style": lambda rows: script(rows, lean=False),
    "LeanRL-style": lambda rows: script(rows, lean=True),
    "PureJaxRL-style": jax,
    "rayvec IMPALA compiled": lambda rows: rayvec("impala", rows, compile=True),
    "rayvec IMPALA": lambda rows: rayvec("impala", rows, compile=False),
    "rayvec GRU compiled": lambda rows: rayvec("ppo", rows, compile=True, recurrent="gru"),
    "rayvec GRU": lambda rows: rayvec("ppo", rows, compile=False, recurrent="gru"),
    "rayvec IMPALA LSTM compiled": lambda rows: rayvec("impala", rows, compile=True, recurrent="lstm"),
    "rayvec IMPALA LSTM": lambda rows: rayvec("impala", rows, compile=False, recurrent="lstm"),
}


class Peer:
    """An adapter of the harness that makes updates in one way.

    Args:
        task: ``name`` of the peer, ``rows`` of a minibatch, and how many updates it makes at a ``time``.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        if "Jax" in task["name"]:
            os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])  # XLA ignores a number of threads
        else:
            import torch

            torch.set_num_threads(1)
        self._update, self._count = PEERS[task["name"]](task["rows"]), task["time"]

    def advance(self) -> int:
        """Updates; returns over how many minibatches."""
        return sum(self._update() for _ in range(self._count))

    def close(self) -> None:
        """Ends it."""


def cpu_ms(process: Any) -> float:
    """Returns the milliseconds of CPU time of a minibatch, or of an update of IMPALA."""
    found = process.do("update", seconds=0.0)
    return 1e3 * float(found["cpu_s"]) / int(found["samples"])


def baseline(name: str) -> str:
    """Returns what a peer is compared with."""
    return f"{name.removesuffix(' compiled')} compiled" if name.startswith("rayvec") else "rayvec compiled"


def main(
    venvs: Path = Path("venvs"),
    rows: tuple[int, ...] = (256, 1024),
    repeats: int = 15,
    only: tuple[str, ...] = tuple(PEERS),
) -> None:
    """Prints a table for each size of minibatches.

    Args:
        venvs: Directory of the virtual environments.
        rows: Of a minibatch of PPO.
        repeats: Turns of each peer.
        only: Which peers.
    """
    from measure import check_only, heading, show_updates

    check_only(only, PEERS)
    print(heading())
    print(f"load: {', '.join(f'{each:.1f}' for each in os.getloadavg())}")
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    for size in rows:
        names = [name for name in only if "IMPALA" not in name or size == rows[0]]
        show_updates(
            "learner_updates:Peer",
            {name: {"name": name, "rows": size, "time": 32 if name.startswith("arithmetic") else 1} for name in names},
            {"PureJaxRL-style": venvs / "jax"},
            {"OMP_NUM_THREADS": "1", "XLA_FLAGS": flags},
            cpu_ms,
            repeats,
            f"minibatches of {size}",
            ["", "ms of CPU time", "over rayvec compiled"],
            baseline,
        )


if __name__ == "__main__":
    import tyro

    tyro.cli(main, description=__doc__)
