"""Writes what a policy did as a Minari dataset, episode by episode."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Chunk, Tree, tree_map
from rayvec.errors import ConfigError


class Recording(AbstractContextManager["Recording"]):
    """Writes the episodes of chunks to a Minari dataset: see :func:`record`.

    Args:
        env: The environments whose chunks are added.
        path: The directory of the dataset; it is made, and must not have one already.

    Raises:
        ConfigError: There is a dataset, its parent directory is missing, or Minari is not installed.
    """

    def __init__(self, env: Any, path: str | Path) -> None:
        try:
            from minari import MinariDataset, __version__
            from minari.data_collector import EpisodeBuffer
            from minari.dataset.minari_storage import MinariStorage
        except ImportError as error:
            raise ConfigError(f"Recording needs Minari ({error}). Install it: pip install 'minari[hdf5]'.") from error
        path = Path(path).expanduser().resolve()  # Minari misreads a relative one
        observation, action, spec = env.single_observation_space, env.single_action_space, env.spec
        try:
            spec.to_json()
        except (AttributeError, TypeError, ValueError):  # there is none, or it holds callables
            spec = None
        try:
            self._storage = MinariStorage.new(path, observation, action, env_spec=spec, jpeg_encoding=False)
        except (ValueError, OSError, NotImplementedError) as error:  # the last: it has no form for a space
            raise ConfigError(f"No dataset could be made in {path}: {error}") from error
        name = re.sub(r"[^\w-]", "-", path.name)
        self._storage.update_metadata({"dataset_id": f"{name}-v0", "minari_version": __version__})
        self._dataset, self._episode = MinariDataset, EpisodeBuffer
        self._parts: dict[int, list[dict[str, Tree]]] = {}  # of each environment's unfinished episode
        self._next_obs: dict[int, Tree] = {}  # the observation after it, [1, ...]
        self._finished: list[Any] = []

    def add(self, chunk: Chunk) -> None:
        """Adds a chunk that continues the one before; steps that are not valid are left out."""
        at_start = {n for t, n in chunk.restarts.tolist() if t <= 0}
        for column, env_id in enumerate(chunk.env_ids.tolist()):
            if column in at_start:  # the fault has cut an episode of the chunk before
                self._end(env_id)
            begin, done = 0, chunk.done[:, column] & chunk.valid[:, column]
            for t in np.flatnonzero(done).tolist():
                self._add_steps(chunk, column, begin, t + 1)
                row = np.flatnonzero((chunk.final_index == (t, column)).all(1))
                self._next_obs[env_id] = tree_map(lambda leaf, row=row: leaf[row], chunk.final_obs)
                self._end(env_id)
                begin = t + 1
            self._add_steps(chunk, column, begin, chunk.num_steps)
        self._write()

    def begin_episodes(self) -> None:
        """Ends the unfinished episodes as truncated: all environments were reset."""
        for env_id in [*self._parts]:
            self._end(env_id)
        self._write()

    def close(self) -> Any:
        """Ends the unfinished episodes as truncated. Returns the ``minari.MinariDataset``."""
        self.begin_episodes()
        return self._dataset(self._storage)

    def _add_steps(self, chunk: Chunk, column: int, begin: int, end: int) -> None:
        rows = begin + np.flatnonzero(chunk.valid[begin:end, column])
        env_id = int(chunk.env_ids[column])
        if len(rows):
            fields = "obs", "act", "rew", "terminated", "truncated"
            part = {name: tree_map(lambda leaf: leaf[rows, column], getattr(chunk, name)) for name in fields}
            self._parts.setdefault(env_id, []).append(part)
            self._next_obs[env_id] = tree_map(lambda leaf: leaf[column : column + 1].copy(), chunk.last_obs)

    def _end(self, env_id: int) -> None:
        """Ends the episode of an environment, as truncated unless its last step has ended it."""
        if not (parts := self._parts.pop(env_id, [])):
            return
        episode: Any = tree_map(lambda *leaves: np.concatenate(leaves), *parts)
        episode["truncated"][-1] |= not episode["terminated"][-1]
        observations = tree_map(lambda *leaves: _values(np.concatenate(leaves)), episode["obs"], self._next_obs[env_id])
        self._finished.append(
            self._episode(
                observations=observations,
                actions=tree_map(_values, episode["act"]),
                rewards=episode["rew"],
                terminations=episode["terminated"],
                truncations=episode["truncated"],
            )
        )

    def _write(self) -> None:
        if self._finished:
            self._storage.update_episodes(self._finished)
            self._finished.clear()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _values(leaf: NDArray[Any]) -> Any:
    """Returns texts and other objects as a list, as Minari stores them."""
    return leaf.tolist() if leaf.dtype.hasobject else leaf


def record(env: Any, path: str | Path) -> Recording:
    """Opens a Minari dataset for the episodes of chunks that environments take.

    ``with rayvec.record(env, path) as recording`` and then ``recording.add(chunk)`` writes the chunks of one policy
    in the order in which they were taken; ``Collector(record=path)`` does the same with those of its batches. Each
    episode has its true last observation, and no step that failed. An episode that a fault or a reset has cut, or
    that the end of the recording cuts, is truncated.

    Args:
        env: A :class:`rayvec.RayVecEnv`.
        path: The directory of the dataset; it is made, in one that is there. ``minari.MinariDataset(path)`` reads it.

    Raises:
        ConfigError: There is a dataset in it, its parent is missing, or Minari is not installed.
    """
    return Recording(env, path)
