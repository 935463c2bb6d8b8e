"""Chunks that stay in the object store: the driver learns their summaries, and whoever needs the rest fetches it."""

from __future__ import annotations

import pickle
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import ray
from conftest import MakeVec
from gymnasium import spaces
from helpers.chunks import assert_same_chunk
from helpers.exact import SpaceEnv, TablePolicy
from helpers.obedient_envs import WIDE, WideEnv, by_total
from helpers.testing import assert_identical
from helpers.waiting import wait_until
from ray.experimental import get_object_locations

from rayvec.collect.collector import Collector
from rayvec.data import Batch, Chunk, ChunkRef
from rayvec.data.join_chunks import join_chunks
from rayvec.distributed.learner_group import _fetch
from rayvec.errors import ConfigError
from rayvec.vector.ray_vec_env import RayVecEnv


@pytest.fixture
def wide(make_vec: MakeVec) -> RayVecEnv:
    return make_vec([WideEnv] * 6, nodes=2)


def fetched(batch: Batch) -> list[Chunk]:
    return [join_chunks(ray.get([part.ref for part in parts])) for parts in batch.chunk_refs]


def test_the_driver_never_fetches_what_it_does_not_need(wide: RayVecEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it gets is written down; and a part lies on its own node alone until somebody here asks for it."""
    asked: list[Any] = []
    get = ray.get

    def written_down(refs: Any, **kwargs: Any) -> Any:
        asked.extend(refs if isinstance(refs, list) else [refs])
        return get(refs, **kwargs)

    monkeypatch.setattr(ray, "get", written_down)
    batch = Collector(wide, by_total, seed=1, by_reference=True).collect(n_step=6 * 40)
    assert batch.chunks == ()
    ((here, there),) = batch.chunk_refs
    assert [part.env_ids.tolist() for part in (here, there)] == [[0, 1, 2], [3, 4, 5]]
    assert here.num_steps == there.num_steps == 40
    assert here.ref not in asked and there.ref not in asked

    nodes = [node.node_id for node in wide.topology.nodes]
    assert nodes[0] == ray.get_runtime_context().get_node_id() != nodes[1]
    wait_until(lambda: places(there) == [nodes[1]])
    assert size_of(ray.get(there.ref)) > 40 * 3 * WIDE * 8
    wait_until(lambda: sorted(places(there)) == sorted(nodes))


def test_a_store_that_is_full_is_explained(wide: RayVecEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own text has the bytes of a protocol buffer. A chunk is put there, and got from there."""

    @ray.remote(num_cpus=0)
    def chunk() -> None:
        raise ray.exceptions.OutOfDiskError("239c2f70", b"\n\x1c", "10.77.0.1")

    with pytest.raises(ConfigError, match=r"no room for a part of the batch. .*--object-store-memory"):
        _fetch(chunk.remote())

    def put(value: Any) -> None:
        raise ray.exceptions.ObjectStoreFullError

    collector = Collector(wide, by_total, seed=1, by_reference=True)
    monkeypatch.setattr(ray, "put", put)
    with pytest.raises(ConfigError, match=f"no room for the chunk of node {wide.topology.nodes[0].name}"):
        collector.collect(n_step=6)


def size_of(value: Any) -> int:
    return len(pickle.dumps(value))


def places(part: ChunkRef) -> list[str]:
    nodes: list[str] = get_object_locations([part.ref])[part.ref]["node_ids"]
    return nodes


def test_chunks_and_statistics_are_those_by_value(wide: RayVecEnv) -> None:
    by_value, by_reference = (
        Collector(wide, by_total, seed=1, prefetch=True, by_reference=by_reference) for by_reference in (False, True)
    )
    expected = [by_value.collect(n_step=6 * steps) for steps in (12, 30, 30)]
    by_value.close()
    batches = [by_reference.collect(n_step=6 * steps) for steps in (12, 30, 30)]
    assert sum(batch.stats.n_collected_episodes for batch in batches) > 10
    for batch, plain in zip(batches, expected, strict=True):
        for name in ("returns", "lens", "n_collected_steps", "n_collected_episodes", "weights_versions", "n_restarts"):
            assert_identical(getattr(batch.stats, name), getattr(plain.stats, name), name)
        for chunk, other in zip(fetched(batch), plain.chunks, strict=True):
            assert_same_chunk(chunk, other)
    by_reference.close()


def test_what_does_not_go_together(wide: RayVecEnv) -> None:
    for mistake in (
        partial(Collector, wide, TablePolicy(), "driver", by_reference=True),
        partial(Collector(wide, TablePolicy(), by_reference=True).collect, n_episode=3),
    ):
        with pytest.raises(ConfigError, match="by_reference"):
            mistake()


def serial_chunks(fns: list[Any], num_steps: list[int], seed: int) -> list[Chunk]:
    """What one process makes of the same."""
    with RayVecEnv(fns, num_nodes=0, workers_per_node=0) as env:
        return [env.rollout(TablePolicy(), n, seed=None if number else seed) for number, n in enumerate(num_steps)]


def test_chunks_stay_as_they_were(make_vec: MakeVec) -> None:
    fns = [partial(SpaceEnv, spaces.Box(0, 255, (40, 40), np.uint8))] * 3
    collector = Collector(make_vec(fns, nodes=2), TablePolicy(), seed=7, prefetch=True)
    chunks, copies = [], []
    for length in (20, 20, 60, 30, 1, 40):
        for chunk in collector.collect(n_step=3 * length).chunks:
            chunks.append(chunk)
            copies.append(deepcopy(chunk))
    collector.close()
    expected = serial_chunks(fns, [chunk.num_steps for chunk in chunks], 7)
    for chunk, copy, right in zip(chunks, copies, expected, strict=True):
        assert_same_chunk(copy, right)
        assert_same_chunk(chunk, right)
