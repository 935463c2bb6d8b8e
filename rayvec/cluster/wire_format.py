"""The frames of a stream: requests for steps or resets, and their answers.

A frame consists of its length, a small fixed header, environment ids, raw array bytes, and a pickled rest. Both sides
derive the layout of the arrays from the spaces. An HMAC of the run's key stands before the rest: a receiver unpickles
nothing whose HMAC does not hold.

Step frames are frequent and have the same layout. Both sides therefore cache array views of the frame memory for each
number of environments. Packing or unpacking a frame then costs one header and one copy for each array.
"""

from __future__ import annotations

import hmac
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import StepBatch, Tree, tree_leaves
from rayvec.data.layouts import ArrayLayout, Field
from rayvec.node.messages import dumps, packed
from rayvec.node.step_memory import action_leaves
from rayvec.pools.base import Autoreset

__all__ = ["Answer", "FrameFormat", "Frames", "Kind", "Request"]

_REQUEST = struct.Struct("<QBBBBIQ")
"""Frame length in bytes; kind, autoreset, loose, number of arrays; number of environments; bytes of the rest."""
_ANSWER = struct.Struct("<QIIQ")
"""Frame length in bytes; whether there are arrays; number of environments; bytes of the rest."""
_PLAIN_CODES = b"?bBhHiIlLqQefd"
_PLAIN = {np.dtype(chr(code)) for code in _PLAIN_CODES}
_ID_BYTES = 8
_PROOF_BYTES = 32
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
    STEP_OBJECTS = 4
    """A step whose actions are pickled."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the node reads it.

    Attributes:
        kind: The requested operation.
        env_ids: The node's ids of the environments, ``int64 [k]``.
        autoreset: Autoreset mode of a step.
        loose: Whether the node answers for each environment as soon as it has finished; else for all together.
        actions: Actions of a step; None if they are pickled.
        rest: Pickled actions, or seeds and options of a reset.
    """

    kind: Kind
    env_ids: NDArray[np.int64]
    autoreset: Autoreset
    loose: bool
    actions: Tree | None = None
    rest: bytes | memoryview = b""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as the driver reads it.

    Attributes:
        env_ids: The node's ids of the environments, ``int64 [k]``.
        batch: The answers without infos; None if they are pickled as a whole, or an exception is.
        rest: The pickled infos, answers or :class:`~rayvec.errors.RemoteFailure`, or nothing.
    """

    env_ids: NDArray[np.int64]
    batch: StepBatch | None
    rest: bytes | memoryview = b""


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
        layout: Layout of observations; None if they are objects, which are pickled.
        action_layout: Layout of actions; None if they are objects, which are pickled.
        key: Key of the run.
    """

    def __init__(self, layout: ArrayLayout | None, action_layout: ArrayLayout | None, key: bytes) -> None:
        self._key = key
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
    ) -> bytes | memoryview:
        """Returns the frame that requests a step."""
        count = len(env_ids)
        if type(actions) is np.ndarray and actions.dtype in _PLAIN and actions.shape == (count, *self._row_shape):
            leaves, codes = [actions], actions.dtype.char  # fast path for most steps
        else:
            found = action_leaves(actions, self._action_layout, count)
            if found is None or len(found) > _MOST_ARRAYS:
                objects = actions if isinstance(actions, (dict, tuple)) else list(actions)
                return self.pack_ids(Kind.STEP_OBJECTS, env_ids, loose, packed(objects), autoreset)
            leaves, codes = found, "".join([leaf.dtype.char for leaf in found])
        key = env_ids.tobytes(), codes, autoreset, loose
        frame, arrays = self._packed.get(key) or self._packed_step(key, env_ids)
        for array, leaf in zip(arrays, leaves, strict=True):
            array[...] = leaf
        return frame

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

    def pack_ids(
        self, kind: Kind, env_ids: NDArray[np.int64], loose: bool, rest: bytes = b"", autoreset: int = 0
    ) -> bytes:
        """Returns the frame of a request that holds environment ids, and a pickled rest or nothing besides."""
        rest = self._proven(rest)
        size = _REQUEST.size + env_ids.nbytes + len(rest)
        head = _REQUEST.pack(size, kind, autoreset, loose, 0, len(env_ids), len(rest))
        return b"".join([head, env_ids.tobytes(), rest])

    def _proven(self, rest: bytes) -> bytes:
        """Returns a pickled rest behind its HMAC; nothing for nothing."""
        return hmac.digest(self._key, rest, "sha256") + rest if rest else b""

    def _checked(self, rest: memoryview) -> memoryview:
        """Returns a pickled rest without its HMAC.

        Raises:
            ValueError: The HMAC does not hold.
        """
        proof, rest = rest[:_PROOF_BYTES], rest[_PROOF_BYTES:]
        if not hmac.compare_digest(proof, hmac.digest(self._key, rest, "sha256")):
            raise ValueError("a pickled value without the HMAC of this run's key")
        return rest

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
        rest = self._checked(frame[at:]) if payload_bytes else b""
        return Request(Kind(kind), env_ids, Autoreset(autoreset), bool(loose), rest=rest)

    def pack_answer(self, batch: StepBatch) -> bytes | memoryview:
        """Returns the answer frame of a batch."""
        if self._layout is None:
            return self.pack_object(batch.env_ids, batch)
        extra = self._proven(dumps(batch.info)) if batch.info else b""
        frames, count = self._answer, len(batch.env_ids)
        ids, rew, *leaves, terminated, truncated = frames.own(count, len(extra))
        size = frames.size(count)
        _ANSWER.pack_into(frames.buffer, 0, size + len(extra), True, count, len(extra))
        ids[:] = batch.env_ids
        rew[:] = batch.rew
        for array, leaf in zip(leaves, tree_leaves(batch.obs), strict=True):
            array[...] = leaf
        terminated[:] = batch.terminated
        truncated[:] = batch.truncated
        frames.buffer[size : size + len(extra)] = extra
        return memoryview(frames.buffer)[: size + len(extra)]

    def pack_object(self, env_ids: NDArray[np.int64], value: Any) -> bytes:
        """Returns the answer frame that holds a pickled batch, or a failure."""
        rest = self._proven(dumps(value))
        head = _ANSWER.pack(_ANSWER.size + env_ids.nbytes + len(rest), False, len(env_ids), len(rest))
        return b"".join([head, env_ids.tobytes(), rest])

    def unpack_answer(self, frame: bytes | bytearray | memoryview) -> Answer:
        """Reads an answer; its arrays are views of `frame`, whose memory the next received frame overwrites.

        Raises:
            Exception: The frame is no answer. Any type, because the frame may hold anything.
        """
        frame = memoryview(frame)
        _, has_arrays, count, rest_bytes = _ANSWER.unpack_from(frame)
        at = self._answer.size(count) if has_arrays else _ANSWER.size + count * _ID_BYTES
        _check_size(frame, at + rest_bytes)
        if not has_arrays:
            ids = np.frombuffer(frame, np.int64, count, _ANSWER.size).copy()
            return Answer(ids, None, self._checked(frame[at:]))
        ids, rew, *leaves, terminated, truncated = self._answer.over(frame.obj, count)
        answer = self._answers.get(count)
        if answer is None or answer.env_ids is not ids:  # the frame is in another buffer
            assert self._layout is not None
            batch = StepBatch(ids, self._layout.tree(leaves), rew, terminated, truncated)
            answer = self._answers[count] = Answer(ids, batch)
        return Answer(ids, answer.batch, self._checked(frame[at:])) if rest_bytes else answer
