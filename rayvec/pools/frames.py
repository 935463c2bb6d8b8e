"""The frames of a stream: one that asks for steps or resets, and those that answer it.

A frame is raw array bytes in a layout that both sides know from the spaces, behind a small fixed header.
Nothing in it is pickled. What has no plain form stays where it is, and the other side fetches it by Ray; a
frame only says so.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.pools import codec
from rayvec.pools.base import Autoreset
from rayvec.pools.memory import ArrayLayout
from rayvec.pools.wire import travels
from rayvec.types import RawInfo, StepBatch, Tree, tree_leaves

__all__ = ["Answer", "FrameFormat", "Kind", "Request"]

_REQUEST = struct.Struct("<BBBBII")
_ANSWER = struct.Struct("<BII")


class Kind(IntEnum):
    """What a request asks for."""

    STEP = 0
    RESET = 1
    READY = 2
    LOOK = 3


class _Form(IntEnum):
    PLAIN = 0
    INFOS = 1
    KEPT = 2


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the node reads it.

    Attributes:
        kind: What to do.
        env_ids: With which environments, ``int64 [k]``, by the node's ids.
        autoreset: Of a step.
        loose: Whether each environment may be answered as soon as it is done; else all at once.
        actions: Of a step; None where they are kept for it by Ray.
        seeds: Of a reset; None, with its options, where they are kept for it by Ray.
        options: Of a reset.
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
        env_ids: Whose, ``int64 [k]``.
        batch: The answers; None where the node keeps them, or what an environment raised, for Ray to fetch.
    """

    env_ids: NDArray[np.int64]
    batch: StepBatch | None


class FrameFormat:
    """Packs and unpacks frames for one pair of layouts.

    Args:
        layout: Of observations; None where they are objects, which are always kept.
        action_layout: Of actions, likewise.
    """

    def __init__(self, layout: ArrayLayout | None, action_layout: ArrayLayout | None) -> None:
        self._layout = layout
        self._action_layout = action_layout
        fields = [] if layout is None else [*layout.leaves, (np.float64, ()), (np.bool_, ()), (np.bool_, ())]
        self._answer_fields = [
            (np.dtype(dtype), shape, math.prod(shape), np.dtype(dtype).itemsize * math.prod(shape))
            for dtype, shape in fields
        ]

    def pack_step(
        self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset, loose: bool
    ) -> tuple[bytes, bool]:
        """Returns the frame that asks for a step, and whether the actions must be kept by Ray."""
        leaves = self._action_leaves(actions, len(env_ids))
        codes = bytes(ord(leaf.dtype.char) for leaf in leaves or ())
        head = _REQUEST.pack(Kind.STEP, autoreset, loose, len(codes), len(env_ids), 0)
        arrays = [leaf.tobytes() for leaf in leaves or ()]
        return b"".join([head, codes, env_ids.tobytes(), *arrays]), leaves is None

    def pack_reset(
        self, env_ids: NDArray[np.int64], seeds: Sequence[int | None], options: Mapping[str, Any] | None, loose: bool
    ) -> tuple[bytes, bool]:
        """Returns the frame that asks for a reset, and whether seeds and options must be kept by Ray."""
        try:
            payload = codec.encode([list(seeds), options])
        except codec.NOT_PLAIN:
            payload = b""
        head = _REQUEST.pack(Kind.RESET, 0, loose, 0, len(env_ids), len(payload))
        return b"".join([head, env_ids.tobytes(), payload]), not payload

    @staticmethod
    def pack_ready(env_ids: NDArray[np.int64], begin: bool, loose: bool) -> bytes:
        """Returns the frame that asks for current observations, after resets where `begin` asks for them."""
        kind = Kind.READY if begin else Kind.LOOK
        return _REQUEST.pack(kind, 0, loose, 0, len(env_ids), 0) + env_ids.tobytes()

    def unpack_request(self, frame: bytes | bytearray) -> Request:
        """Reads a request."""
        kind, autoreset, loose, num_leaves, count, payload_bytes = _REQUEST.unpack_from(frame)
        codes = frame[_REQUEST.size : _REQUEST.size + num_leaves]
        at = _REQUEST.size + num_leaves
        env_ids = np.frombuffer(frame, np.int64, count, at)
        at += env_ids.nbytes
        base = Request(Kind(kind), env_ids, Autoreset(autoreset), bool(loose))
        if payload_bytes:
            seeds, options = codec.decode(memoryview(frame)[at : at + payload_bytes])
            return Request(base.kind, env_ids, base.autoreset, base.loose, None, seeds, options)
        if not num_leaves:
            return base
        assert self._action_layout is not None
        leaves = []
        for code, (_, shape) in zip(codes, self._action_layout.leaves, strict=True):
            leaf = np.frombuffer(frame, np.dtype(chr(code)), count * math.prod(shape), at)
            at += leaf.nbytes
            leaves.append(leaf.reshape(count, *shape))
        return Request(base.kind, env_ids, base.autoreset, base.loose, self._action_layout.tree(leaves))

    def pack_answer(self, batch: StepBatch) -> tuple[bytes, bool]:
        """Returns the frame that answers for some environments, and whether the batch must be kept for Ray."""
        if self._layout is None:
            return self.pack_kept(batch.env_ids), True
        form, extra = _Form.PLAIN, b""
        if batch.info:
            try:
                form, extra = _Form.INFOS, codec.encode([list(info) for info in batch.info])
            except codec.NOT_PLAIN:
                return self.pack_kept(batch.env_ids), True
        head = _ANSWER.pack(form, len(batch.env_ids), len(extra))
        arrays = [*tree_leaves(batch.obs), batch.rew, batch.terminated, batch.truncated]
        return b"".join([head, batch.env_ids.tobytes(), *(array.tobytes() for array in arrays), extra]), False

    @staticmethod
    def pack_kept(env_ids: NDArray[np.int64]) -> bytes:
        """Returns the frame that says that the answer is kept, or what an environment raised."""
        return _ANSWER.pack(_Form.KEPT, len(env_ids), 0) + env_ids.tobytes()

    def unpack_answer(self, frame: bytearray) -> Answer:
        """Reads an answer; its arrays are views of `frame`."""
        form, count, extra_bytes = _ANSWER.unpack_from(frame)
        env_ids = np.frombuffer(frame, np.int64, count, _ANSWER.size)
        if form == _Form.KEPT:
            return Answer(env_ids, None)
        assert self._layout is not None
        at = _ANSWER.size + env_ids.nbytes
        arrays = []
        for dtype, shape, items, item_bytes in self._answer_fields:
            array = np.frombuffer(frame, dtype, count * items, at)
            arrays.append(array.reshape(count, *shape) if shape else array)
            at += count * item_bytes
        *leaves, rew, terminated, truncated = arrays
        infos: tuple[RawInfo, ...] = ()
        if form == _Form.INFOS:
            infos = tuple(RawInfo(*fields) for fields in codec.decode(memoryview(frame)[at : at + extra_bytes]))
        return Answer(env_ids, StepBatch(env_ids, self._layout.tree(leaves), rew, terminated, truncated, infos))

    def _action_leaves(self, actions: Tree, count: int) -> list[NDArray[Any]] | None:
        """Returns the arrays of `actions`, or None if they don't fit into a frame."""
        if self._action_layout is None or isinstance(actions, list):
            return None
        if type(actions) is np.ndarray and len(self._action_layout.leaves) == 1:
            fits = len(actions) == count and travels(actions, self._action_layout.leaves[0][1])
            return [actions] if fits else None
        leaves = [np.asarray(leaf) for leaf in self._action_layout.flatten(actions)]
        fit = all(map(travels, leaves, [shape for _, shape in self._action_layout.leaves]))
        return leaves if fit and all(len(leaf) == count for leaf in leaves) else None
