"""Ranks that are placed, connected, called together, and restarted from a checkpoint when one is lost.

A `RankGroup` knows nothing of learning. It makes one object on every rank with a function ``make(ranks)``, where
`ranks` is this rank's :class:`~rayvec.learners.ranks.Ranks`, and calls methods of these objects::

    group = RankGroup(make, num_ranks=4)
    results = group.run("update", [(shard_0,), (shard_1,), (shard_2,), (shard_3,)])   # changes what the objects hold
    weights = group.ask("weights")                                                    # calls rank 0, changes nothing
    state = group.state_dict()
    group.close()

The objects keep these rules:

*   ``state_dict()`` returns everything that the next call depends on, tensors and plain values only, and
    ``load_state_dict(state)`` continues from it.
*   Objects of all ranks have the same state before and after every `run`. They begin with that of rank 0.
    Rank-local state is left out of ``state_dict()`` and is lost with the ranks; only `load_state_dict` restores it.
*   The same call from the same state gives the same result, so that it may be repeated.

An argument that is a :class:`~rayvec.distributed.memory_file.MemoryFile` arrives as its value: a rank on the driver's
node opens the file, and another one gets the value through Ray's object store. An argument that is a Ray object
reference is fetched by the rank that gets it. A reference inside a list or tuple stays a reference, which the object
may fetch itself.

The group keeps rank 0's state outside the ranks, as its checkpoint, while the caller continues: after every `run`,
or, where the next call has to wait for that, so rarely that waiting takes at most 2 % of the time. When a rank is
lost (its process or its node ended, it hangs, or it did not take part in a sum in time), the group ends all ranks,
restarts them from the checkpoint, and repeats the calls since. After more than three losses in a row it raises a
`LearnerError`. An exception that an object's method raises is raised by `run` with its own type; the group is then as
it was before the call, apart from rank-local state, which is lost where ranks restarted.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar

import cloudpickle

from rayvec.distributed.memory_file import MemoryFile
from rayvec.distributed.process_host import ProcessHost
from rayvec.distributed.rank_actor import pack, unpack
from rayvec.distributed.rank_host import RankHost, RankPlacement
from rayvec.distributed.running_ranks import RankSet
from rayvec.errors import ConfigError, LearnerError, RankLostError, check_choice, check_count, without_remedy
from rayvec.learners.ranks import Ranks

__all__ = ["RankGroup"]

_MOST_LOSSES = 3
_PAUSE_S = 1.0
_WAIT_SHARE = 0.02
"""The share of the time that a caller waits for checkpoints, at most."""
_MOST_CALLS = 16
"""The most calls that are repeated after a loss; their arguments are kept until then."""
_T = TypeVar("_T")
_Call = tuple[str, Sequence[tuple[Any, ...]] | None]

logger = logging.getLogger(__name__)


class RankGroup(contextlib.AbstractContextManager["RankGroup"]):
    """One object on each of several ranks, called together; see the module for the rules.

    Args:
        make: Called on every rank with its `Ranks`; returns the object.
        num_ranks: Number of ranks.
        device: ``"cpu"``, or ``"cuda"`` for one GPU for each rank.
        threads: Number of threads that torch may use on each rank.
        num_cpus: Cores that each rank claims; by default as many as `threads`. With 0 a rank claims none.
        ranks_per_node: The most ranks of a node; by default as many as fit, on as few nodes as possible.
        nodes: Ray's ids of the nodes that may be used; by default all.
        avoid_nodes: Ids of nodes that may not be used, such as those on which environments step.
        timeout_s: How long ranks wait for each other, in seconds; it must exceed the longest time that one rank
            computes while another waits for it. Ranks whose processes use no CPU time for half as long are lost, too.
        num_nodes: 0 runs the ranks as processes of this machine, without Ray; the settings of cores and nodes have no
            effect then. Unset: as Ray actors.
        address: Of a running Ray cluster; see :class:`~rayvec.cluster.ray_session.RaySession`.

    Attributes:
        num_ranks: Number of ranks.
        num_starts: Number of times that all ranks were started: 1, and 1 more for each restart.

    Raises:
        ConfigError: Settings that can't work, or a cluster without capacity for the ranks. The group looks for 10 s;
            ranks whose cores another program claims meanwhile have a minute or `timeout_s`, whichever is longer.
        Exception: What `make` raised, its ``__cause__`` a `LearnerError` with the remote traceback.
    """

    def __init__(
        self,
        make: Callable[[Ranks], Any],
        num_ranks: int = 1,
        *,
        device: str = "cpu",
        threads: int = 1,
        num_cpus: int | None = None,
        ranks_per_node: int | None = None,
        nodes: Collection[str] | None = None,
        avoid_nodes: Collection[str] = (),
        timeout_s: float = 60.0,
        num_nodes: Literal[0] | None = None,
        address: str | None = None,
    ) -> None:
        self.num_ranks = check_count("num_ranks", num_ranks)
        check_choice("device", device, ("cpu", "cuda"))
        check_count("threads", threads)
        if ranks_per_node is not None:
            check_count("ranks_per_node", ranks_per_node)
        self._make = cloudpickle.dumps(make)
        self._checkpoint: Any = None
        self._copy: Any = None
        self._pending_checkpoint: Any = None
        self._calls_since_checkpoint: list[_Call] = []
        self._waited_s = 0.0
        self._kept_s = -math.inf
        self._num_losses = 0
        self.num_starts = 0
        self._closed = False
        self._creator = os.getpid()
        cpus = threads if num_cpus is None else num_cpus
        self._host: RankHost
        if num_nodes is None:
            from rayvec.distributed.rank_placement import ResourceRequest  # these import Ray
            from rayvec.distributed.ray_host import RayHost

            request = ResourceRequest(cpus, int(device == "cuda"), ranks_per_node, nodes, avoid_nodes)
            self._host = RayHost(request, address)
        elif num_nodes == 0 and address is None:
            self._host = ProcessHost()
        else:
            raise ConfigError(
                "num_nodes=0 runs ranks as processes of this machine, without Ray.",
                expected="num_nodes=0 and no address, or no num_nodes",
                got=f"num_nodes={num_nodes!r}, address={address!r}",
                remedy="Leave num_nodes out to run the ranks on Ray.",
            )
        self._set = RankSet(self._host, device, threads, timeout_s)
        try:
            self._retry_on_rank_loss(lambda: None)
        except BaseException:
            self.close()
            raise

    @property
    def placements(self) -> tuple[RankPlacement, ...]:
        """Where the ranks are."""
        return self._set.placements

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes of the ranks, each on its own node."""
        return tuple(rank.pid for rank in self._set.ranks)

    @property
    def reads_memory(self) -> bool:
        """Whether all ranks can open memory files of the driver."""
        return bool(self._set.ranks) and all(rank.reads_memory for rank in self._set.ranks)

    def put(self, value: Any) -> Any:
        """Returns what stands for a value, as it is now, in the arguments of several ranks."""
        self._assert_open()
        return MemoryFile(value) if self.reads_memory else self._host.put(value)

    def run(self, name: str, args: Sequence[tuple[Any, ...]] | None = None, *, keep: bool = False) -> list[Any]:
        """Calls a method on all ranks together, which may change what they hold; returns each rank's result.

        Args:
            name: Of the method.
            args: Positional arguments for each rank; none by default.
            keep: Whether to keep the state after this call in any case, since the caller asks for it next, or since
                the call could not be repeated later.

        Raises:
            LearnerError: Ranks were lost again and again.
            Exception: What the method raised, its ``__cause__`` a `LearnerError` with the remote traceback.
        """
        call = name, args

        def work() -> tuple[list[Any], Any]:
            calls = self._set.post(*call)
            checkpoint = self._state_of_rank_0() if keep or self._is_checkpoint_due() else None
            return self._set.gather(calls), checkpoint

        results, self._pending_checkpoint = self._retry_on_rank_loss(work)
        self._calls_since_checkpoint.append(call)
        return results

    def ask(self, name: str, *args: Any) -> Any:
        """Calls a method of rank 0's object that changes nothing; returns the result. Raises as `run` does."""
        return self._retry_on_rank_loss(
            lambda: self._set.answers([self._host.call(self._set.ranks[0], "call", name, *args)])[0]
        )

    def ask_all(self, name: str) -> list[Any]:
        """Calls a method of every rank's object that changes nothing; returns the results. Raises as `run` does."""
        return self._retry_on_rank_loss(lambda: self._set.answers(self._set.post(name)))

    def state_dict(self) -> Any:
        """Returns the state that all ranks share, in the driver's own memory. Raises as `run` does."""

        def work() -> Any:
            if self._calls_since_checkpoint:
                self._pending_checkpoint = self._state_of_rank_0()
                self._finish_checkpoint()
            kept = self._checkpoint
            return unpack(kept.value() if isinstance(kept, MemoryFile) else self._host.result(kept))

        return self._retry_on_rank_loss(work)

    def load_state_dict(self, state: Mapping[str, Any], rank_local: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Gives all ranks the same state, and each rank its entry of `rank_local` besides. Raises as `run` does."""
        shared = self.put(pack(state))
        local = [self.put(pack(each)) for each in rank_local] if rank_local else [self.put(pack({}))] * self.num_ranks

        def load() -> None:
            pairs = zip(self._set.ranks, local, strict=True)
            self._set.answers([self._host.call(rank, "load_state_dict", shared, each) for rank, each in pairs])

        self._retry_on_rank_loss(load)
        self._keep(shared)

    def _retry_on_rank_loss(self, work: Callable[[], _T]) -> _T:
        """Returns what `work` returns on ranks with the present state; restarts them and repeats it if one is lost."""
        self._assert_open()
        while True:
            try:
                if not self._set.ranks:
                    self._start()
                self._finish_checkpoint()
                result = work()
            except RankLostError as error:
                self._end_ranks()
                self._num_losses += 1
                if self._num_losses > _MOST_LOSSES:
                    raise LearnerError(
                        "A group whose ranks are lost continues from its checkpoint.",
                        expected=f"at most {_MOST_LOSSES} losses in a row",
                        got=f"another one: {without_remedy(error)}",
                        remedy="Look for what ends the ranks, such as too little memory",
                    ) from error
                logger.warning("restarting all ranks: %s", error)
                time.sleep(_PAUSE_S * (self._num_losses - 1))  # Ray lists a node for a while after it is gone
            except BaseException:
                self._end_ranks()  # some may have stopped half way: the next call restarts them
                raise
            else:
                self._num_losses = 0
                return result

    def _assert_open(self) -> None:
        if os.getpid() != self._creator:
            raise LearnerError(
                "A group is used by the process that made it.",
                expected=f"process {self._creator}",
                got=f"process {os.getpid()}, which was forked from it",
                remedy="Make the group after the fork",
            )
        if self._closed:
            raise LearnerError(
                "A group that was closed has no ranks any more.",
                expected="calls before close()",
                got="one after it",
                remedy="Make a new group",
            )

    def _is_checkpoint_due(self) -> bool:
        """Whether to keep the state after the next call, by how long the caller waited for the last one."""
        since_s = time.monotonic() - self._kept_s
        return since_s >= self._waited_s / _WAIT_SHARE or len(self._calls_since_checkpoint) >= _MOST_CALLS - 1

    def _finish_checkpoint(self) -> None:
        """Waits until a state that was asked for lies where it outlives all ranks."""
        if self._pending_checkpoint is not None:
            began_s = time.monotonic()
            copy = self._set.answers([self._pending_checkpoint])
            self._keep(self._pending_checkpoint, copy)
            self._kept_s = time.monotonic()
            self._waited_s = self._kept_s - began_s

    def _keep(self, checkpoint: Any, copy: Any = None) -> None:
        """Keeps a state, and the driver's copy of it, which Ray could otherwise evict from this node's object store."""
        self._checkpoint, self._copy, self._pending_checkpoint = checkpoint, copy, None
        self._calls_since_checkpoint = []

    def _start(self) -> None:
        """Starts all ranks from the checkpoint and repeats the calls since."""
        late = ConfigError if self._checkpoint is None else LearnerError
        self._set.start(self._find_placements(), self._make, late)
        try:
            if self._checkpoint is None:
                self._pending_checkpoint = self._state_of_rank_0()
                self._finish_checkpoint()
            self._set.answers([self._host.call(rank, "load_state_dict", self._checkpoint) for rank in self._set.ranks])
            for call in self._calls_since_checkpoint:
                self._set.gather(self._set.post(*call))
            if self._calls_since_checkpoint:
                self._pending_checkpoint = self._state_of_rank_0()
            self.num_starts += 1
        except BaseException:
            self._end_ranks()
            raise

    def _state_of_rank_0(self) -> Any:
        return self._host.call(self._set.ranks[0], "state_dict")

    def _find_placements(self) -> list[RankPlacement]:
        try:
            return self._host.place(self.num_ranks)
        except ConfigError as error:
            if self._checkpoint is None:
                raise
            raise LearnerError(f"Ranks were lost, and there is no room to restart them. {error}") from error

    def _end_ranks(self) -> None:
        """Ends all ranks, also those that hang; their claims come free soon after."""
        self._pending_checkpoint = None
        self._set.end()

    def close(self) -> None:
        """Ends all ranks; does nothing in a child that was forked. May be called again."""
        if not self._closed and os.getpid() == self._creator:
            self._closed = True
            self._end_ranks()
            self._keep(None)
            self._host.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()
