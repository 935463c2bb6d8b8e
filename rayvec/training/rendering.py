"""Episodes that a person can watch: on a screen, or as a video."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np

from rayvec.config import TrainConfig
from rayvec.errors import ConfigError, first_line
from rayvec.training.agent import load
from rayvec.training.run_dir import load_config
from rayvec.training.runs import make_one_env
from rayvec.vector.ray_vec_env import RayVecEnv

__all__ = ["check_video", "render_episode"]

RenderMode = Literal["human", "rgb_array"]
_SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
_UNSEEN = ("dummy", "offscreen")


def check_video(path: Path) -> None:
    """Checks that a video can be written.

    Raises:
        ConfigError: The ending of the path is not ``.mp4``, its folder does not exist, or imageio is not installed.
    """
    if path.suffix != ".mp4" or not path.parent.is_dir():
        raise ConfigError(
            "A video is written into an .mp4 file.",
            expected="a path that ends with .mp4, in a folder that exists",
            got=str(path),
            remedy="Pass --video out.mp4, for example.",
        )
    try:
        for name in ("imageio", "imageio_ffmpeg"):
            importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            "Videos are an extra.",
            expected="the packages imageio and imageio-ffmpeg",
            got=str(error),
            remedy="Install rayvec[video].",
        ) from error


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
            or a package is missing.
    """
    config = load_config(run_dir)
    if config.native is not None:
        raise ConfigError(
            "--video and --render show a single environment.",
            expected="a run whose environment has an id, or is a class or function",
            got=f"native={config.native!r}, which makes vector environments",
            remedy="Leave --video and --render out.",
        )
    config = config if seed is None else replace(config, seed=seed)
    if video is not None:
        check_video(video)
    elif not any(map(os.environ.get, _SCREENS)):
        raise _screen_error("none")
    agent = load(run_dir, checkpoint)
    with _rendered_env(config, "human" if video is None else "rgb_array") as env, _writer(video, env) as show_frame:
        obs, _ = env.reset(seed=config.eval_seed())
        show_frame()
        episode_return, is_done, state = 0.0, False, None
        while not is_done:
            action = agent.predict(obs, state)
            action, state = action if agent.is_recurrent else (action, None)
            obs, reward, terminated, truncated, _ = env.step(action)
            show_frame()
            episode_return, is_done = episode_return + float(reward[0]), bool(terminated[0] or truncated[0])
    return episode_return


@contextlib.contextmanager
def _rendered_env(config: TrainConfig, mode: RenderMode) -> Iterator[RayVecEnv]:
    with make_one_env(config) as plain:
        modes = plain.metadata.get("render_modes") or []
    if mode not in modes:
        raise ConfigError(
            "An environment is shown in a render mode that it has.",
            expected=f"render mode {mode!r}" + (" for a video" if mode == "rgb_array" else ""),
            got=f"{config.env_id}, which has {', '.join(map(repr, modes)) or 'none'}",
            remedy="Leave --video and --render out, or add the mode to the environment's metadata and render().",
        )
    try:
        with make_one_env(config, render_mode=mode) as env:
            env.reset(seed=0)
            if mode == "rgb_array":
                _frame(env)
            else:
                _check_window()
            yield env
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(
            "Rendering needs a package of the environment.",
            expected="what the environment draws with",
            got=str(error),
            remedy="Install that package.",
        ) from error


def _check_window() -> None:
    """Refuses a pygame window that cannot be seen: SDL falls back to such a driver if the screen does not answer."""
    pygame = sys.modules.get("pygame")
    if pygame is None or not pygame.display.get_init() or "SDL_VIDEODRIVER" in os.environ:
        return
    if (driver := pygame.display.get_driver()) in _UNSEEN:
        given = ", ".join(f"{name}={os.environ[name]}" for name in _SCREENS if name in os.environ)
        raise _screen_error(f"{given}, which does not answer: SDL draws with its driver {driver!r}")


def _screen_error(got: str) -> ConfigError:
    return ConfigError(
        "--render human opens a window.",
        expected="a screen that DISPLAY or WAYLAND_DISPLAY names, or a driver that SDL_VIDEODRIVER names",
        got=got,
        remedy="Pass --video out.mp4 to record a video in place of it.",
    )


def _frame(env: RayVecEnv) -> Any:
    """Returns the picture of the environment, ``uint8 [H, W, 3]``, with even sides, as video codecs need them."""
    picture = np.asarray(env.render()[0], np.uint8)
    if picture.ndim != 3 or picture.shape[2] != 3:
        raise ConfigError(
            "A frame of a video is a picture.",
            expected="uint8 of shape (height, width, 3) from render()",
            got=picture.shape,
            remedy="Let render() return such an array in render mode 'rgb_array'.",
        )
    height, width = picture.shape[:2]
    return np.pad(picture, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")


@contextlib.contextmanager
def _writer(path: Path | None, env: RayVecEnv) -> Iterator[Callable[[], None]]:
    """Yields what appends the picture of an environment to a video; nothing, where it draws on the screen itself."""
    if path is None:
        yield lambda: None
        return
    imageio = importlib.import_module("imageio.v2")
    partial = path.with_name(f".{path.stem}.tmp.mp4")
    settings = {"fps": env.metadata.get("render_fps", 30), "codec": "libx264", "macro_block_size": 2}
    writer = imageio.get_writer(partial, format="FFMPEG", mode="I", **settings)

    def show_frame() -> None:
        frame = _frame(env)
        with _explaining(path):
            writer.append_data(frame)

    try:
        try:
            yield show_frame
        finally:
            writer.close()
        with _explaining(path):
            imageio.get_reader(partial, format="FFMPEG").close()  # ffmpeg does not say that the disk is full
            partial.replace(path)
    finally:
        with contextlib.suppress(OSError):  # it is not there, or the disk can only be read
            partial.unlink()


@contextlib.contextmanager
def _explaining(path: Path) -> Iterator[None]:
    """Names the file where a video can't be written."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            "A video is written into a file.",
            expected="a directory that you may write to, on a disk with free space",
            got=f"{path}, which ffmpeg could not write: {first_line(error)}",
            remedy="Pass another path, or free space on the disk.",
        ) from error
