"""Bulk insertion of chunks against Tianshou's own ``add`` of the same steps, one after another."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.examples import examples
from helpers.tianshou_buffers import assert_same_buffer, assert_same_rows
from hypothesis import given, strategies as st
from tianshou.data import (
    Batch,
    CachedReplayBuffer,
    HERVectorReplayBuffer,
    PrioritizedReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    VectorReplayBuffer,
)

from rayvec.data import Chunk, ChunkInfo, ChunkInfos, tree_map
from rayvec.tianshou.collect.buffers import add_chunk as insert

SHAPES: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Any]] = {
    "flat": lambda rng, lead: rng.normal(size=(*lead, 3)).astype(np.float32),
    "frames": lambda rng, lead: rng.integers(0, 255, (*lead, 2, 2, 3), dtype=np.uint8),
    "dict": lambda rng, lead: {
        "observation": rng.normal(size=(*lead, 2)),
        "achieved_goal": rng.normal(size=(*lead, 2)),
        "desired_goal": rng.normal(size=(*lead, 2)),
    },
    "number": lambda rng, lead: rng.integers(0, 9, lead),
}
INFOS: dict[str, Callable[[np.random.Generator], dict[str, Any]]] = {
    "none": lambda rng: {},
    "dense": lambda rng: {"x": float(rng.normal()), "vector": rng.normal(size=2), "on": bool(rng.random() < 0.5)},
    "sparse": lambda rng: {"x": int(rng.integers(9))} if rng.random() < 0.1 else {},
    "nested": lambda rng: {"episode": {"r": np.float32(rng.normal()), "l": 3}} if rng.random() < 0.3 else {"lives": 2},
    "ids": lambda rng: {"env_id": 7, "inner": {"env_id": float(rng.normal()), "l": 3}} if rng.random() < 0.7 else {},
    "text": lambda rng: {"word": "ab"[: int(rng.integers(1, 3))], "n": np.int16(3)} if rng.random() < 0.5 else {},
    "mixed": lambda rng: {"x": 1} if rng.random() < 0.5 else {"x": 1.5},
    "objects": lambda rng: {"list": [1, 2], "none": None, "any": frozenset({1})} if rng.random() < 0.5 else {},
}


def make_chunk(
    rng: np.random.Generator, steps: int, envs: int, kind: str, infos: str, end: float, invalid: float
) -> Chunk:
    valid = rng.random((steps, envs)) >= invalid
    terminated = (rng.random((steps, envs)) < end) & valid
    truncated = (rng.random((steps, envs)) < end / 2) & valid
    final_index = np.argwhere(terminated | truncated)
    said = [ChunkInfo(t, n, INFOS[infos](rng)) for t in range(steps) for n in range(envs)]
    make = SHAPES[kind]
    return Chunk(
        env_ids=np.arange(envs),
        obs=make(rng, (steps, envs)),
        act=rng.integers(0, 4, (steps, envs)),
        rew=rng.normal(size=(steps, envs)),
        terminated=terminated,
        truncated=truncated,
        valid=valid,
        last_obs=make(rng, (envs,)),
        final_index=final_index,
        final_obs=make(rng, (len(final_index),)),
        infos=ChunkInfos.of([each for each in said if each.info]),
    )


def add_chunk(buffer: Any, chunk: Chunk, policy: Batch | None = None) -> Any:
    return insert(buffer, chunk, list(chunk.infos), policy=policy)


def as_batch(tree: Any) -> Any:
    return Batch({key: as_batch(value) for key, value in tree.items()}) if isinstance(tree, dict) else tree


def add_in_order(buffer: ReplayBuffer, chunk: Chunk, policy: Batch | None = None) -> Any:
    """The reference: what Tianshou's Collector does with the answers of a vector environment.

    Returns returns and lengths of the episodes that ended.
    """
    following = chunk.next_obs()
    infos = {(item.t, item.n): item.info for item in chunk.infos}
    returns, lens = [np.zeros(0)], [np.zeros(0, int)]
    for t in range(chunk.num_steps):
        ids = np.flatnonzero(chunk.valid[t])
        if not len(ids):
            continue
        info = np.stack([np.array({**infos.get((t, n), {}), "env_id": n}, object) for n in ids.tolist()])
        batch = Batch(
            obs=as_batch(tree_map(lambda leaf: leaf[t][ids], chunk.obs)),  # noqa: B023
            act=chunk.act[t][ids],
            policy=Batch() if policy is None else policy[t][ids],
            obs_next=as_batch(tree_map(lambda leaf: leaf[t][ids], following)),  # noqa: B023
            rew=chunk.rew[t][ids],
            terminated=chunk.terminated[t][ids],
            truncated=chunk.truncated[t][ids],
            done=chunk.done[t][ids],
            info=info,
        )
        _, ep_return, ep_len, _ = buffer.add(batch, buffer_ids=ids)
        returns.append(ep_return[chunk.done[t][ids]])
        lens.append(ep_len[chunk.done[t][ids]])
    return np.concatenate(returns), np.concatenate(lens)


@st.composite
def plans(draw: st.DrawFn, kinds: tuple[str, ...] = ("flat", "dict", "number", "frames")) -> dict[str, Any]:
    envs = draw(st.integers(1, 5))
    kind = draw(st.sampled_from(kinds))
    return {
        "seed": draw(st.integers(0, 2**32)),
        "envs": envs,
        "room": draw(st.integers(1, 25)) * envs,
        "steps": draw(st.lists(st.integers(1, 20), min_size=1, max_size=4)),
        "end": draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        "invalid": draw(st.sampled_from([0.0, 0.0, 0.2])),
        "kind": kind,
        "infos": draw(st.lists(st.sampled_from(sorted(INFOS)), min_size=4, max_size=4)),
        "options": {
            "ignore_obs_next": draw(st.booleans()),
            "save_only_last_obs": kind == "frames" and draw(st.booleans()),
            "stack_num": draw(st.sampled_from([1, 1, 3])),
            "sample_avail": draw(st.booleans()),
        },
    }


BUFFERS: dict[str, Callable[[int, int, dict[str, Any]], Any]] = {
    "vector": lambda room, envs, options: VectorReplayBuffer(room, envs, **options),
    "prioritized": lambda room, envs, options: PrioritizedVectorReplayBuffer(room, envs, **PRIORITIES, **options),
    "cached": lambda room, envs, options: CachedReplayBuffer(ReplayBuffer(room, **options), envs, 8),
    "single": lambda room, envs, options: ReplayBuffer(room, **options),
    "single prioritized": lambda room, envs, options: PrioritizedReplayBuffer(room, **PRIORITIES, **options),
}
PRIORITIES: Any = {"alpha": 0.6, "beta": 0.4}


@pytest.mark.parametrize("kind", BUFFERS)
@examples(100)
@given(plan=plans())
def test_a_buffer_equals_add_step_by_step(plan: dict[str, Any], kind: str) -> None:
    def make() -> Any:
        return BUFFERS[kind](plan["room"], envs, plan["options"])

    envs = 1 if kind.startswith("single") else plan["envs"]
    got, expected = make(), make()
    rng = np.random.default_rng(plan["seed"])
    for steps, infos in zip(plan["steps"], plan["infos"], strict=False):
        chunk = make_chunk(rng, steps, envs, plan["kind"], infos, plan["end"], plan["invalid"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                ended = add_in_order(expected, chunk)
            except (ValueError, TypeError, RuntimeError) as error:  # infos that Tianshou can't hold beside those before
                with pytest.raises(type(error)):
                    add_chunk(got, chunk)
                return
            for mine, theirs in zip(add_chunk(got, chunk), ended, strict=True):
                np.testing.assert_array_equal(mine, theirs)
        assert_same_buffer(got, expected)
        for buffer in (got, expected) if hasattr(expected, "weight") and len(expected) else ():
            buffer.update_weight(np.zeros(1, int), np.array([1.7]))  # new rows have the largest weight


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_her_buffer_equals_add_step_by_step_and_restores_what_it_rewrote(seed: int, samples: bool) -> None:
    def make() -> Any:
        return HERVectorReplayBuffer(60, 3, compute_reward_fn=lambda a, g: -np.abs(a - g).sum(-1), horizon=5)

    got, expected = make(), make()
    rng = np.random.default_rng(seed)
    for _ in range(3):
        chunk = make_chunk(rng, 9, 3, "dict", "dense", 0.3, 0.0)
        add_in_order(expected, chunk)
        add_chunk(got, chunk)
        assert_same_rows(got, expected)
        for buffer in (got, expected) if samples else ():
            np.random.seed(1)
            buffer.sample(16)


@examples(15)
@given(plans(kinds=("flat",)))
def test_the_policys_entry_is_stored_with_its_tensors(plan: dict[str, Any]) -> None:
    got, expected = (VectorReplayBuffer(plan["room"], plan["envs"]) for _ in range(2))
    rng = np.random.default_rng(plan["seed"])
    for number, steps in enumerate(plan["steps"]):
        chunk = make_chunk(rng, steps, plan["envs"], "flat", "none", plan["end"], plan["invalid"])
        lead = (steps, plan["envs"])
        policy = Batch(hidden_state=Batch(h=torch.randn(*lead, 2)), value=rng.normal(size=lead)) if number else None
        add_in_order(expected, chunk, policy)
        add_chunk(got, chunk, policy=policy)
        assert_same_buffer(got, expected)


def bulk_and_in_order() -> list[Any]:
    """Buffers that get their chunks in bulk, and one that gets them step by step."""

    class Slow(VectorReplayBuffer):
        def add(self, *args: Any, **kwargs: Any) -> Any:
            return super().add(*args, **kwargs)

    return [VectorReplayBuffer(40, 2), Slow(40, 2), CachedReplayBuffer(ReplayBuffer(40), 2, 20)]


def lone_chunk(rng: np.random.Generator, steps: int, **changes: Any) -> Chunk:
    return replace(make_chunk(rng, steps, 2, "flat", "none", 0.0, 0.0), **changes)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_restart_truncates_the_transition_that_an_earlier_chunk_brought(place: int) -> None:
    buffer = bulk_and_in_order()[place]
    rng = np.random.default_rng(0)
    add_chunk(buffer, lone_chunk(rng, 4))
    valid = np.ones((3, 2), bool)
    valid[0, 1] = False
    returns, _ = add_chunk(buffer, lone_chunk(rng, 3, valid=valid, restarts=np.array([[0, 1]])))
    assert not len(returns)
    rows = buffer[:]
    cut = rows.info.env_id == 1
    assert rows.truncated[cut].tolist() == rows.done[cut].tolist() == [False] * 3 + [True] + [False] * 2
    assert not rows.done[~cut].any() and not rows.terminated.any()
    end = lone_chunk(rng, 1, terminated=np.ones((1, 2), bool))
    returns, lens = add_chunk(buffer, replace(end, final_index=np.argwhere(end.terminated), final_obs=end.last_obs))
    assert lens.tolist() == [8, 3] and returns[1] == pytest.approx(rows.rew[cut][-2:].sum() + end.rew[0, 1])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_episode_that_a_fault_has_cut_within_a_chunk_is_not_counted(place: int) -> None:
    buffer = bulk_and_in_order()[place]
    rng = np.random.default_rng(0)
    chunk = lone_chunk(rng, 6)
    chunk.valid[[3, 5], [0, 1]] = False
    chunk.truncated[2, 0] = chunk.truncated[4, 1] = True
    finals = np.stack([chunk.obs[3, 0], rng.normal(size=3).astype(np.float32)])
    places, restarts = np.array([[2, 0], [4, 1]]), np.array([[3, 0], [5, 1]])
    chunk = replace(chunk, restarts=restarts, cuts=places[:1])  # the second ended by itself
    _, lens = add_chunk(buffer, replace(chunk, final_index=places, final_obs=finals))
    assert lens.tolist() == [5]
    assert buffer[:].truncated.sum() == 2
    end = lone_chunk(rng, 1, terminated=np.ones((1, 2), bool))
    _, lens = add_chunk(buffer, replace(end, final_index=np.argwhere(end.terminated), final_obs=end.last_obs))
    assert lens.tolist() == [3, 1]


def test_a_part_of_observations_may_be_empty() -> None:
    chunk = lone_chunk(np.random.default_rng(0), 3)
    parts = [{"x": obs, "none": obs[..., :0]} for obs in (chunk.obs, chunk.last_obs, chunk.final_obs)]
    buffer = VectorReplayBuffer(10, 2)
    add_chunk(buffer, replace(chunk, obs=parts[0], last_obs=parts[1], final_obs=parts[2]))
    assert buffer[:].obs.none.shape == (6, 0)
    np.testing.assert_array_equal(buffer[:].obs.x, chunk.obs.swapaxes(0, 1).reshape(6, -1))
