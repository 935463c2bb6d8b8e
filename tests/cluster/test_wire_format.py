"""Frames carry steps, resets and their answers to the last bit, for any layout."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from helpers.examples import examples
from helpers.kinds import ALL_SPACES, ARRAY_SPACES, OBJECT_SPACES, sample_actions
from helpers.testing import assert_identical
from hypothesis import given, strategies as st

from rayvec.cluster.wire_format import FrameFormat, Kind
from rayvec.data import RawInfo, StepBatch, tree_leaves, tree_map
from rayvec.data.layouts import ArrayLayout
from rayvec.pools.base import Autoreset


def frame_format(observation: str, action: str) -> FrameFormat:
    return FrameFormat(ArrayLayout.of(ALL_SPACES[observation]), ArrayLayout.of(ALL_SPACES[action]), b"key")


@pytest.mark.parametrize("mode", list(Autoreset))
@pytest.mark.parametrize("kind", ARRAY_SPACES)
@pytest.mark.parametrize("loose", [True, False])
def test_a_step_arrives_as_it_was_sent(kind: str, mode: Autoreset, loose: bool) -> None:
    frames = frame_format("box32", kind)
    env_ids = np.array([4, 0, 7])
    actions = sample_actions(ALL_SPACES[kind], 3, seed=1)
    request = frames.unpack_request(frames.pack_step(env_ids, actions, mode, loose))
    assert (request.kind, request.autoreset, request.loose) == (Kind.STEP, mode, loose)
    assert_identical(request.env_ids, env_ids)
    assert_identical(request.actions, actions)


@examples(50)
@given(dtype=st.sampled_from("?bBhHiIlLqQefd"), count=st.integers(1, 5))
def test_actions_keep_the_data_type_of_the_caller(dtype: str, count: int) -> None:
    frames = frame_format("box32", "box64")
    actions = np.arange(4 * count).reshape(count, 2, 2).astype(dtype)
    frame = frames.pack_step(np.arange(count), actions, Autoreset.SAME_STEP, False)
    assert_identical(frames.unpack_request(frame).actions, actions)


@pytest.mark.parametrize("kind", OBJECT_SPACES)
def test_actions_that_are_no_arrays_are_pickled(kind: str) -> None:
    frames, actions = frame_format("box32", kind), sample_actions(ALL_SPACES[kind], 2, 0)
    request = frames.unpack_request(frames.pack_step(np.arange(2), actions, Autoreset.DISABLED, False))
    assert (request.kind, request.autoreset, request.actions) == (Kind.STEP_OBJECTS, Autoreset.DISABLED, None)
    assert_identical(pickle.loads(request.rest), actions if isinstance(actions, tuple) else list(actions))


def test_actions_of_a_strange_data_type_or_of_many_arrays_are_pickled() -> None:
    frames = frame_format("box32", "box64")
    for dtype in ("g", "F", "O", ">f8"):
        actions = np.ones((2, 2, 2), dtype)
        request = frames.unpack_request(frames.pack_step(np.arange(2), actions, Autoreset.DISABLED, False))
        assert_identical(pickle.loads(request.rest), list(actions))
    space = spaces.Dict({f"{number}": spaces.Box(-1, 1, (2,), np.float32) for number in range(256)})
    frames = FrameFormat(ArrayLayout.of(ALL_SPACES["box32"]), ArrayLayout.of(space), b"key")
    frame = frames.pack_step(np.arange(3), sample_actions(space, 3, seed=1), Autoreset.SAME_STEP, False)
    assert frames.unpack_request(frame).kind == Kind.STEP_OBJECTS


def test_nothing_is_unpickled_whose_proof_does_not_hold() -> None:
    frames = frame_format("box32", "box64")
    request = frames.pack_ids(Kind.RESET, np.array([2, 1]), True, pickle.dumps(([5, None], {"level": 3})))
    assert pickle.loads(frames.unpack_request(request).rest) == ([5, None], {"level": 3})
    answer = frames.pack_object(np.array([3]), "anything")
    assert pickle.loads(frames.unpack_answer(bytearray(answer)).rest) == "anything"
    stranger = FrameFormat(None, None, b"another key")
    for frame, unpack, of_stranger in (
        (request, frames.unpack_request, stranger.unpack_request),
        (answer, frames.unpack_answer, stranger.unpack_answer),
    ):
        tampered = frame[:-1] + bytes([frame[-1] ^ 1])
        for read, data in ((unpack, tampered), (of_stranger, frame)):
            with pytest.raises(ValueError, match="HMAC"):
                read(bytearray(data))


@pytest.mark.parametrize("kind", ARRAY_SPACES)
@pytest.mark.parametrize("infos", [True, False])
def test_an_answer_arrives_as_it_was_sent_in_memory_of_its_own(kind: str, infos: bool) -> None:
    frames = frame_format(kind, "discrete")
    space = batch_space(ALL_SPACES[kind], 3)
    space.seed(0)
    obs = tree_map(np.asarray, space.sample())
    final = tree_map(lambda leaf: leaf[0], obs)
    odd = {"debug": 1, "last": final}  # an environment may return what is not of its space
    info = (
        RawInfo(0, {"a": 1.5}, final, {"b": (1,)}),
        RawInfo(9, {"c": np.arange(3)}),
        RawInfo(3, {}, odd, {}),
    )[: 3 if infos else 0]
    batch = StepBatch(
        np.array([0, 9, 3]),
        obs,
        np.array([1.0, np.nan, -0.0]),
        np.array([True, False, True]),
        np.array([False, False, True]),
        info,
    )
    answer = frames.unpack_answer(bytearray(frames.pack_answer(batch)))
    assert answer.batch is not None
    for name in set(batch.__slots__) - {"info"}:
        assert_identical(getattr(answer.batch, name), getattr(batch, name), name)
    assert_identical(pickle.loads(answer.rest) if infos else (), batch.info)
    assert all(leaf.flags.writeable for leaf in tree_leaves(answer.batch.obs))


@examples(200)
@given(garbage=st.binary(max_size=80))
def test_garbage_is_an_error_never_more(garbage: bytes) -> None:
    """It would have to come from a peer that holds the key; still it must not do anything."""
    frames = frame_format("box32", "box64")
    for unpack in (frames.unpack_request, frames.unpack_answer):
        try:
            unpack(garbage)
        except Exception as error:
            assert not isinstance(error, (MemoryError, SystemError))
