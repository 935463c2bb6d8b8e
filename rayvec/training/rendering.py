"""Episodes that a person can watch: on a screen, or as a video."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rayvec.errors import ConfigError
from rayvec.training.agent import load
from rayvec.training.atomic_files import local_path
from rayvec.training.run_dir import load_config
from rayvec.training.runs import make_one_env

__all__ = ["render_episode"]


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
        ConfigError: `run_dir` is not the directory of a run, the environment can't be rendered so, or a package is
            missing.
    """
    run_dir, mode = local_path(run_dir), "human" if video is None else "rgb_array"
    config, agent = load_config(run_dir), load(run_dir, checkpoint)
    config = config if seed is None else replace(config, seed=seed)
    episode_return, is_done, state = 0.0, False, None
    with make_one_env(config, render_mode=mode) as env, _writer(video, env.metadata) as frames:
        if mode not in (env.metadata.get("render_modes") or ()):
            raise ConfigError(f"{config.env_id} has no render mode {mode!r}. Leave --video and --render out.")
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
    try:
        import imageio.v2 as imageio

        writer: contextlib.AbstractContextManager[Any] = imageio.get_writer(
            local_path(video), format="FFMPEG", fps=metadata.get("render_fps", 30), macro_block_size=2
        )
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"The video {video} can't be written: {error}. Pass a path in a folder that exists, and "
            "pip install 'imageio[ffmpeg]'."
        ) from error
    return writer
