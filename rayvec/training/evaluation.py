"""Greedy evaluation: the returns of a policy on episodes that training never uses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.collect.collector import Collector
from rayvec.config import TrainConfig
from rayvec.data import EpisodeStats
from rayvec.data.batch import metric_means
from rayvec.errors import require
from rayvec.policies.policy import Policy
from rayvec.training.agent import load
from rayvec.training.atomic_files import local_path
from rayvec.training.checkpoint import check_kept_spaces
from rayvec.training.environments import eval_settings, make_one_env, open_env, served
from rayvec.training.run_dir import load_checkpoint, load_config
from rayvec.training.runs import network_of, with_own_parts
from rayvec.vector.ray_vec_env import RayVecEnv

_EVAL_STEPS, _EVAL_EPISODE_STEPS = 50_000, 10_000


def eval_metrics(evaluation: EpisodeStats) -> dict[str, float]:
    """Returns what a line of metrics says of an evaluation."""
    cut = {"eval/episodes_cut": evaluation.num_cut} if evaluation.num_cut else {}
    own = {f"eval/{name}": mean for name, mean in metric_means(evaluation.metrics).items()}
    return {**own, "eval/return_mean": evaluation.return_mean, "eval/return_std": evaluation.return_std, **cut}


def greedy_policy(module: Any, weights: NDArray[np.float32], *, deterministic: bool = True) -> Policy:
    """Returns a policy that takes the most probable action, or draws one.

    Args:
        module: The network, as :class:`rayvec.Policy` takes it.
        weights: Weights to act with in place of the module's own.
        deterministic: False draws actions, as in training.
    """
    policy = Policy(module, deterministic=deterministic)
    policy.load_weights(weights)
    return policy


def eval_limits(config: TrainConfig, env: Any) -> tuple[int, int]:
    """Returns how many episodes an evaluation plays, and the number of steps after which it cuts one.

    An evaluation takes at most max(50,000, total_steps / 10) steps: if eval_episodes x time limit is more, it plays
    fewer episodes, at least one.
    """
    registered = None if env.spec is None else env.spec.max_episode_steps
    limit: Any = config.env_kwargs.get("max_episode_steps") or registered or 0  # to Gymnasium -1 is none
    most_steps = max(_EVAL_STEPS, config.total_steps // 10)
    most_episodes = max(1, most_steps // limit) if limit > 0 else config.eval_episodes
    max_len = config.eval_max_episode_steps or max(_EVAL_EPISODE_STEPS, limit)
    return min(config.eval_episodes, most_episodes), max_len


def evaluate(
    config: TrainConfig,
    env: RayVecEnv,
    module: Any,
    weights: NDArray[np.float32],
    num_episodes: int | None = None,
    *,
    seed: int,
    first_id: int = 0,
) -> EpisodeStats:
    """Plays episodes in `env`, greedily unless the settings say otherwise.

    Each environment gets its quota of episodes beforehand, so that short episodes do not crowd out long ones. All
    environments are reset first. An episode that does not end is cut: see `eval_limits`. A Ctrl-C closes the
    environments, and ends their workers at once.

    Args:
        config: Settings of the run, as of `eval_settings`: where the policy acts, and how long an episode may be.
        env: The environments.
        module: The network, as :class:`rayvec.Policy` takes it.
        weights: Its acting weights, ``float32 [P]``.
        num_episodes: F, the number of episodes; 0 plays none. By default as the settings say.
        seed: Environment i begins with `seed` + i; :meth:`rayvec.config.TrainConfig.eval_seed` gives a seed that
            training never uses.
        first_id: Global index of the first environment, where a rank plays its share.
    """
    usual, max_len = eval_limits(config, env)
    num_episodes = usual if num_episodes is None else num_episodes
    if num_episodes == 0:
        nothing = {name: np.zeros(0) for name in config.episode_metrics}
        return EpisodeStats(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64), nothing)
    policy = greedy_policy(module, weights, deterministic=config.eval_deterministic)
    rest: Any = {"on_bad_obs": config.on_bad_obs, "episode_metrics": config.episode_metrics}
    collector = Collector(env, policy, config.inference, seed=seed, **rest)
    try:
        collector.reset(seed=seed + first_id)
        return collector.play(num_episodes, max_len=max_len)
    except KeyboardInterrupt:
        env.close(terminate=True)  # else the collector would wait for its pending chunks
        raise
    finally:
        collector.close()


def evaluate_run(
    run_dir: Path | str,
    *,
    num_episodes: int = 100,
    seed: int | None = None,
    checkpoint: str = "checkpoint.pt",
    env: Any = None,
    eval_env: Any = None,
    network: Callable[..., Any] | None = None,
    **changes: Any,
) -> EpisodeStats:
    """Evaluates a checkpoint of a run.

    Args:
        run_dir: Directory of the run.
        num_episodes: How many episodes to play.
        seed: The seed of the episodes; unset: the run's own, which gives the episodes of the evaluation at its end.
        checkpoint: File in that directory, by default the last checkpoint; as of :func:`rayvec.load`.
        env: The environment of the run, where it was passed in Python and has no name.
        eval_env: The environment of its evaluations, if that is another one, likewise.
        network: The network of the run, likewise.
        changes: Settings of :data:`rayvec.config.ADJUSTABLE` to use in place of the run's own.

    Raises:
        ConfigError: `run_dir` is not the directory of a run, or the environments have other spaces than in training.
        CheckpointError: Its checkpoint is missing or damaged.
    """
    run_dir = local_path(run_dir)
    config, state = load_config(run_dir), load_checkpoint(run_dir, checkpoint)
    config = config.adjusted(**changes)
    with contextlib.ExitStack() as stack:
        env = stack.enter_context(served(config, env, begun=True))
        config = with_own_parts(config, env, network, eval_env, begun=True)
        config = eval_settings(config if seed is None else replace(config, seed=seed))
        envs = stack.enter_context(open_env(config))
        check_kept_spaces((envs.single_observation_space, envs.single_action_space), state)
        module = network_of(config, envs.single_observation_space, envs.single_action_space)
        return evaluate(config, envs, module, state["weights"].numpy(), num_episodes, seed=config.eval_seed())


def render_episode(
    run_dir: Path, video: Path | None = None, *, seed: int | None = None, checkpoint: str = "checkpoint.pt"
) -> float:
    """Plays one greedy episode, on the screen or into a video: the first one of an evaluation with this seed.

    Args:
        run_dir: Directory of the run.
        video: The ``.mp4`` file; None shows the episode in a window.
        seed: The seed of the episode; unset: the run's own.
        checkpoint: As of :func:`rayvec.load`.

    Returns:
        The return of the episode.

    Raises:
        ConfigError: `run_dir` is not the directory of a run, or the environment can't be rendered so.
        ImportError: A package is missing: ``pip install 'imageio[ffmpeg]'``.
    """
    run_dir, mode = local_path(run_dir), "human" if video is None else "rgb_array"
    config, agent = load_config(run_dir), load(run_dir, checkpoint)
    config = config if seed is None else replace(config, seed=seed)
    episode_return, is_done, state = 0.0, False, None
    with make_one_env(config, render_mode=mode) as env, _writer(video, env.metadata) as frames:
        require(
            mode in (env.metadata.get("render_modes") or ()),
            f"{config.env_id} has no render mode {mode!r}. Leave --video and --render out.",
        )
        obs, _ = env.reset(seed=config.eval_seed())
        while True:
            if frames is not None:
                frames.append_data(np.asarray(env.render()[0], np.uint8))
            if is_done:
                return episode_return
            action = agent.predict(obs, state)
            action, state = action if agent.is_recurrent else (action, None)
            obs, reward, terminated, truncated, _ = env.step(action)
            episode_return, is_done = episode_return + float(reward[0]), bool(terminated[0] or truncated[0])


def _writer(video: Path | None, metadata: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """Returns the writer of a video as a context; without a video, a context of None."""
    if video is None:
        return contextlib.nullcontext()
    require(
        video.suffix.lower() == ".mp4" and video.parent.is_dir(),
        f"{video} is no .mp4 file in a directory that exists. Pass a path such as out.mp4.",
    )
    import imageio.v2 as imageio

    writer: contextlib.AbstractContextManager[Any] = imageio.get_writer(
        local_path(video), format="FFMPEG", fps=metadata.get("render_fps", 30), macro_block_size=2
    )
    return writer
