"""Episodes that a person can watch: on a screen, or as a video."""

from __future__ import annotations

import contextlib
import importlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from rayvec.errors import ConfigError, first_line
from rayvec.training.agent import load
from rayvec.training.atomic_files import local_path
from rayvec.training.run_dir import load_config
from rayvec.training.runs import make_one_env
from rayvec.vector.ray_vec_env import RayVecEnv

__all__ = ["render_episode"]

_SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")


def render_episode(
    run_dir: Path,
    video: Path | None = None,
    *,
    seed: int | None = None,
    checkpoint: str = "checkpoint.pt",
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
        ConfigError: `run_dir` is not the directory of a run, the environment can't be rendered so, there is no screen,
            a package is missing, or the video can't be written.
    """
    run_dir, video = local_path(run_dir), None if video is None else local_path(video)
    config = load_config(run_dir)
    config = config if seed is None else replace(config, seed=seed)
    mode = "human" if video is None else "rgb_array"
    if video is None and not any(map(os.environ.get, _SCREENS)):
        raise _refused(f"There is no screen that {', '.join(_SCREENS[:-1])} or {_SCREENS[-1]} names")
    if config.native is not None:
        raise _refused(f"The run has no single environment to show, but native={config.native!r}")
    with make_one_env(config) as plain:
        modes = plain.metadata.get("render_modes") or []
    if mode not in modes:
        raise _refused(f"{config.env_id} has the render modes {modes}, not {mode!r}")
    agent, episode_return, is_done, state = load(run_dir, checkpoint), 0.0, False, None
    try:
        with make_one_env(config, render_mode=mode) as env, _frames(video, env) as frames:
            obs, _ = env.reset(seed=config.eval_seed())
            _show(env, frames)
            while not is_done:
                action = agent.predict(obs, state)
                action, state = action if agent.is_recurrent else (action, None)
                obs, reward, terminated, truncated, _ = env.step(action)
                _show(env, frames)
                episode_return, is_done = episode_return + float(reward[0]), bool(terminated[0] or truncated[0])
    except gymnasium.error.DependencyNotInstalled as error:
        raise _refused(f"A package that the environment draws with is missing: {error}") from error
    return episode_return


def _frames(video: Path | None, env: RayVecEnv) -> contextlib.AbstractContextManager[Any]:
    """Returns the writer of a video as a context; without a video, a context of None."""
    if video is None:
        return contextlib.nullcontext()
    if video.suffix != ".mp4" or not video.parent.is_dir():
        raise _refused(f"The video can't be {video}: its path must end with .mp4, in a folder that exists")
    try:
        importlib.import_module("imageio_ffmpeg")
        imageio: Any = importlib.import_module("imageio.v2")
    except ImportError as error:
        raise _refused(
            f"A video needs a package that is not installed ({error}). Install it: pip install 'imageio[ffmpeg]'"
        ) from error
    fps = env.metadata.get("render_fps", 30)
    writer: contextlib.AbstractContextManager[Any] = imageio.get_writer(video, fps=fps, macro_block_size=2)
    return writer


def _show(env: RayVecEnv, frames: Any) -> None:
    """Appends the picture of the environment to a video; without one, the environment draws on the screen itself."""
    if frames is None:
        return
    try:
        frames.append_data(np.asarray(env.render()[0], np.uint8))
    except (OSError, RuntimeError, ValueError) as error:
        raise _refused(f"ffmpeg could not write the video: {first_line(error)}") from error


def _refused(news: str) -> ConfigError:
    return ConfigError(f"{news}. Correct it, or leave --video and --render out.")
