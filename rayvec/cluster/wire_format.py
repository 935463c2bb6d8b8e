"""The frames of a stream: requests for steps or resets, and their answers.

A frame consists of its length, a small fixed header, environment ids, and raw array bytes. Both sides derive the layout
of the arrays from the spaces. Nothing in a frame is pickled. Ray transfers any value that a frame can't hold; the frame
then only marks it as kept.

Step frames are frequent and have the same layout. Both sides therefore cache array views of the frame memory for each
number of environments. Packing or unpacking a frame then costs one header and one copy for each array.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.cluster import plain_values
from rayvec.data import RawInfo, StepBatch, SubBatchInfo, Tree, tree_leaves
from rayvec.node.step_memory import action_leaves
from rayvec.pools.base import Autoreset
from rayvec.pools.shared_memory import ArrayLayout, Field

__all__ = ["Answer", "FrameFormat", "Frames", "Kind", "Request"]

_REQUEST = struct.Struct("<QBBBBIQ")
"""Frame length in bytes; kind, autoreset, loose, number of arrays; number of environments; payload bytes."""
_ANSWER = struct.Struct("<QIIQ")
"""Frame length in bytes; form; number of environments; bytes of infos."""
_PLAIN_CODES = b"?bBhHiIlLqQefd"
_PLAIN = {np.dtype(chr(code)) for code in _PLAIN_CODES}
_ID_BYTES = 8
_MOST_PACKED = 256
_MOST_ARRAYS = 255
"""An action space of more arrays does not fit a frame's header."""
_CODES = 8
"""The dtype codes of actions are padded to a multiple of this, so that the arrays after them are aligned."""


def _check_size(frame: memoryview, size: int) -> None:
    if len(frame) != size:
        raise ValueError(f"a frame of {len(frame)} bytes whose parts have {size}")


class Kind(IntEnum):
    """The operation that a request starts."""

    STEP = 0
    RESET = 1
    BEGIN = 2
    OBSERVE = 3
    STEP_KEPT = 4
    """A step whose actions Ray transfers."""


class _Form(IntEnum):
    PLAIN = 0
    INFOS = 1
    KEPT = 2


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the node reads it.

    Attributes:
        kind: The requested operation.
        env_ids: The node's ids of the environments, ``int64 [k]``.
        autoreset: Autoreset mode of a step.
        loose: Whether the node answers for each environment as soon as it has finished; else for all together.
        actions: Actions of a step; None if Ray transfers them.
        seeds: Seeds of a reset; None if Ray transfers the seeds and options.
        options: Options of a reset.
    """

    kind: Kind
    env_ids: NDArray[np.int64]
    autoreset: Autoreset
    loose: bool
    actions: Tree | None = None
    seeds: Sequence[int | None] | None = None
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as the driver reads it.

    Attributes:
        env_ids: The node's ids of the environments, ``int64 [k]``.
        batch: The answers; None if the driver must fetch them, or an environment's exception, through Ray.
    """

    env_ids: NDArray[np.int64]
    batch: StepBatch | None


class Frames:
    """Reusable memory for frames, with cached array views for each number of environments.

    Args:
        fields: Dtype and row shape of each array. The arrays follow the ids.
        at: Offset of the ids in bytes.
    """

    def __init__(self, fields: Sequence[Field], at: int) -> None:
        self._fields = [(np.dtype(np.int64), ()), *((np.dtype(dtype), shape) for dtype, shape in fields)]
        self._row_bytes = [dtype.itemsize * math.prod(shape) for dtype, shape in self._fields]
        self._bytes_of_one = sum(self._row_bytes)
        self._at = at
        self._arrays: dict[int, list[NDArray[Any]]] = {}
        self._received = False
        self.buffer: Any = bytearray()

    def size(self, count: int) -> int:
        """Returns the size in bytes of a frame for `count` environments."""
        return self._at + count * self._bytes_of_one

    def own(self, count: int, extra_bytes: int = 0) -> list[NDArray[Any]]:
        """Returns views of :attr:`buffer` to pack ids and arrays into; it has room for `extra_bytes` after them."""
        size = self.size(count) + extra_bytes
        if self._received or size > len(self.buffer):
            self._arrays, self.buffer, self._received = {}, bytearray(size + extra_bytes), False
        return self._arrays.get(count) or self._view(count)

    def over(self, buffer: Any, count: int) -> list[NDArray[Any]]:
        """Returns the ids and arrays of a received frame as views of `buffer`; the frame begins at offset 0."""
        if buffer is not self.buffer:
            self._arrays, self.buffer, self._received = {}, buffer, True
        return self._arrays.get(count) or self._view(count)

    def _view(self, count: int) -> list[NDArray[Any]]:
        arrays, at = [], self._at
        for (dtype, shape), row_bytes in zip(self._fields, self._row_bytes, strict=True):
            flat = np.frombuffer(self.buffer, dtype, count * math.prod(shape), at)
            arrays.append(flat.reshape(count, *shape))
            at += count * row_bytes
        self._arrays[count] = arrays
        return arrays


class FrameFormat:
    """Packs and unpacks frames for one end of a stream.

    The next packed frame of the same kind overwrites a packed frame. Unpacked arrays are views of the frame's memory,
    which the next received frame overwrites.

    Args:
        layout: Layout of observations; None if they are objects, which Ray always transfers.
        action_layout: Layout of actions; None if they are objects, which Ray always transfers.
    """

    def __init__(self, layout: ArrayLayout | None, action_layout: ArrayLayout | None) -> None:
        self._layout = layout
        self._action_layout = action_layout
        leaves = () if layout is None else layout.leaves
        self._fields: list[Field] = [(np.float64, ()), *leaves, (np.bool_, ()), (np.bool_, ())]
        self._answer = Frames(self._fields, _ANSWER.size)
        self._answers: dict[int, Answer] = {}
        self._steps: dict[bytes, Frames] = {}
        self._packed: dict[tuple[bytes, str, Autoreset, bool], tuple[memoryview, list[NDArray[Any]]]] = {}
        of_actions = () if action_layout is None else action_layout.leaves
        self._row_shape: tuple[Any, ...] = of_actions[0][1] if len(of_actions) == 1 else ("no array",)

    def pack_step(
        self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset, loose: bool
    ) -> tuple[bytes | memoryview, bool]:
        """Returns the frame that requests a step, and whether Ray must transfer the actions."""
        count = len(env_ids)
        if type(actions) is np.ndarray and actions.dtype in _PLAIN and actions.shape == (count, *self._row_shape):
            leaves, codes = [actions], actions.dtype.char  # fast path for most steps
        else:
            found = action_leaves(actions, self._action_layout, count)
            if found is None or len(found) > _MOST_ARRAYS:
                return self.pack_ids(Kind.STEP_KEPT, env_ids, loose, autoreset=autoreset), True
            leaves, codes = found, "".join([leaf.dtype.char for leaf in found])
        key = env_ids.tobytes(), codes, autoreset, loose
        frame, arrays = self._packed.get(key) or self._packed_step(key, env_ids)
        for array, leaf in zip(arrays, leaves, strict=True):
            array[...] = leaf
        return frame, False

    def _packed_step(
        self, key: tuple[bytes, str, Autoreset, bool], env_ids: NDArray[np.int64]
    ) -> tuple[memoryview, list[NDArray[Any]]]:
        """Returns a step frame without its actions, and the array views to copy the actions into."""
        if len(self._packed) >= _MOST_PACKED:  # limits the cache when subsets are random
            self._packed.clear()
        _, codes, autoreset, loose = key
        frames, count = self._frames_of(codes.encode(), {}), len(env_ids)
        ids, *arrays = frames.own(count)
        size = frames.size(count)
        _REQUEST.pack_into(frames.buffer, 0, size, Kind.STEP, autoreset, loose, len(codes), count, 0)
        frames.buffer[_REQUEST.size : _REQUEST.size + len(codes)] = codes.encode()
        ids[:] = env_ids
        packed = self._packed[key] = memoryview(frames.buffer)[:size], arrays
        return packed

    def _frames_of(self, codes: bytes, known: dict[bytes, Frames]) -> Frames:
        """Returns the memory for step frames whose actions have the dtypes `codes`."""
        if codes not in known:
            assert self._action_layout is not None
            if not set(codes) <= set(_PLAIN_CODES):
                raise ValueError(f"actions of the data types {codes!r}")
            fields = [(chr(code), shape) for code, (_, shape) in zip(codes, self._action_layout.leaves, strict=True)]
            known[codes] = Frames(fields, _REQUEST.size + -(-len(codes) // _CODES) * _CODES)
        return known[codes]

    def pack_reset(
        self, env_ids: NDArray[np.int64], seeds: Sequence[int | None], options: Mapping[str, Any] | None, loose: bool
    ) -> tuple[bytes, bool]:
        """Returns the frame that requests a reset, and whether Ray must transfer the seeds and options."""
        try:
            payload = plain_values.encode([list(seeds), options])
        except plain_values.NOT_PLAIN:
            payload = b""
        return self.pack_ids(Kind.RESET, env_ids, loose, payload), not payload

    @staticmethod
    def pack_ids(
        kind: Kind, env_ids: NDArray[np.int64], loose: bool, payload: bytes = b"", autoreset: int = 0
    ) -> bytes:
        """Returns the frame of a request that holds environment ids, and encoded values or nothing besides."""
        size = _REQUEST.size + env_ids.nbytes + len(payload)
        head = _REQUEST.pack(size, kind, autoreset, loose, 0, len(env_ids), len(payload))
        return b"".join([head, env_ids.tobytes(), payload])

    def unpack_request(self, frame: bytes | bytearray | memoryview) -> Request:
        """Reads a request; its arrays are views of `frame`, whose memory the next received frame overwrites.

        Raises:
            Exception: The frame is no request. Any type, because the frame may hold anything.
        """
        frame = memoryview(frame)
        _, kind, autoreset, loose, num_leaves, count, payload_bytes = _REQUEST.unpack_from(frame)
        if kind == Kind.STEP:
            assert self._action_layout is not None
            codes = bytes(frame[_REQUEST.size : _REQUEST.size + num_leaves])
            frames = self._frames_of(codes, self._steps)
            _check_size(frame, frames.size(count))
            ids, *leaves = frames.over(frame.obj, count)
            actions = self._action_layout.tree(leaves)
            return Request(Kind(kind), ids, Autoreset(autoreset), bool(loose), actions)
        at = _REQUEST.size + count * _ID_BYTES
        _check_size(frame, at + payload_bytes)
        env_ids = np.frombuffer(frame, np.int64, count, _REQUEST.size)
        seeds = options = None
        if payload_bytes:
            seeds, options = plain_values.decode(frame[at:])
            are_seeds = len(seeds) == count and all(type(seed) in (int, NoneType) for seed in seeds)
            if not are_seeds or type(options) not in (dict, NoneType):
                raise ValueError(f"no seeds and options for {count} environments")
        return Request(Kind(kind), env_ids, Autoreset(autoreset), bool(loose), None, seeds, options)

    def pack_answer(self, batch: StepBatch) -> tuple[bytes | memoryview, bool]:
        """Returns the answer frame of a batch, and whether Ray must transfer the batch."""
        if self._layout is None:
            return self.pack_kept(batch.env_ids), True
        form, extra = _Form.PLAIN, b""
        if batch.info:
            try:
                form, extra = _Form.INFOS, plain_values.encode([list(info) for info in batch.info])
            except plain_values.NOT_PLAIN:
                return self.pack_kept(batch.env_ids), True
        frames, count = self._answer, len(batch.env_ids)
        ids, rew, *leaves, terminated, truncated = frames.own(count, len(extra))
        size = frames.size(count)
        _ANSWER.pack_into(frames.buffer, 0, size + len(extra), form, count, len(extra))
        ids[:] = batch.env_ids
        rew[:] = batch.rew
        for array, leaf in zip(leaves, tree_leaves(batch.obs), strict=True):
            array[...] = leaf
        terminated[:] = batch.terminated
        truncated[:] = batch.truncated
        frames.buffer[size : size + len(extra)] = extra
        return memoryview(frames.buffer)[: size + len(extra)], False

    @staticmethod
    def pack_kept(env_ids: NDArray[np.int64]) -> bytes:
        """Returns the frame which marks that the driver must fetch the answer, or an exception, through Ray."""
        return _ANSWER.pack(_ANSWER.size + env_ids.nbytes, _Form.KEPT, len(env_ids), 0) + env_ids.tobytes()

    def unpack_answer(self, frame: bytes | bytearray | memoryview, first_id: int = 0) -> Answer:
        """Reads an answer; its arrays are views of `frame`, whose memory the next received frame overwrites.

        Args:
            frame: The frame.
            first_id: Global index of the node's first environment.

        Raises:
            Exception: The frame is no answer. Any type, because the frame may hold anything.
        """
        frame = memoryview(frame)
        _, form, count, extra_bytes = _ANSWER.unpack_from(frame)
        if form == _Form.KEPT:
            _check_size(frame, _ANSWER.size + count * _ID_BYTES)
            return Answer(np.frombuffer(frame, np.int64, count, _ANSWER.size).copy(), None)
        at = self._answer.size(count)
        _check_size(frame, at + extra_bytes)
        ids, rew, *leaves, terminated, truncated = self._answer.over(frame.obj, count)
        answer = self._answers.get(count)
        if answer is None or answer.env_ids is not ids:  # the frame is in another buffer
            assert self._layout is not None
            batch = StepBatch(ids, self._layout.tree(leaves), rew, terminated, truncated)
            answer = self._answers[count] = Answer(ids, batch)
        if form == _Form.PLAIN:
            return answer
        if form != _Form.INFOS:
            raise ValueError(f"an answer of the form {form}")
        assert answer.batch is not None
        fields_of = plain_values.decode(frame[at:])
        infos: tuple[Any, ...]
        if fields_of and len(fields_of[0]) == len(SubBatchInfo._fields):
            infos = tuple(SubBatchInfo(*fields) for fields in fields_of)
            _check_columns(infos, first_id + answer.env_ids)
        else:
            infos = tuple(RawInfo(*fields) for fields in fields_of)
            _check_infos(infos, set((first_id + answer.env_ids).tolist()))
        return Answer(answer.env_ids, replace(answer.batch, info=infos))


def _check_infos(infos: Sequence[RawInfo], env_ids: set[int]) -> None:
    """Raises an error if infos belong to other environments, or hold no dicts.

    A last observation is whatever the environment returned, which need not be of its space.
    """
    for env_id, info, _, final_info in infos:
        if env_id not in env_ids or type(info) is not dict or type(final_info) not in (dict, NoneType):
            raise ValueError(f"no infos of an environment: {env_id!r}"[:200])


def _check_columns(infos: Sequence[SubBatchInfo], env_ids: NDArray[np.int64]) -> None:
    """Raises an error if infos of native sub-batches belong to other environments, or hold no dicts."""
    for env_id, num_envs, columns in infos:
        if type(env_id) is not int or type(num_envs) is not int or type(columns) is not dict or num_envs < 1:
            raise ValueError(f"no infos of a native sub-batch: {env_id!r}"[:200])
        if not np.any((env_ids >= env_id) & (env_ids < env_id + num_envs)):
            raise ValueError(f"infos of the environments {env_id} to {env_id + num_envs - 1}, which have not answered")
