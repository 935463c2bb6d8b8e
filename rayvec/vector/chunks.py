"""Chunks of steps that policies take where the environments are: the policies, and the chunks that are pending."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rayvec.data import ChunkRequest, Rollout
from rayvec.data.chunk import Cut
from rayvec.data.join_chunks import join_chunks
from rayvec.data.topology import split_groups
from rayvec.errors import ConfigError
from rayvec.fleet.commands import Command, Op
from rayvec.fleet.deferred_signals import uninterrupted
from rayvec.node.machine import Machine
from rayvec.node.object_store import as_rollout, check_object_store
from rayvec.rollout.policy_host import ChunkOrder, PolicyHost, TakenChunk
from rayvec.vector.environments import Environments, NotReady, answer_of, log_notes

__all__ = ["MAX_CHUNKS", "Chunks"]

MAX_CHUNKS = 2
"""The most chunks of an environment that may be pending."""
_CUT_POLL_S = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A chunk that was requested and not received.

    Attributes:
        order: What was requested.
        ticket: Of the command; None where the policy acts in this process, as soon as the chunk is waited for.
        parts: Which parts take it.
    """

    order: ChunkOrder
    ticket: Any
    parts: Sequence[int]


class Chunks:
    """The policies that act where the environments are, and the pending chunks.

    A policy acts in each worker over its own environments, in each node, or in this process over all environments.

    Args:
        envs: The environments; their arrays are allocated.

    Attributes:
        unused: Keys of policies that nobody refers to any more.
    """

    def __init__(self, envs: Environments) -> None:
        self._envs, self.unused = envs, list[int]()
        self._pending: list[_Pending] = []
        self._on_node: set[int] = set()  # keys of policies that act in the processes that own the workers
        self._all_here = envs.transports == ("local",)
        groups = None
        if not envs.has_nodes and not self._all_here:
            units = envs.spaces.unit_bounds
            groups = split_groups(envs.topology, 2 if units is None or len(units) > 2 else 1, units)
        self._host = self.new_host(groups)
        self._sizes = np.array([len(part) for part in envs.parts])

    def new_host(self, groups: Sequence[NDArray[np.int64]] | None) -> PolicyHost:
        """Returns what lets policies act in this process, with groups of environments that take turns."""
        envs = self._envs
        layout = None if envs.action_layout.objects else envs.action_layout
        return PolicyHost(envs, layout, envs.first_id, envs.spaces.native_mode, groups)

    @property
    def num_pending(self) -> int:
        """The number of pending chunks."""
        return len(self._pending)

    def note(self, command: Command) -> None:
        """Records a step or a reset outside of chunks."""
        if command.op == Op.STEP:
            self._host.note_absence()
        elif command.op == Op.RESET:
            self._host.note_reset(command.rows)

    def note_absence(self) -> None:
        """Records steps by another policy."""
        self._host.note_absence()

    def load(self, key: int, pickled: bytes, version: int, *, on_node: bool) -> None:
        """Sends a pickled policy to each worker or, with `on_node`, to the process that owns the workers."""
        if on_node or self._all_here:
            self._on_node.add(key)
        if self._acts_here(key):
            self._host.load(key, pickled)
            return
        more = (on_node, version) if self._envs.has_nodes else ()
        self._run(Command(Op.LOAD, np.arange(self._envs.num_envs), rest=(key, pickled, *more)))

    def drop(self, key: int) -> None:
        """Removes a policy."""
        if self._acts_here(key):
            self._host.drop(key)
        else:
            self._run(Command(Op.DROP, np.arange(self._envs.num_envs), rest=(key,)))
        self._on_node.discard(key)

    def _acts_here(self, key: int) -> bool:
        return key in self._on_node and not self._envs.has_nodes

    def _run(self, command: Command) -> None:
        answer_of(self._envs, self._envs.post(command))

    def _pending_of(self, part: int | None) -> list[_Pending]:
        return [chunk for chunk in self._pending if part is None or part in chunk.parts]

    def has_room(self, key: int, part: int | None = None) -> bool:
        """Whether another chunk with a policy may be requested of all parts, or of one.

        False while a chunk is pending whose policy acts in another process: the steps would be out of order.
        """
        is_on_node = key in self._on_node
        others = [chunk for chunk in self._pending if (chunk.order.key in self._on_node) != is_on_node]
        return not others and len(self._pending_of(part)) < MAX_CHUNKS

    def begin(self, order: ChunkOrder, part: int | None = None) -> None:
        """Requests a chunk of all parts, or of one. Parts take their chunks in order."""
        if order.request.by_reference:
            check_object_store()
        parts = range(len(self._envs.parts)) if part is None else [part]
        if self._acts_here(order.key):
            self._pending.append(_Pending(order, None, parts))
            return
        self._host.note_absence()
        rows = np.arange(self._envs.num_envs) if part is None else np.array(self._envs.parts[part])
        with uninterrupted():
            ticket = self._envs.post(Command(Op.ROLLOUT, rows, rest=order))
            self._pending.append(_Pending(order, ticket, parts))

    def finish(self, timeout_s: float | None = None, cut: Cut | None = None, part: int | None = None) -> Rollout:
        """Waits for the oldest pending chunk of all parts, or of one, and returns it.

        Args:
            timeout_s: The longest wait; None for no limit.
            cut: Called about every millisecond with the number of steps that the environments have taken together.
                Once it returns True, they end the chunk after their present step.
            part: The part.

        Raises:
            NotReady: It takes longer. The chunk stays pending.
            ConfigError: `cut` is given with environments on nodes.
            Exception: What a policy or an environment raised.
        """
        if cut is not None and self._envs.has_nodes:
            raise ConfigError("`cut` was passed with environments on Ray. Leave it out, or pass num_nodes=0.")
        chunk = self._pending_of(part)[0]
        if chunk.ticket is None:
            self._pending.remove(chunk)
            take = partial(self._host.take, chunk.order, cut=cut or _never)
            return self.take_here(self._host, take, chunk.order.request)
        began_s = time.monotonic()
        deadline = math.inf if timeout_s is None else began_s + timeout_s
        if cut is not None:
            self._wait_or_cut(chunk, deadline, cut)
        if not self._envs.wait(chunk.ticket, max(0.0, deadline - time.monotonic())):
            raise NotReady("the chunk has not been taken in time")
        self._pending.remove(chunk)
        rollout = answer_of(self._envs, chunk.ticket).value
        if isinstance(rollout, Rollout):
            return replace(rollout, waited_s=time.monotonic() - began_s)
        return _joined(rollout, chunk.order.request, time.monotonic() - began_s)

    def finish_any(self, parts: Sequence[int]) -> tuple[int, Rollout]:
        """Waits until one of some parts has finished its oldest pending chunk. Returns the part, and the chunk."""
        oldest = [self._pending_of(part)[0] for part in parts]
        first = parts[0] if oldest[0].ticket is None else self._first_of(parts, oldest)
        return first, self.finish(part=first)

    def _first_of(self, parts: Sequence[int], chunks: Sequence[_Pending]) -> int:
        return parts[self._envs.wait_some([chunk.ticket for chunk in chunks])[0]]

    def take_here(self, host: PolicyHost, take: Callable[[], TakenChunk], request: ChunkRequest) -> Rollout:
        """Returns a chunk for which a policy acts in this process. It logs what was restarted."""
        try:
            taken = take()
        finally:
            log_notes(list(host.take_notes()))
        if self._envs.layout.objects:  # else the caller could change them
            taken = taken._replace(chunk=replace(taken.chunk, last_obs=deepcopy(taken.chunk.last_obs)))
        return _joined([taken], request, taken.times.whole_s, copy=False)

    def _wait_or_cut(self, chunk: _Pending, deadline: float, cut: Cut) -> None:
        """Waits until all parts have taken a chunk, or `cut` returns True: then each ends it after its present step."""
        machine = cast("Machine", self._envs)
        while not machine.wait(chunk.ticket, _CUT_POLL_S) and time.monotonic() < deadline:
            taken = machine.steps_in(chunk.ticket)
            if cut(int(taken @ self._sizes)):
                machine.cut(chunk.ticket)
                return


def _never(taken: int) -> bool:
    return False


def _joined(taken: Sequence[TakenChunk], request: ChunkRequest, waited_s: float, *, copy: bool = True) -> Rollout:
    """Returns the chunks of several processes as one; with `copy` in memory of its own."""
    chunk = join_chunks([each.chunk for each in taken], copy=copy and not request.by_reference)
    num_padded = chunk.valid.size - sum(each.chunk.valid.size for each in taken)
    return as_rollout(chunk, request.by_reference, tuple(each.times for each in taken), waited_s, num_padded)
