"""Frames carry steps, resets and their answers to the last bit, for any layout."""

from __future__ import annotations

from typing import Any

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
from rayvec.pools.base import Autoreset
from rayvec.pools.shared_memory import ArrayLayout


def frame_format(observation: str, action: str) -> FrameFormat:
    return FrameFormat(ArrayLayout.of(ALL_SPACES[observation]), ArrayLayout.of(ALL_SPACES[action]))


@pytest.mark.parametrize("mode", list(Autoreset))
@pytest.mark.parametrize("kind", ARRAY_SPACES)
@pytest.mark.parametrize("loose", [True, False])
def test_a_step_arrives_as_it_was_sent(kind: str, mode: Autoreset, loose: bool) -> None:
    frames = frame_format("box32", kind)
    env_ids = np.array([4, 0, 7])
    actions = sample_actions(ALL_SPACES[kind], 3, seed=1)
    frame, by_ray = frames.pack_step(env_ids, actions, mode, loose)
    request = frames.unpack_request(frame)
    assert not by_ray
    assert (request.kind, request.autoreset, request.loose) == (Kind.STEP, mode, loose)
    assert_identical(request.env_ids, env_ids)
    assert_identical(request.actions, actions)


@examples(50)
@given(dtype=st.sampled_from("?bBhHiIlLqQefd"), count=st.integers(1, 5))
def test_actions_keep_the_data_type_of_the_caller(dtype: str, count: int) -> None:
    frames = frame_format("box32", "box64")
    actions = np.arange(4 * count).reshape(count, 2, 2).astype(dtype)
    frame, by_ray = frames.pack_step(np.arange(count), actions, Autoreset.SAME_STEP, False)
    assert not by_ray
    assert_identical(frames.unpack_request(frame).actions, actions)


@pytest.mark.parametrize("kind", OBJECT_SPACES)
def test_actions_that_are_no_arrays_are_kept_for_ray(kind: str) -> None:
    frames = frame_format("box32", kind)
    frame, by_ray = frames.pack_step(np.arange(2), sample_actions(ALL_SPACES[kind], 2, 0), Autoreset.DISABLED, False)
    request = frames.unpack_request(frame)
    assert by_ray and request.actions is None
    assert_identical(request.env_ids, np.arange(2))


def test_actions_of_a_strange_data_type_are_kept_for_ray() -> None:
    frames = frame_format("box32", "box64")
    for dtype in ("g", "F", "O", ">f8"):
        assert frames.pack_step(np.arange(2), np.ones((2, 2, 2), dtype), Autoreset.DISABLED, False)[1]


@pytest.mark.parametrize("options", [None, {}, {"level": 3, "mask": np.array([True])}])
def test_a_reset_arrives_as_it_was_sent(options: Any) -> None:
    frames = frame_format("box32", "box64")
    frame, by_ray = frames.pack_reset(np.array([2, 1]), [5, None], options, True)
    request = frames.unpack_request(frame)
    assert (by_ray, request.kind, list(request.seeds or ())) == (False, Kind.RESET, [5, None])
    assert_identical(request.options, options)


def test_a_reset_with_options_that_are_not_plain_is_kept_for_ray() -> None:
    frames = frame_format("box32", "box64")
    for options in ({"x": object()}, {"x": 2**80}, {"x": "\ud800"}):
        frame, by_ray = frames.pack_reset(np.array([0]), [1], options, False)
        assert by_ray and frames.unpack_request(frame).seeds is None


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
    frame, kept = frames.pack_answer(batch)
    answer = frames.unpack_answer(bytearray(frame))
    assert not kept and answer.batch is not None
    for name in batch.__slots__:
        assert_identical(getattr(answer.batch, name), getattr(batch, name), name)
    assert all(leaf.flags.writeable for leaf in tree_leaves(answer.batch.obs))


def test_an_answer_with_infos_that_are_not_plain_is_kept() -> None:
    frames = frame_format("discrete", "discrete")
    for value in (object(), 2**80, "\ud800", bytearray(1)):
        batch = StepBatch(
            np.array([3]),
            np.zeros(1, int),
            np.zeros(1),
            np.zeros(1, bool),
            np.zeros(1, bool),
            (RawInfo(3, {"x": value}),),
        )
        frame, kept = frames.pack_answer(batch)
        answer = frames.unpack_answer(bytearray(frame))
        assert kept and answer.batch is None
        assert_identical(answer.env_ids, np.array([3]))


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


def test_ray_transfers_actions_of_more_arrays_than_a_frame_counts() -> None:
    space = spaces.Dict({f"{number}": spaces.Box(-1, 1, (2,), np.float32) for number in range(256)})
    frames = FrameFormat(ArrayLayout.of(ALL_SPACES["box32"]), ArrayLayout.of(space))
    frame, by_ray = frames.pack_step(np.arange(3), sample_actions(space, 3, seed=1), Autoreset.SAME_STEP, False)
    assert by_ray and frames.unpack_request(frame).kind == Kind.STEP_KEPT
