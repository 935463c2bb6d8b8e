"""One step or many of many environments as arrays, and how chunks of different environments are joined.

The infos of a chunk are columns while they travel between processes, and dicts when they are read: thousands of small
dicts take longer to pickle than the steps themselves, and most are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayvec.data.columns import Columns, columns_of, info_of, merge, select
from rayvec.data.trees import Tree, copied, tree_map
from rayvec.errors import ConfigError

StopEarly = Callable[[int], bool]
"""Whether to end a chunk early, given the number of steps that its environments have taken together so far."""

_STEPS = {"axes": "T, N"}  # tree of arrays [T, N, ...], or with K rows in place of T
_ENVS = {"axes": "N"}  # tree of arrays [N, ...]
_PLACES = {"axes": "(t, n)"}  # steps of environments, in this order, [k, 2]
_ENDS = {"axes": "F"}  # tree of arrays [F, ...], a row for each place in final_index
_INFOS = {"axes": "infos"}
_COMMON = {"axes": ""}  # one number for the whole chunk


class ChunkInfo(NamedTuple):
    """An info dict with its place in a chunk.

    Attributes:
        t: The step, 0 to T-1; -1 for the reset before the chunk's first step.
        n: The column.
        info: The info dict. Numbers are Python's own where columns do not tell them from NumPy's.
    """

    t: int
    n: int
    info: dict[str, Any]


class ChunkInfos(Sequence[ChunkInfo]):
    """The infos of a chunk in the order of ``(t, n)``; the dicts are made when one of them is first read.

    A change to one of the dicts is seen by later readers of this object. It is not part of a pickle of the object, of
    what it is joined to or of what is cut from it.

    >>> infos = ChunkInfos.of([ChunkInfo(0, 0, {"x": 1.0}), ChunkInfo(0, 1, {"x": 2.0})])
    >>> infos[0], infos.columns["x"]
    (ChunkInfo(t=0, n=0, info={'x': 1.0}), array([1., 2.]))

    Args:
        places: ``(t, n)`` of each info, ``int64 [k, 2]``.
        columns: The infos, with a row for each place.
    """

    def __init__(self, places: Any = (), columns: Columns | None = None) -> None:
        self.places: NDArray[np.int64] = np.asarray(places, np.int64).reshape(-1, 2)
        self.columns = columns or {}

    @classmethod
    def of(cls, infos: Iterable[ChunkInfo]) -> ChunkInfos:
        """Makes columns of infos that are in order."""
        each = list(infos)
        return cls([info[:2] for info in each], columns_of(enumerate(info.info for info in each), len(each)))

    @classmethod
    def join(cls, parts: Sequence[ChunkInfos], offsets: Sequence[int]) -> ChunkInfos:
        """Joins the infos of chunks side by side: chunk k has the columns ``offsets[k]`` to ``offsets[k + 1] - 1``."""
        places, order = _in_order([part.places for part in parts], offsets)
        bounds = pairwise(accumulate(map(len, parts), initial=0))
        rows = [(slice(*each), part.columns) for each, part in zip(bounds, parts, strict=True) if len(part)]
        return cls(places, select(merge(rows, len(places)), order) if rows else {})

    def where(self, keep: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]]) -> ChunkInfos:
        """Returns the infos at those places ``t [k]``, ``n [k]`` that a function of them marks, ``bool [k]``."""
        kept = keep(*self.places.T)
        return ChunkInfos(self.places[kept], select(self.columns, kept))

    def between(self, start: int, stop: int) -> ChunkInfos:
        """Returns the infos of the columns `start` to ``stop - 1`` of the chunk, counted from there."""
        inside = self.where(lambda t, n: (n >= start) & (n < stop))
        return ChunkInfos(inside.places - np.array([0, start]), inside.columns)

    @cached_property
    def _items(self) -> tuple[ChunkInfo, ...]:
        infos = (info_of(self.columns, row) for row in range(len(self)))
        return tuple(
            ChunkInfo(t, n, {key: copied(value) for key, value in info.items()})
            for (t, n), info in zip(self.places.tolist(), infos, strict=True)
        )

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._items == tuple(other)

    def __repr__(self) -> str:
        return f"ChunkInfos({list(self)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ChunkInfos, (self.places, self.columns)


@dataclass(frozen=True, slots=True)
class Chunk:
    """T steps of N environments; an environment whose episode ends is reset within the step.

    Attributes:
        env_ids: Global index of the environment in each column, ``int64 [N]``.
        obs: What the policy saw, tree of ``[T, N, *obs_shape]``.
        act: What it did, tree of ``[T, N, *act_shape]``.
        rew: ``float64 [T, N]``; in a chunk of Tianshou's several agents ``[T, N, *rew_shape]``.
        terminated: The episode ended by the environment's own rules, ``bool [T, N]``.
        truncated: The episode was cut, by a time limit or by a fault, ``bool [T, N]``.
        valid: False where no step happened (the environment was being restarted), and for steps that were
            taken but don't belong to the batch (beyond a quota of episodes), ``bool [T, N]``.
        last_obs: What the policy would see next, tree of ``[N, *obs_shape]``: the first observation
            of a new episode where the chunk's last step ended one.
        final_index: ``(t, n)`` of each step that ended an episode, in that order, ``int64 [F, 2]``.
        final_obs: The true last observation of each of these episodes, tree of ``[F, *obs_shape]``.
        extras: What the policy recorded with its actions, by name, ``[T, N, ...]``:
            ``logp`` (float32, log-probability of the action), and whatever else it returns.
        states: Hidden states of a recurrent policy before the steps at which its sequences begin,
            ``float32 [K, N, D]``; see :meth:`rayvec.policies.recurrent.RecurrentActor.state_to_record`. K is 0
            without one.
        infos: Non-empty infos of steps, sorted by (t, n): a sequence of :class:`~rayvec.data.ChunkInfo` that makes
            the dicts when one of them is first read.
        reset_infos: Non-empty infos of the resets that followed within step t, sorted likewise.
        restarts: ``(t, n)`` of each step that failed, after which the environment was restarted, in that order;
            t is -1 where a fault ended the episode before the chunk's first step, ``int64 [R, 2]``. The
            step before a failed one is truncated, at the last true observation.
        cuts: ``(t, n)`` of each step that is truncated for this reason, in that order, ``int64 [C, 2]``.
        weights_version: Version of the policy's weights; 0 for a policy without weights.
        first_step: Number of steps that the environments took in earlier chunks.
    """

    env_ids: NDArray[np.int64] = field(metadata=_ENVS)
    obs: Tree = field(metadata=_STEPS)
    act: Tree = field(metadata=_STEPS)
    rew: NDArray[np.float64] = field(metadata=_STEPS)
    terminated: NDArray[np.bool_] = field(metadata=_STEPS)
    truncated: NDArray[np.bool_] = field(metadata=_STEPS)
    valid: NDArray[np.bool_] = field(metadata=_STEPS)
    last_obs: Tree = field(metadata=_ENVS)
    final_index: NDArray[np.int64] = field(metadata=_PLACES)
    final_obs: Tree = field(metadata=_ENDS)
    extras: dict[str, NDArray[Any]] = field(default_factory=dict, metadata=_STEPS)
    states: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0, 0), np.float32), metadata=_STEPS)
    infos: ChunkInfos = field(default_factory=ChunkInfos, metadata=_INFOS)
    reset_infos: ChunkInfos = field(default_factory=ChunkInfos, metadata=_INFOS)
    restarts: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64), metadata=_PLACES)
    cuts: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64), metadata=_PLACES)
    weights_version: int = field(default=0, metadata=_COMMON)
    first_step: int = field(default=0, metadata=_COMMON)

    @property
    def num_steps(self) -> int:
        """T."""
        return int(self.rew.shape[0])

    @property
    def num_envs(self) -> int:
        """N."""
        return int(self.rew.shape[1])

    @property
    def done(self) -> NDArray[np.bool_]:
        """Where an episode ended for either reason, ``bool [T, N]``; for boundaries only, never to bootstrap."""
        return self.terminated | self.truncated

    @property
    def restarted_before(self) -> NDArray[np.int64]:
        """Columns whose episode a fault ended before the chunk's first step, ``int64 [R]``."""
        return self.restarts[self.restarts[:, 0] == -1, 1]  # type: ignore[no-any-return]

    def next_obs(self) -> Tree:
        """Returns the observation after each step, tree of ``[T, N, *obs_shape]``, newly allocated.

        At the end of an episode it is the true last observation, never the first of the next.
        """
        t, n = self.final_index[:, 0], self.final_index[:, 1]

        def shift(obs: NDArray[Any], last: NDArray[Any], final: NDArray[Any]) -> NDArray[Any]:
            following = np.concatenate([obs[1:], last[None]])
            following[t, n] = final
            return following

        return tree_map(shift, self.obs, self.last_obs, self.final_obs)

    def columns(self, start: int, stop: int) -> Chunk:
        """Returns the chunk of the columns `start` to ``stop - 1``, maybe of none; its arrays are views."""

        def inside(places: NDArray[np.int64]) -> NDArray[np.bool_]:
            return (places[:, 1] >= start) & (places[:, 1] < stop)

        ended, origin = inside(self.final_index), np.array([0, start])
        cut: dict[str, Callable[[Any], Any]] = {
            "T, N": partial(tree_map, lambda leaf: leaf[:, start:stop]),
            "N": partial(tree_map, lambda leaf: leaf[start:stop]),
            "(t, n)": lambda places: places[inside(places)] - origin,
            "F": partial(tree_map, lambda leaf: leaf[ended]),
            "infos": lambda infos: infos.between(start, stop),
            "": lambda value: value,
        }
        return Chunk(**{name: cut[axes](getattr(self, name)) for name, axes in AXES.items()})


AXES: dict[str, str] = {field.name: field.metadata["axes"] for field in fields(Chunk)}
"""How each field of a chunk lies: what joins or cuts chunks follows from it."""


def map_steps(function: Callable[[NDArray[Any]], Any], chunk: Chunk) -> Chunk:
    """Returns a chunk with a function applied to each array of its steps, ``[T, N, ...]`` or ``[K, N, ...]``."""
    trees = {name: getattr(chunk, name) for name, axes in AXES.items() if axes == "T, N"}
    return replace(chunk, **tree_map(function, trees))


@dataclass(slots=True)
class StepBatch:
    """The answers of k environments to one step or one reset.

    Attributes:
        env_ids: Whose answers, ``int64 [k]``; row i of everything else belongs to ``env_ids[i]``.
        obs: Observations, tree of ``[k, *obs_shape]``.
        rew: Rewards, ``float64 [k]``; 0 after a reset.
        terminated: ``bool [k]``.
        truncated: ``bool [k]``.
        info: Columns, as Gymnasium merges infos.
    """

    env_ids: NDArray[np.int64]
    obs: Tree
    rew: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    info: Any = ()


def join_chunks(chunks: Sequence[Chunk], *, copy: bool = True) -> Chunk:
    """Joins chunks of different environments, side by side.

    Where their numbers of steps differ, the shorter ones are padded with steps that did not happen. These are not
    `valid`, and their observation is `last_obs`: what follows the last step that happened. The episode goes on in the
    next chunk.

    Args:
        chunks: The chunks.
        copy: Whether the result has memory of its own. Otherwise arrays of steps whose columns lie side by side already
            are not copied.

    Raises:
        ConfigError: The policy returned different extras in them.
    """
    first, *following = [{name: extra.shape[2:] for name, extra in chunk.extras.items()} for chunk in chunks]
    for found, chunk in zip(following, chunks[1:], strict=True):
        where, there = (" ".join(map(str, each.env_ids[:1])) for each in (chunks[0], chunk))
        check_extras(first, found, f"for environment {where}", f" for environment {there}")
    lengthened = partial(_lengthened, max(chunk.num_steps for chunk in chunks))
    parts = [replace(chunk, obs=tree_map(lengthened, chunk.obs, chunk.last_obs)) for chunk in chunks]
    offsets = [0, *accumulate(len(part.env_ids) for part in parts)]
    _, order = _in_order([part.final_index for part in parts], offsets)
    join: dict[str, Callable[[list[Any]], Any]] = {
        "T, N": lambda trees: tree_map(partial(_beside, copy=copy), *trees),
        "N": lambda trees: tree_map(lambda *leaves: np.concatenate(leaves), *trees),
        "(t, n)": lambda places: _in_order(places, offsets)[0],
        "F": lambda trees: tree_map(lambda *leaves: np.concatenate(leaves)[order], *trees),
        "infos": lambda infos: ChunkInfos.join(infos, offsets),
        "": min,
    }
    return Chunk(**{name: join[axes]([getattr(part, name) for part in parts]) for name, axes in AXES.items()})


def _lengthened(num_steps: int, leaf: NDArray[Any], value: Any = None) -> NDArray[Any]:
    """Returns an array with as many rows as steps: in those that it lacks, a value ``[N, ...]``, or zeros."""
    if num_steps == len(leaf):
        return leaf
    row = np.zeros(leaf.shape[1:], leaf.dtype) if value is None else value
    return np.concatenate([leaf, np.broadcast_to(row, (num_steps - len(leaf), *row.shape))])


def check_extras(
    expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], where: str, there: str = ""
) -> None:
    """Raises ``ConfigError`` if a policy returned other extras than at an earlier step or in another worker.

    Args:
        expected: Shape of a row of each extra, by name.
        found: The same, of what is checked.
        where: Where `expected` was returned, for the message.
        there: Where `found` was returned.
    """
    if found != expected:
        raise ConfigError(
            f"The policy returned extras of the shapes {found}{there}, and of {expected} {where}. Return every "
            "extra in one shape at every step; fill in zeros where there is none."
        )


def _beside(*leaves: NDArray[Any], copy: bool) -> NDArray[Any]:
    """Joins arrays ``[T, n, ...]``, with zeros in the rows that some lack.

    Columns of one array that lie side by side are a view of it, unless `copy`.
    """
    leaves = tuple(map(partial(_lengthened, max(map(len, leaves))), leaves))
    first, row_bytes = leaves[0], leaves[0].strides[1]
    starts = accumulate((leaf.shape[1] * row_bytes for leaf in leaves), initial=first.ctypes.data)
    width = sum(leaf.shape[1] for leaf in leaves)
    is_whole = first.strides[0] == width * row_bytes and all(
        (leaf.ctypes.data, leaf.strides, leaf.dtype) == (start, first.strides, first.dtype)
        for leaf, start in zip(leaves, starts, strict=False)
    )
    if copy or not is_whole:
        return np.concatenate(leaves, axis=1)
    return np.lib.stride_tricks.as_strided(first, (len(first), width, *first.shape[2:]), first.strides)


def _in_order(
    places: Sequence[NDArray[np.int64]], offsets: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Joins places ``(t, n)`` of chunks side by side, in order; returns also where each came from."""
    joined = np.concatenate(places)
    joined[:, 1] += np.repeat(offsets[:-1], [len(at) for at in places])
    order = np.argsort(joined[:, 0] * offsets[-1] + joined[:, 1], kind="stable")  # fast where parts are in order
    return joined[order], order


def counted_ends(chunk: Chunk) -> NDArray[np.bool_]:
    """Returns where an episode ended by itself, ``bool [T, N]``: not one that a fault has cut."""
    ended: NDArray[np.bool_] = (chunk.terminated | chunk.truncated) & chunk.valid
    ended[tuple(chunk.cuts.T)] = False
    return ended
