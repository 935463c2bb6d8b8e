"""The pool of one node: worker processes, each with a slice of the environments."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing import reduction
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from rayvec.data import Chunk, Tree
from rayvec.data.partition import even_bounds
from rayvec.envs.factory import EnvFactory
from rayvec.errors import RemoteFailure, WorkerLostError
from rayvec.node.chunk_memory import MOST_CHUNKS, ChunkMemory, PackedChunk, dumps
from rayvec.node.client import PoolClient
from rayvec.node.wire import BlockShape, NodeBlock, Setup
from rayvec.node.worker import WorkerSpec, worker_main
from rayvec.node.worker_link import WorkerLink
from rayvec.pools.base import RAISE, PoolSpaces, Supervision
from rayvec.pools.memory import SharedBlock
from rayvec.pools.restarts import NodeState

__all__ = ["ProcessPool", "Workers", "worker_name"]

_END_S = 5.0
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class Workers:
    """The worker processes of one node: started, asked for their spaces, given their block, restarted, ended.

    They come from a forkserver that has imported what they need, so that each costs milliseconds and a
    few megabytes.

    Args:
        factories: Make the environments, one for each worker, by cloudpickle: only the workers import what is in them.
        worker_bounds: Global indices: worker k holds ``range(worker_bounds[k], worker_bounds[k + 1])``.
        node: Name of the node, for errors.
        preload: Modules that the forkserver imports beside ours.
        supervision: What becomes of environments that raise.

    Raises:
        Exception: What the constructor of an environment raised, its ``__cause__`` an ``EnvError``.
    """

    def __init__(
        self,
        factories: Sequence[bytes],
        worker_bounds: Sequence[int],
        node: str = "local",
        preload: Sequence[str] = (),
        supervision: Supervision = RAISE,
    ) -> None:
        self.first_id = worker_bounds[0]
        self.node = node
        self.bounds = tuple(bound - self.first_id for bound in worker_bounds)
        self.supervision = supervision
        self._block: NodeBlock | None = None
        self.memories: list[ChunkMemory] = []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["rayvec.node.worker", *preload])
        self._specs = [
            WorkerSpec(k, worker_bounds[k], factory, node, supervision) for k, factory in enumerate(factories)
        ]
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        try:
            for spec in self._specs:
                process, pipe = self._start(spec)
                self._processes.append(process)
                self._pipes.append(pipe)
            sizes = [self.bounds[k + 1] - self.bounds[k] for k in range(len(self._specs))]
            self.spaces = PoolSpaces.join([(size, self._hear(k, PoolSpaces)) for k, size in enumerate(sizes)])
        except BaseException:
            self.close()
            raise

    def _start(self, spec: WorkerSpec) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        with _hidden_main(), _one_thread():
            process = self._context.Process(
                target=worker_main, args=(spec, theirs), name=f"rayvec-worker-{spec.index}", daemon=True
            )
            process.start()
        theirs.close()
        return process, ours

    def _hear(self, index: int, kind: type[Any]) -> Any:
        """Reads what a worker reports while it starts, which is of this kind unless it failed."""
        try:
            said = pickle.loads(self._pipes[index].recv_bytes())
        except (EOFError, ConnectionResetError) as error:
            raise WorkerLostError(
                "A worker makes its environments and reports.",
                expected=f"a report of {self.where(index)}",
                got="its process ended (killed, out of memory, or a crash in native code)",
                remedy="Make one environment by hand in a fresh interpreter to see what it prints.",
            ) from error
        if isinstance(said, RemoteFailure):
            raise said.rebuild()
        assert isinstance(said, kind)
        return said

    def where(self, index: int) -> str:
        """Returns the name of a worker, for errors."""
        return worker_name(self.node, index, self.first_id, self.bounds)

    def allocate(
        self, observation: Space[Any], action: Space[Any], state: NodeState | None = None
    ) -> tuple[NodeBlock, list[WorkerLink]]:
        """Makes the block for arrays of these spaces, in a certain state, and gives it to every worker."""
        block = self._block = NodeBlock(BlockShape(observation, action, self.bounds))
        if state is not None:
            state.restore(block.results(slice(None))["obs"], block.arrays)
        self.memories = [ChunkMemory() for _ in self._pipes]
        for k in range(len(self._pipes)):
            self._set_up(k, Setup(block.shape), [])
        for k in range(len(self._pipes)):
            self._hear(k, int)
        return block, [WorkerLink(block, k, pipe, self.where(k), self.first_id) for k, pipe in enumerate(self._pipes)]

    def respawn(
        self, index: int, policies: Sequence[tuple[int, bytes, int | None]] = (), weights_fds: Sequence[int] = ()
    ) -> Connection:
        """Kills a worker and starts another in its place, which goes on with the oldest command under way.

        It is not waited for: until its environments are made, the block has its process id below zero.

        Args:
            index: Of the worker.
            policies: What it is to know, as in :class:`~rayvec.node.wire.Setup`.
            weights_fds: Descriptors of the blocks of those that have weights.
        """
        assert self._block is not None
        _end(self._processes[index])
        self._pipes[index].close()
        self._block.forget(index)
        self._processes[index], self._pipes[index] = self._start(replace(self._specs[index], successor=True))
        self._block.arrays["pid"][index] = -self._processes[index].pid
        first_command = int(self._block.arrays["tail"][index])
        with contextlib.suppress(OSError):  # one that has ended is found to have when its answer is waited for
            self._set_up(index, Setup(self._block.shape, first_command, tuple(policies)), weights_fds)
        return self._pipes[index]

    def _set_up(self, index: int, setup: Setup, weights_fds: Sequence[int]) -> None:
        assert self._block is not None
        pipe = self._pipes[index]
        pipe.send_bytes(dumps(setup))
        for fd in (*self._block.fds, *self.memories[index].fds, *weights_fds):
            reduction.send_handle(pipe, fd, None)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """Ends every worker: closed pipes ask it to, after some seconds it is killed."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + _END_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            _end(process)
        for memory in self.memories:
            memory.close()
        self._pipes, self._processes, self.memories = [], [], []


class ProcessPool(PoolClient):
    """Steps environments in worker processes on this machine, through shared memory.

    Args:
        workers: The started workers; the pool owns them.
        observation: Space of one environment's observations, where it is to differ from the first one's.
        action: Likewise of actions.
        state: Of the node in whose place this one is, if there was one.
    """

    def __init__(
        self,
        workers: Workers,
        observation: Space[Any] | None = None,
        action: Space[Any] | None = None,
        state: NodeState | None = None,
    ) -> None:
        self._workers = workers
        self.spaces = workers.spaces
        try:
            block, links = workers.allocate(
                observation or workers.spaces.observation, action or workers.spaces.action, state
            )
        except BaseException:
            workers.close()
            raise
        super().__init__(block, links, workers.first_id, workers.supervision, self._start_anew)
        self._everyone = np.arange(self.num_envs)
        self._policies: dict[int, bytes] = {}
        self._weights: dict[int, SharedBlock] = {}
        self._versions: dict[int, int] = {}
        self._num_rollouts = 0
        if state is not None and self.layout is None:
            self.know_objects(state.obs)

    @classmethod
    def start(
        cls,
        factory: EnvFactory,
        num_workers: int,
        *,
        node: str = "local",
        preload: Sequence[str] = (),
        supervision: Supervision = RAISE,
    ) -> ProcessPool:
        """Starts workers for all environments of a factory and returns the pool over them."""
        bounds = even_bounds(factory.num_envs, num_workers)
        return cls(Workers(factory.in_parts(bounds), bounds, node, preload, supervision))

    @property
    def block_shape(self) -> BlockShape:
        """All that another process needs to know of the block."""
        return self._block.shape

    @property
    def fds(self) -> list[int]:
        """Descriptors for a process that is lent the pool: of the block, its event, the pipes and chunk memories."""
        pipes = [link.pipe.fileno() for link in self._links]
        return [*self._block.fds, *pipes, *(fd for memory in self._workers.memories for fd in memory.fds)]

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers."""
        return self._workers.pids

    def respawn(self, index: int) -> int:
        """Starts a worker anew for the process that is lent the pool; returns the descriptor of its pipe."""
        pipe = self._start_anew(index)
        self._links[index].reconnect(pipe, repeat=False)
        return pipe.fileno()

    def _start_anew(self, index: int) -> Connection:
        with_weights = [key for key in self._policies if key in self._weights]
        policies = [
            (key, policy, self._weights[key].arrays["weights"].size if key in self._weights else None)
            for key, policy in self._policies.items()
        ]
        return self._workers.respawn(index, policies, [self._weights[key].fd for key in with_weights])

    def load_policy(self, key: int, policy: bytes, version: int = 0) -> None:
        """Gives every worker a pickled policy, to be named by `key`, that brings weights of a version along."""
        self._ask_all("load_policy", key, policy)
        self._policies[key] = policy
        self._versions[key] = version

    def drop_policy(self, key: int) -> None:
        """Lets every worker forget a policy and its weights."""
        self._ask_all("drop_policy", key)
        self._policies.pop(key, None)
        self._versions.pop(key, None)
        if key in self._weights:
            self._weights.pop(key).close()

    def publish(self, key: int, version: int, weights: NDArray[np.float32]) -> None:
        """Puts weights where the workers read them when their next rollout begins.

        No rollout may be under way.
        """
        block = self._weights.get(key)
        if block is None:
            block = self._weights[key] = SharedBlock({"weights": (np.float32, (weights.size,))})
            command = ("attach_weights", key, weights.size)  # whoever starts later is told when it starts
            attached = self._ask(self._plans.of(self._everyone), lambda part: command, repeat=False)
            for link in self._links:
                with contextlib.suppress(OSError):  # one that has ended is found to have, below
                    reduction.send_handle(link.pipe, block.fd, None)
            attached(None)
        block.arrays["weights"][:] = weights
        self._versions[key] = version

    def rollout(self, key: int, num_steps: int, first_step: int, noise_seed: int) -> tuple[PackedChunk, ...]:
        """Lets every worker take steps with a policy over its own slice.

        A worker that ends meanwhile, where workers are restarted, takes its steps once more, from new episodes.

        Returns:
            The chunk of each worker, in the order of environments, with global ids, for :meth:`unpack`. It is there
            for so long as `MOST_CHUNKS` allows: the rollout after the next writes over it.
        """
        self._snapshot()
        turn = self._num_rollouts % MOST_CHUNKS
        self._num_rollouts += 1
        command = ("rollout", key, num_steps, first_step, noise_seed, self._versions[key], turn)
        packed = tuple(self._ask(self._plans.of(self._everyone), lambda part: command, num_steps)(None))
        last_obs: Tree = None
        if self.layout is None:
            last_obs = np.concatenate([chunk.last_obs for chunk in self.unpack(packed)])
        self.stepped_by_another(last_obs)
        return packed

    def unpack(self, packed: Sequence[PackedChunk]) -> tuple[Chunk, ...]:
        """Returns the chunks of the workers; their arrays may be views of the memory that they lie in."""
        memories = self._workers.memories
        return tuple(part.unpack(memory) for part, memory in zip(packed, memories, strict=True))

    def _snapshot(self) -> None:
        """Takes note of what is in the block, which whoever was lent the pool has left there."""
        if self._last is not None:
            self._keep_last(slice(None))

    def close(self) -> None:
        """Closes the environments, ends the workers and frees the memory; may be called again."""
        try:
            for link in self._links:
                if link.is_starting:
                    link.kill()  # it would read only when its environments are made that it is to end
                link.post_call("close")
            for block in self._weights.values():
                block.close()
            self._weights = {}
            super().close()
        finally:
            self._workers.close()

    def _ask_all(self, name: str, *args: Any) -> list[Any]:
        return self._ask(self._plans.of(self._everyone), lambda part: (name, *args))(None)


def worker_name(node: str, index: int, first_id: int, bounds: Sequence[int]) -> str:
    """Returns the name of a worker, for errors."""
    return (
        f"worker {index} on node {node} (environments {first_id + bounds[index]} to {first_id + bounds[index + 1] - 1})"
    )


def _end(process: Any) -> None:
    """Kills a worker that has not ended by itself, and what its environments have started.

    It led a group of its own, whose number nobody else is given while somebody is left in it: a process that has it now
    says that nobody is.
    """
    process.kill()
    process.join()
    if process.exitcode != 0 and not os.path.exists(f"/proc/{process.pid}"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.close()


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Keeps new processes from importing this process's main module again.

    In a Ray worker that module brings all of Ray with it: half a second and 40 MB for each process. What
    the environments need of a user's script travels by value.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Gives new processes one thread for linear algebra: there is a worker for every core already."""
    before = {name: os.environ.get(name) for name in _ONE_THREAD}
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
