"""ProcessPool against SerialPool; and what becomes of workers that are killed, hang, or were told to end."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from helpers.exact import DriftEnv, SpaceEnv, TablePolicy
from helpers.examples import examples
from helpers.kinds import (
    ALL_SPACES,
    ARRAY_SPACES,
    MODES,
    answer,
    assert_same_batch,
    env_fns,
    factory,
    pools_in_lockstep,
    sample_actions,
    within,
)
from helpers.obedient_envs import GatedEnv
from helpers.odd_envs import (
    DiesLate,
    Echo,
    HasChild,
    Heir,
    KeepsActions,
    LargeInfo,
    OwnError,
    Parent,
    Returns,
    SlowCall,
    Unloadable,
    Unpicklable,
    WritesWhenClosed,
)
from helpers.testing import CountingEnv, FaultyEnv, TimedEnv, assert_identical, counting_errors
from helpers.waiting import alive, shm_names, wait_until
from hypothesis import given, strategies as st

from rayvec.data import Chunk, ChunkRequest
from rayvec.data.partition import even_bounds
from rayvec.envs.factory import EnvFactory
from rayvec.errors import EnvError, WorkerLostError
from rayvec.node.process_pool import ProcessPool
from rayvec.node.process_watch import ProcessWatch
from rayvec.node.step_memory import BlockShape, NodeBlock
from rayvec.pools.base import Autoreset, RestartPolicy
from rayvec.pools.step_and_autoreset import SerialPool
from rayvec.rollout.loop import rollout

DEADLINE_S = 20.0


def process_pool(fns: list[Callable[[], Any]], workers: int = 1) -> ProcessPool:
    return ProcessPool.start(factory(fns), workers)


def taken(pool: ProcessPool, key: int, *request: int) -> Chunk:
    """What a rollout of all workers makes together, in memory of its own."""
    pool.begin_rollout(key, ChunkRequest(*request))
    chunk = pool.finish_rollout().chunk
    assert chunk is not None
    return chunk


def pids_of(pool: ProcessPool) -> list[int]:
    """Process ids of the workers."""
    return next(iter(pool.worker_pids().values()))[1:]


@pytest.mark.parametrize(("num_envs", "parts"), [(1, 1), (7, 3), (4, 4), (10, 4)])
def test_slices_are_in_order_and_differ_by_one_at_most(num_envs: int, parts: int) -> None:
    bounds = even_bounds(num_envs, parts, first=5)
    sizes = np.diff(bounds)
    assert (bounds[0], bounds[-1]) == (5, 5 + num_envs)
    assert sizes.max() - sizes.min() <= 1 and sizes.min() >= 1


class TestEquivalence:
    @pytest.mark.parametrize(
        ("kind", "mode"),
        [
            pytest.param(kind, mode, marks=() if number == index % 3 else pytest.mark.slow)
            for index, kind in enumerate(ALL_SPACES)
            for number, mode in enumerate(Autoreset)
        ],
    )
    def test_equals_the_serial_pool_for_every_space(self, kind: str, mode: Autoreset) -> None:
        space = ALL_SPACES[kind]
        fns = env_fns(3, space, space)
        with closing(SerialPool(factory(fns))) as serial, closing(process_pool(fns, 2)) as processes:
            assert processes.spaces.observation == space and processes.spaces.action == space
            pools_in_lockstep(processes, serial, space, mode, num_steps=8)

    def test_modes_of_ours_are_gymnasiums(self) -> None:
        assert {mode.name for mode in Autoreset} == {mode.name for mode in MODES}

    @examples(20)
    @given(data=st.data())
    def test_any_subsets_in_any_order_equal_the_serial_pool(self, data: st.DataObject) -> None:
        num_envs = data.draw(st.integers(1, 6), "num_envs")
        workers = data.draw(st.integers(1, num_envs), "workers")
        space = ALL_SPACES[data.draw(st.sampled_from(["dict", "custom", "text"]), "space")]
        mode = data.draw(st.sampled_from([Autoreset.NEXT_STEP, Autoreset.SAME_STEP]), "mode")
        fns = env_fns(num_envs, space, space)
        with closing(SerialPool(factory(fns))) as serial, closing(process_pool(fns, workers)) as processes:
            pools = (serial, processes)
            everyone = np.arange(num_envs)
            for pool in pools:
                pool.reset(everyone, list(range(num_envs)))
            assert_same_batch(answer(processes, everyone), answer(serial, everyone))
            under_way: list[np.ndarray] = []
            for number in range(data.draw(st.integers(1, 12), "operations")):
                idle = sorted(set(range(num_envs)) - {i for ids in under_way for i in ids.tolist()})
                if idle and (not under_way or data.draw(st.booleans(), "send")):
                    chosen = data.draw(st.lists(st.sampled_from(idle), min_size=1, unique=True), "ids")
                    ids = np.array(chosen, np.int64)
                    kind = data.draw(st.sampled_from(["send", "send", "send", "reset", "ready"]), "kind")
                    for pool in pools:
                        if kind == "send":
                            pool.send(ids, sample_actions(space, len(ids), number), mode)
                        elif kind == "reset":
                            pool.reset(ids, [None] * len(ids), {"n": number})
                        else:
                            pool.begin_episodes(ids)
                    under_way.append(ids)
                else:
                    ids = under_way.pop(data.draw(st.integers(0, len(under_way) - 1), "which"))
                    assert_same_batch(answer(processes, ids), answer(serial, ids))
            if under_way:
                assert_same_batch(answer(processes, None), answer(serial, None))

    @examples(20)
    @given(dtype=st.sampled_from("?bBhHiIlLqQefdgFDO"), kind=st.sampled_from(["box64", "discrete", "multidiscrete_2d"]))
    def test_actions_arrive_in_the_data_type_they_were_given_in(self, dtype: str, kind: str) -> None:
        space = ARRAY_SPACES[kind]
        fns = env_fns(2, spaces.Discrete(2), space)
        actions = np.ones((2, *space.shape), dtype)
        with closing(SerialPool(factory(fns))) as serial, closing(process_pool(fns)) as processes:
            ids = np.arange(2)
            for pool in (serial, processes):
                pool.reset(ids, [0, 1])
                pool.recv(ids)
                pool.send(ids, actions, Autoreset.SAME_STEP)
            assert_same_batch(answer(processes, ids), answer(serial, ids))

    def test_actions_that_are_no_contiguous_arrays(self) -> None:
        space = ARRAY_SPACES["box64"]
        fns = env_fns(3, spaces.Discrete(2), space)
        actions = np.arange(48.0).reshape(2, 2, 12)[:, :, ::4].T
        assert not actions.flags.c_contiguous
        with closing(SerialPool(factory(fns))) as serial, closing(process_pool(fns, 2)) as processes:
            ids = np.arange(3)
            for pool in (serial, processes):
                pool.reset(ids, [0, 1, 2])
                pool.recv(ids)
                pool.send(ids, actions, Autoreset.SAME_STEP)
            assert_same_batch(answer(processes, ids), answer(serial, ids))

    def test_dict_actions_go_by_key_not_by_order(self) -> None:
        space = spaces.Dict({"a": spaces.Discrete(10), "b": spaces.Discrete(10)})
        fns = env_fns(2, spaces.Discrete(2), space)
        a, b = np.array([1, 2]), np.array([3, 4])
        with closing(SerialPool(factory(fns))) as serial, closing(process_pool(fns)) as processes:
            ids = np.arange(2)
            for pool in (serial, processes):
                pool.reset(ids, [0, 1])
                pool.recv(ids)
                pool.send(ids, {"b": b, "a": a}, Autoreset.SAME_STEP)
            assert_same_batch(answer(processes, ids), answer(serial, ids))

    def test_an_environment_may_keep_the_actions_it_was_given(self) -> None:
        with closing(process_pool([KeepsActions] * 2)) as pool:
            ids = np.arange(2)
            pool.reset(ids, [0, 1])
            pool.recv(ids)
            for t in range(3):
                pool.send(ids, np.full((2, 2), float(t)), Autoreset.NEXT_STEP)
                pool.recv(ids)
            kept = pool.call("first_action", (), {}, ids)(None)
            assert_identical(kept, [np.zeros(2), np.zeros(2)])


def test_the_shared_block_grows_with_the_number_of_environments_not_with_its_square() -> None:
    sizes = []
    for num_envs in (1_000, 10_000):
        block = NodeBlock(BlockShape(spaces.Discrete(2), spaces.Discrete(2), (0, num_envs)))
        sizes.append(os.fstat(block.fds[0]).st_size)
        block.close()
    assert sizes[1] < 11 * sizes[0]


class TestWaiting:
    def test_all_pending_results_in_ascending_order(self) -> None:
        for pool in (SerialPool(factory([CountingEnv] * 4)), process_pool([CountingEnv] * 4, 2)):
            with closing(pool):
                pool.reset(np.array([3, 0]), [3, 0])
                pool.reset(np.array([2]), [2])
                batch = pool.recv()
                assert batch.env_ids.tolist() == [0, 2, 3]
                assert batch.obs[:, 0].tolist() == [0, 2, 3]

    def test_the_first_to_complete_waits_for_no_other(self) -> None:
        fast, slow = partial(TimedEnv, 0.0), partial(FaultyEnv, "hang")
        pool = process_pool([slow, fast, fast], 3)
        with closing(pool):
            pool.reset(np.arange(3), [0, 1, 2])
            pool.recv(np.arange(3))
            pool.send(np.array([0]), np.zeros(1, int), Autoreset.SAME_STEP)
            for _ in range(20):
                pool.send(np.array([1, 2]), np.zeros(2, int), Autoreset.SAME_STEP)
                seen: list[int] = []
                while len(seen) < 2:
                    batch = within(DEADLINE_S, partial(pool.recv, min_completed=1))
                    seen += batch.env_ids.tolist()
                assert sorted(seen) == [1, 2]
            with pytest.raises(TimeoutError):
                pool.recv(min_completed=1, timeout_s=0.02)
            for pid in pids_of(pool):
                os.kill(pid, signal.SIGKILL)

    def test_a_step_that_timed_out_is_not_lost(self, tmp_path: Path) -> None:
        gated = partial(GatedEnv, tmp_path / "go on", free_steps=0, max_episode_steps=1)
        with closing(process_pool([partial(CountingEnv, 1), gated], 2)) as pool:
            ids = np.arange(2)
            pool.reset(ids, [0, 1])
            assert [info.info for info in pool.recv(ids).info] == [{"began": 0}] * 2
            pool.send(ids, np.zeros(2, int), Autoreset.SAME_STEP)
            with pytest.raises(TimeoutError):
                pool.recv(ids, timeout_s=0.0)
            with pytest.raises(TimeoutError):
                pool.recv(ids, timeout_s=0.05)
            (tmp_path / "go on").touch()
            batch = pool.recv(ids)
            assert batch.rew.tolist() == [1.0, 1.0]
            assert [info.final_obs.tolist() for info in batch.info] == [[0, 0, 1, 1], [1, 0, 1, 1]]

    def test_a_call_that_timed_out_is_not_lost(self) -> None:
        with closing(process_pool([SlowCall] * 2, 2)) as pool:
            collect = pool.call("slow", (0.3,), {}, np.arange(2))
            with pytest.raises(TimeoutError):
                collect(0.01)
            assert collect(None) == [0.3, 0.3]

    def test_much_in_both_directions_does_not_lock_up(self) -> None:
        """A worker that writes long infos while its client writes long actions: neither may wait for the other."""
        num_envs = 24
        fns: list[Callable[[], Any]] = [Echo] * num_envs
        pool = process_pool(fns)
        everyone = np.arange(num_envs)
        pool.reset(everyone, [0] * num_envs)
        pool.recv(everyone)

        def step() -> list[int]:
            for i in range(num_envs):
                pool.send(np.array([i]), ["x" * 60_000], Autoreset.SAME_STEP)
            return [len(pool.recv(np.array([i])).info[0].info["echo"]) for i in range(num_envs)]

        try:
            assert within(DEADLINE_S, step) == [60_000] * num_envs
        finally:
            for pid in pids_of(pool):
                os.kill(pid, signal.SIGKILL)
            with suppress(WorkerLostError):
                pool.close()


class TestCalls:
    def test_methods_attributes_and_setting_them(self) -> None:
        with closing(process_pool(env_fns(3, spaces.Discrete(2)), 2)) as pool:
            ids = np.array([2, 0])
            pool.set_attr("factor", [5.0, 7.0], ids)
            assert pool.call("factor", (), {}, np.arange(3))(None) == [7.0, 1.0, 5.0]
            assert pool.call("scaled", (2.0,), {"by": 3.0}, ids)(None) == [30.0, 42.0]

    def test_a_call_that_raises_leaves_the_pool_usable(self) -> None:
        with closing(process_pool([CountingEnv] * 2, 2)) as pool:
            with pytest.raises(AttributeError, match="no_such_thing") as caught:
                pool.call("no_such_thing", (), {}, np.arange(2))(None)
            assert isinstance(caught.value.__cause__, EnvError)
            pool.reset(np.arange(2), [0, 1])
            assert pool.recv(np.arange(2)).obs[:, 0].tolist() == [0, 1]

    def test_functions_are_handed_over_by_value_where_they_must(self) -> None:
        with closing(process_pool(env_fns(1, spaces.Discrete(2)))) as pool:
            offset = 4
            pool.set_attr("function", [lambda x: x + offset], np.arange(1))
            assert pool.call("function", (1,), {}, np.arange(1))(None) == [5]


class TestFailures:
    @pytest.mark.parametrize("when", ["init", "reset", "step"])
    def test_an_error_keeps_its_type_and_message_and_says_where(self, when: Any) -> None:
        fns = [CountingEnv, CountingEnv, partial(FaultyEnv, "raise", when), CountingEnv]
        with pytest.raises(ValueError, match=r"^this environment is broken$") as caught:
            with closing(process_pool(fns, 2)) as pool:
                pool.reset(np.arange(4), [10, 11, 12, 13])
                pool.recv(np.arange(4))
                pool.send(np.arange(4), np.zeros(4, int), Autoreset.SAME_STEP)
                pool.recv(np.arange(4))
        cause = caught.value.__cause__
        assert isinstance(cause, EnvError)
        said = ["node local", "worker 1", "environment 2", "Traceback", "_maybe"]
        for words in said + (["seed 12"] if when == "step" else []):
            assert words in str(cause)

    def test_the_lowest_environments_error_is_raised(self) -> None:
        fns = [partial(FaultyEnv, "raise", error=partial(ValueError, f"number {i}")) for i in range(4)]
        with closing(process_pool(fns, 2)) as pool:
            ids = np.array([3, 1, 2])
            pool.reset(ids, [0, 1, 2])
            pool.recv(ids)
            pool.send(ids, np.zeros(3, int), Autoreset.SAME_STEP)
            with pytest.raises(ValueError, match=r"^number [13]$"):
                pool.recv(ids)

    def test_an_error_that_can_not_be_rebuilt_is_told_in_full(self) -> None:
        with closing(process_pool([partial(FaultyEnv, "raise", error=partial(OwnError, 3, "odd"))])) as pool:
            pool.reset(np.arange(1), [0])
            pool.recv()
            pool.send(np.arange(1), np.zeros(1, int), Autoreset.SAME_STEP)
            with pytest.raises(Exception, match="odd") as caught:
                pool.recv()
            assert isinstance(caught.value, EnvError) or str(caught.value) == "odd (3)"

    @pytest.mark.parametrize("how", ["info", "call"])
    def test_what_can_not_be_pickled_is_an_error_of_the_environment(self, how: str) -> None:
        with closing(process_pool([Unpicklable] * 2)) as pool:
            ids = np.arange(2)
            pool.reset(ids, [0, 1])
            pool.recv(ids)
            with pytest.raises(Exception, match="pickle") as caught:
                if how == "info":
                    pool.send(ids, np.zeros(2, int), Autoreset.SAME_STEP)
                    within(DEADLINE_S, partial(pool.recv, ids))
                else:
                    within(DEADLINE_S, lambda: pool.call("lock", (), {}, ids)(None))
            assert not isinstance(caught.value, WorkerLostError)

    def test_what_workers_can_not_get_is_explained(self) -> None:
        with closing(process_pool([CountingEnv] * 2)) as pool:
            ids = np.arange(2)
            with pytest.raises(TypeError, match=r"by pickling.*cannot pickle.*workers_per_node=0"):
                pool.call("get", (threading.Lock(),), {}, ids)
            with pytest.raises(TypeError, match=r"by pickling.*cannot pickle"):
                pool.reset(ids, [0, 1], {"lock": threading.Lock()})

    def test_what_the_other_process_can_not_unpickle_leaves_the_pool_open(self) -> None:
        """Such as an exception whose constructor takes other arguments, or a class of a module that only one finds."""
        with closing(process_pool([Returns] * 2)) as pool:
            ids = np.arange(2)
            for call in (
                partial(pool.call, "back", (Unloadable(),), {}, ids),
                partial(pool.call, "unloadable", (), {}, ids),
            ):
                with pytest.raises(ValueError, match="no number"):
                    within(DEADLINE_S, lambda call=call: call()(None))
                assert pool.call("back", (3,), {}, ids)(None) == [3, 3]
            with pytest.raises(ValueError, match="no number"):
                pool.reset(ids, [0, 1], {"value": Unloadable()})
                within(DEADLINE_S, partial(pool.recv, ids))
            pool.reset(ids, [0, 1])
            within(DEADLINE_S, partial(pool.recv, ids))

    @pytest.mark.parametrize("fault", ["kill", "exit"])
    @pytest.mark.parametrize("when", ["init", "reset", "step"])
    def test_a_worker_that_ends_is_noticed(self, fault: Any, when: Any) -> None:
        def play() -> None:
            with closing(process_pool([CountingEnv, partial(FaultyEnv, fault, when)], 2)) as pool:
                pool.reset(np.arange(2), [0, 1])
                pool.recv(np.arange(2))
                pool.send(np.arange(2), np.zeros(2, int), Autoreset.SAME_STEP)
                pool.recv(np.arange(2))

        with pytest.raises(WorkerLostError, match="worker 1") as caught:
            within(DEADLINE_S, play)
        for word in ("Expected:", "Got:", "Remedy:"):
            assert word in str(caught.value)

    @pytest.mark.parametrize("idle", [True, False])
    def test_a_killed_worker_is_noticed_and_the_others_go_with_the_pool(self, idle: bool) -> None:
        pool = process_pool([partial(CountingEnv, 5, 0.0 if idle else 0.2)] * 3, 3)
        pids = pids_of(pool)
        ids = np.arange(3)
        pool.reset(ids, [0, 1, 2])
        pool.recv(ids)
        if not idle:
            pool.send(ids, np.zeros(3, int), Autoreset.SAME_STEP)
        os.kill(pids[1], signal.SIGKILL)
        if idle:
            wait_until(lambda: not alive(pids[1]), "the worker has ended")
            pool.send(ids, np.zeros(3, int), Autoreset.SAME_STEP)
        with pytest.raises(WorkerLostError, match="worker 1"):
            within(DEADLINE_S, partial(pool.recv, ids))
        within(DEADLINE_S, pool.close)
        wait_until(lambda: not any(map(alive, pids)), "no worker is left")

    def test_a_killed_worker_is_noticed_although_its_child_lives(self, tmp_path: Path) -> None:
        """The child holds the worker's end of the pipe."""
        pool = process_pool([partial(HasChild, str(tmp_path / "pid"))])
        pool.reset(np.arange(1), [0])
        pool.recv()
        child = int((tmp_path / "pid").read_text())
        pool.send(np.arange(1), np.zeros(1, int), Autoreset.SAME_STEP)
        with pytest.raises(WorkerLostError):
            within(DEADLINE_S / 2, pool.recv)
        pool.close()
        wait_until(lambda: not alive(child), "the child has ended")

    def test_processes_of_an_environment_end_when_its_worker_is_replaced(self, tmp_path: Path) -> None:
        fns = [partial(HasChild, str(tmp_path / "pid"))]
        pool = ProcessPool.start(factory(fns), 1, restart_policy=RestartPolicy(True, None))
        first = int((tmp_path / "pid").read_text())
        pool.reset(np.arange(1), [0])
        pool.recv()
        pool.send(np.arange(1), np.zeros(1, int), Autoreset.SAME_STEP)
        assert within(DEADLINE_S, pool.recv).info[0].final_info == {"env_restarted": True}
        wait_until(lambda: not alive(first), "the first child has ended")
        second = int((tmp_path / "pid").read_text())
        assert alive(second) and os.getpgid(second) == pids_of(pool)[0]
        os.kill(pids_of(pool)[0], signal.SIGKILL)
        pool.close()
        wait_until(lambda: not alive(second), "the second child has ended")


class TestEnd:
    def test_close_ends_everything_and_may_be_repeated(self) -> None:
        pool = process_pool([CountingEnv] * 4, 3)
        pids = pids_of(pool)
        assert len(pids) == 3 and all(map(alive, pids))
        pool.close()
        assert not any(map(alive, pids))
        pool.close()

    def test_environments_are_closed(self, tmp_path: Path) -> None:
        with closing(process_pool([partial(WritesWhenClosed, str(tmp_path / str(i))) for i in range(3)], 2)):
            pass
        assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]

    @pytest.mark.parametrize("when", ["init", "step"])
    def test_close_while_an_environment_hangs(
        self, when: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The constructor is interrupted by the error of another environment."""
        monkeypatch.setattr("rayvec.node.process_pool._CLOSE_S", 0.5)
        fns = [partial(FaultyEnv, "hang", when), partial(FaultyEnv, "raise", "init" if when == "init" else "step", 5)]
        if when == "init":
            fns = [partial(FaultyEnv, "raise", "init"), partial(FaultyEnv, "hang", "init")]
            process_pool([CountingEnv]).close()  # the fork server stays
            before = set(children())
            with pytest.raises(ValueError, match="broken"):
                within(DEADLINE_S, partial(process_pool, fns, 2))
            assert set(children()) <= before
            return
        pool = process_pool(fns, 2)
        pids = pids_of(pool)
        pool.reset(np.arange(2), [0, 1])
        pool.recv(np.arange(2))
        pool.send(np.arange(2), np.zeros(2, int), Autoreset.SAME_STEP)
        within(DEADLINE_S, pool.close)
        assert not any(map(alive, pids))
        said = (
            "killed after 500 ms, since their environments had not closed: worker 0 on node local (environments 0 to 0)"
        )
        assert said in caplog.text

    @pytest.mark.slow
    def test_nothing_piles_up_over_many_pools(self) -> None:
        def cycle() -> None:
            with closing(process_pool(env_fns(2, ALL_SPACES["dict"]), 2)) as pool:
                pool.acting.load(0, cloudpickle.dumps(lambda obs: np.zeros(len(obs["a"]), int)))
                pool.acting.publish(0, 1, np.zeros(50_000, np.float32))
                pool.reset(np.arange(2), [0, 1])
                pool.recv(np.arange(2))
                pool.send(np.arange(2), np.zeros(2, int), Autoreset.SAME_STEP)
                pool.recv(np.arange(2))

        def held() -> tuple[int, int, int]:
            gc.collect()
            maps = Path("/proc/self/maps").read_text().count("memfd:rayvec")
            return len(os.listdir("/proc/self/fd")), maps, threading.active_count()

        cycle()
        before, names, workers = held(), shm_names(), set(children())
        for _ in range(20):
            cycle()
        assert all(now <= then for now, then in zip(held(), before, strict=True))
        wait_until(lambda: shm_names() <= names, "no name in /dev/shm is left")
        assert set(children()) == workers


def children() -> Iterator[int]:
    """Yields this process's children and the fork server's, zombies apart."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        with suppress(OSError):
            if entry.isdigit() and alive(int(entry)):
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
    for pid, parent in parents.items():
        if parent == os.getpid() or parents.get(parent) == os.getpid():
            yield pid


class TestRollout:
    @pytest.mark.parametrize("workers", [1, 2, 3])
    def test_chunks_do_not_depend_on_the_number_of_workers(self, workers: int) -> None:
        policy = TablePolicy()
        with (
            closing(SerialPool(factory([DriftEnv] * 5))) as serial,
            closing(process_pool([DriftEnv] * 5, workers)) as pool,
        ):
            pool.acting.load(7, cloudpickle.dumps(policy))
            for p in (serial, pool):
                p.reset(np.arange(5), list(range(5)))
                p.recv(np.arange(5))
            for k in range(3):
                expected = rollout(serial, policy, 20, noise_seed=1, first_step=20 * k)
                got = taken(pool, 7, 20, 20 * k, 1)
                for name in expected.__slots__:
                    assert_identical(getattr(got, name), getattr(expected, name), name)

    def test_large_chunks_of_any_length_after_each_other(self) -> None:
        """They are recorded where the last one of their size was, or where there is room."""
        images = partial(SpaceEnv, spaces.Dict(image=spaces.Box(0, 255, (40, 40), np.uint8), all=spaces.Discrete(9)))
        policy = TablePolicy()
        with closing(SerialPool(factory([images] * 3))) as serial, closing(process_pool([images] * 3, 2)) as pool:
            pool.acting.load(0, cloudpickle.dumps(policy))
            for p in (serial, pool):
                p.reset(np.arange(3), [0, 1, 2])
                p.recv(np.arange(3))
            first_step = 0
            for num_steps in (20, 20, 60, 30, 1, 60, 61):
                expected = rollout(serial, policy, num_steps, noise_seed=1, first_step=first_step)
                got = taken(pool, 0, num_steps, first_step, 1)
                for name in expected.__slots__:
                    assert_identical(getattr(got, name), getattr(expected, name), name)
                first_step += num_steps

    def test_policies_of_several_keys_and_versions(self) -> None:
        with closing(process_pool([CountingEnv] * 3, 2)) as pool:
            pool.reset(np.arange(3), [0, 1, 2])
            pool.recv(np.arange(3))
            first, second = TablePolicy(seed=1), TablePolicy(seed=2)
            pool.acting.load(0, cloudpickle.dumps(first))
            pool.acting.load(1, cloudpickle.dumps(first))
            pool.acting.publish(1, 5, second.weights())
            by_first, by_second = taken(pool, 0, 30, 0, 3), taken(pool, 1, 30, 0, 3)
            assert (by_first.weights_version, by_second.weights_version) == (0, 5)
            for chunk, policy in ((by_first, first), (by_second, second)):
                logp = policy._logp[chunk.extras["state"], chunk.act]
                assert_identical(chunk.extras["logp"], logp)
            assert counting_errors([by_first, by_second]) == []

    def test_a_chunk_is_in_memory_of_its_own(self) -> None:
        """Also what stands in its infos: the next chunk must not write there."""
        with closing(process_pool([LargeInfo])) as pool:
            pool.acting.load(0, cloudpickle.dumps(TablePolicy()))
            pool.reset(np.arange(1), [0])
            pool.recv(np.arange(1))
            chunk = taken(pool, 0, 4, 0, 0)
            taken(pool, 0, 4, 4, 0)
            for info in chunk.infos:
                assert_identical(info.info["large"], np.full(20_000, chunk.rew[info.t, info.n]))

    def test_a_policy_that_raises_says_where_and_leaves_the_pool_usable(self) -> None:
        def bad(obs: Any) -> Any:
            raise KeyError("policy")

        with closing(process_pool([CountingEnv] * 2, 2)) as pool:
            pool.acting.load(0, cloudpickle.dumps(bad))
            with pytest.raises(KeyError, match="policy") as caught:
                taken(pool, 0, 3, 0, 0)
            assert isinstance(caught.value.__cause__, EnvError) and "worker" in str(caught.value.__cause__)
            pool.reset(np.arange(2), [0, 1])
            assert pool.recv(np.arange(2)).obs[:, 0].tolist() == [0, 1]


LIGHT_WORKER = """
import cloudpickle, numpy as np
from helpers.kinds import factory
from helpers.odd_envs import Imported

from rayvec.data import ChunkRequest
from rayvec.node.process_pool import ProcessPool
from helpers.exact import TablePolicy

pool = ProcessPool.start(factory([Imported]), 1)
pool.acting.load(0, cloudpickle.dumps(TablePolicy()))
pool.begin_rollout(0, ChunkRequest(2))
pool.finish_rollout()
print(pool.call("heavy", (), {}, np.arange(1))(None))
pool.close()
"""


def test_workers_import_neither_ray_nor_torch() -> None:
    """In a process of its own: this one's fork server may have been started by a test that wants torch in it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    command = [sys.executable, "-c", LIGHT_WORKER]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.split("\n")[0] == "[[]]"


def test_environments_may_have_children_of_their_own() -> None:
    with closing(process_pool([Parent])) as pool:
        assert pool.call("child_says", (), {}, np.arange(1))(None) == [42]


def test_registered_environments_are_known_to_workers() -> None:
    gymnasium.register("rayvec-tests/Known-v0", entry_point=partial(SpaceEnv, spaces.Discrete(3)))
    try:
        with closing(ProcessPool.start(EnvFactory.build("rayvec-tests/Known-v0", 2), 2)) as pool:
            assert pool.spaces.observation == spaces.Discrete(3)
    finally:
        del gymnasium.registry["rayvec-tests/Known-v0"]


def test_a_module_that_registers_environments_registers_them_in_workers_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    entry_point = "helpers.testing:CountingEnv"
    (tmp_path / "rv_registers.py").write_text(f"import gymnasium\ngymnasium.register('rv/Mine-v0', '{entry_point}')\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("rv_registers")
    try:
        make = partial(gymnasium.make, "rv_registers:rv/Mine-v0")
        with closing(ProcessPool.start(EnvFactory.build([make] * 2), 1)) as pool:
            assert pool.spaces.action == spaces.Discrete(2)
    finally:
        del gymnasium.registry["rv/Mine-v0"]
    assert "Overriding" not in capfd.readouterr().err


def heirs(*args: Any) -> ProcessPool:
    """Two workers with an environment each, of which the first is to be made anew."""
    restart_policy = RestartPolicy(restart=True, step_timeout_s=2.0)
    pool = ProcessPool.start(factory([partial(Heir, *args)] * 2), 2, restart_policy=restart_policy)
    pool.reset(np.arange(2), [3, 4])
    pool.recv()
    pool.send(np.arange(2), np.array([1, 0]), Autoreset.SAME_STEP)
    return pool


def wait_for_successor(pool: ProcessPool) -> None:
    def is_starting() -> bool:
        within(DEADLINE_S, pool.completed_ids)
        return pool._clients[0].is_starting

    wait_until(is_starting, "the first worker has a successor")


@pytest.mark.slow
def test_others_step_while_an_environment_restarts_for_longer_than_step_timeout_s(tmp_path: Path) -> None:
    with closing(heirs(str(tmp_path))) as pool:
        other = np.array([1])
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            within(DEADLINE_S, partial(pool.recv, other))
            pool.send(other, np.zeros(1, int), Autoreset.SAME_STEP)
            assert within(DEADLINE_S, pool.completed_ids).tolist() in ([], [1])
        (tmp_path / "go").touch()
        batch = within(DEADLINE_S, partial(pool.recv, np.array([0])))
        assert batch.truncated.all() and pool._block.arrays["restarts"].tolist() == [1, 0]


@pytest.mark.slow
def test_a_replacement_worker_that_starts_between_two_calls_has_not_timed_out(tmp_path: Path) -> None:
    with closing(heirs(str(tmp_path), "", 0.5)) as pool:
        wait_for_successor(pool)
        time.sleep(2.5)
        (tmp_path / "go").touch()
        wait_until(lambda: not pool._clients[0].is_starting, "its environment is made")
        batch = within(DEADLINE_S, partial(pool.recv, min_completed=2))
        assert batch.truncated.tolist() == [True, False] and pool._block.arrays["restarts"].tolist() == [1, 0]


def test_a_step_that_was_done_long_ago_was_in_time() -> None:
    restart_policy = RestartPolicy(restart=True, step_timeout_s=1.5)
    with closing(ProcessPool.start(factory([CountingEnv] * 2), 2, restart_policy=restart_policy)) as pool:
        pool.reset(np.arange(2), [3, 4])
        time.sleep(2.0)
        within(DEADLINE_S, partial(pool.recv, min_completed=1))
        assert not pool._block.arrays["restarts"].any()


@pytest.mark.slow
def test_replacement_workers_that_exit_while_they_start_are_a_crash_loop_however_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayvec.pools.restart_state._WINDOW_S", 1.0)
    restart_policy = RestartPolicy(restart=True, step_timeout_s=None)
    fns = [partial(DiesLate, str(tmp_path / "died"), 0.3)]
    with closing(ProcessPool.start(factory(fns), 1, restart_policy=restart_policy)) as pool:
        pool.reset(np.arange(1), [3])
        pool.recv()
        pool.send(np.arange(1), np.ones(1, int), Autoreset.SAME_STEP)
        with pytest.raises(WorkerLostError, match="again and again"):
            within(DEADLINE_S, pool.recv)


def test_closing_waits_for_no_replacement_worker(tmp_path: Path) -> None:
    pool = heirs(str(tmp_path))
    wait_for_successor(pool)
    pids = pids_of(pool)
    pool.close()
    assert not any(map(alive, pids))


def test_an_environment_that_can_not_be_restarted_says_why(tmp_path: Path) -> None:
    with (
        closing(heirs(str(tmp_path), "no second one")) as pool,
        pytest.raises(KeyError, match="no second one") as caught,
    ):
        within(DEADLINE_S, pool.recv)
    assert isinstance(caught.value.__cause__, EnvError)


@pytest.mark.slow
def test_a_worker_that_was_only_slow_writes_no_more_once_it_is_taken_to_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end its step after the last true observation has been restored, and before its successor tells it."""
    restart_policy = RestartPolicy(restart=True, step_timeout_s=2.0)
    with closing(ProcessPool.start(factory([partial(TimedEnv, 4.0)]), 1, restart_policy=restart_policy)) as pool:
        ids = np.arange(1)
        pool.reset(ids, [3])
        first = pool.recv(ids).obs.copy()
        worker = ProcessWatch(pids_of(pool)[0])
        assert pool._last is not None
        restore = pool._last.restore

        def restore_and_wait(select: Any, obs: Any) -> None:
            restore(select, obs)
            until = time.monotonic() + DEADLINE_S
            while not worker.ended() and (obs == first).all():
                assert time.monotonic() < until
                time.sleep(0.01)

        monkeypatch.setattr(pool._last, "restore", restore_and_wait)
        pool.send(ids, np.zeros(1, int), Autoreset.NEXT_STEP)
        batch = pool.recv(ids)
        worker.close()
        assert (batch.obs == first).all() and batch.truncated.all() and not batch.rew.any()


def test_a_module_that_cannot_be_preloaded_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    pool = ProcessPool.of(factory([CountingEnv]), 1, preload=("no_such_module",))
    pool.close()
    assert "preload can't import 'no_such_module': ModuleNotFoundError" in capfd.readouterr().err
