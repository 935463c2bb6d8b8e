"""Environments that belong to several children: the workers of a machine, or the nodes of a cluster."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data.columns import merge
from rayvec.data.trees import as_slice, index_tree, tree_leaves, tree_map
from rayvec.errors import duration
from rayvec.fleet.commands import (
    IN_ARRAYS,
    NO_NEWS,
    STEPPING,
    Answer,
    ByRows,
    ChildLost,
    Command,
    Note,
    Op,
    Share,
    Ticket,
)
from rayvec.fleet.deferred_signals import uninterrupted
from rayvec.fleet.restarts import EpisodeState, RestartBudget, count_restarts, seed_of
from rayvec.fleet.spaces import PoolSpaces

logger = logging.getLogger(__name__)

CLOSE_S = 10.0
_POLL_S = 0.1
"""The interval at which a wait looks after children that it does not wait for, and for signals."""
_ANY_POLL_S = 1e-3
_MAX_PLANS = 64
_SHOWN_SEEDS = 8
_ALL = slice(None)
"""The places in a command that nothing waits for but its repetition in a replacement."""
_CALLS, _OF_POLICIES = (Op.CALL, Op.SET), (Op.LOAD, Op.DROP)


class Fleet:
    """Divides commands among children by the environments that they own, and replaces children that are lost.

    Args:
        starting: Yields what executes the commands, workers or nodes, each of which begins to start. `spaces()` waits
            until its environments have been made. `open(arrays, first_id, *shared)` attaches a child to the arrays that
            hold the answers of its environments, or raises why it can't, ``ChildLost`` if the child has died.
            `post(command)` starts a command; those to an environment are executed in their order. `wait(timeout_s)`
            returns the answer to a pending command, or None; it raises ``ChildLost`` if the child has died or takes
            longer than its limits allow. `kill()` ends it at once. `close(timeout_s)` asks it to end, and
            `join(timeout_s)` waits for that, and returns whether it has.
        start: Starts a child in place of child k; None, if lost children are not replaced.
        restarts: How often the environments of a replaced child count as restarted.
        first_id: Global index of the first environment.
        replay_calls: Names of calls and attributes that a replaced child gets again.

    Attributes:
        spaces: The spaces and metadata of the environments.
        bounds: Child k owns the environments ``bounds[k]`` to ``bounds[k + 1] - 1``.
        arrays: The last answer of every environment, and the state of its episode.
        notes: What was replaced, until the next answer is taken.
        parts: The environments of each child.
        num_stepped: How many commands have stepped environments; a reset is none.
        was_reset: Which environments were reset since a policy that acts in this process has seen them, ``bool [N]``.
        kind: What a child is, for notes.

    Raises:
        Exception: Why a child can't start.
    """

    kind = "worker"

    def __init__(
        self,
        starting: Iterable[Any],
        start: Callable[[int, ChildLost], Any] | None = None,
        *,
        restarts: int = 1,
        first_id: int = 0,
        replay_calls: Sequence[str] = (),
    ) -> None:
        self.children, found = started(starting)
        self.spaces = PoolSpaces.join(found)
        self.num_envs, self.bounds = self.spaces.num_envs, np.cumsum([0, *(each.num_envs for each in found)])
        self.first_id = first_id
        self.num_stepped, self.was_reset = 0, np.zeros(self.num_envs, bool)
        self.notes: list[Note] = []
        self._start, self._restarts, self._replay_calls = start, restarts, replay_calls
        self._rows = [slice(*pair) for pair in pairwise(self.bounds.tolist())]
        self.parts = tuple(range(rows.start, rows.stop) for rows in self._rows)
        self._pending = [deque[Ticket]() for _ in self.children]
        self._loaded: list[dict[Any, Command]] = [{} for _ in self.children]
        self._plan = ByRows(partial(_planned, self.bounds), _MAX_PLANS)
        self._budget = RestartBudget()

    def open(self, arrays: dict[str, Any], *shared: Any) -> None:
        """Attaches the children to arrays of N rows: ``obs``, and those of `ENV_ARRAYS`. They get `shared` besides."""
        self.arrays, self._shared = arrays, shared
        shown = {name: arrays[name] for name in ("obs", "episode")} if self._start is not None else {}
        self._last: dict[str, Any] = tree_map(np.copy, shown)
        self._kept = list(zip(tree_leaves(self._last), tree_leaves(shown), strict=True))
        for k in range(len(self.children)):
            self._open(k)

    def _open(self, k: int) -> None:
        """Attaches child k to the arrays. If it is lost meanwhile, it is replaced."""
        arrays = {name: index_tree(array, self._rows[k]) for name, array in self.arrays.items()}
        try:
            self.children[k].open(arrays, self.first_id + int(self.bounds[k]), *self._shared)
        except ChildLost as lost:
            self.replace(k, lost)

    def post(self, command: Command) -> Ticket:
        """Starts a command."""
        if command.op == Op.RESET:
            self.was_reset[command.rows] = True
        elif command.op in STEPPING:
            self.num_stepped += 1
        if command.op == Op.ROLLOUT:
            command = command._replace(rest=self._placed(command.rest, command.rows))
        ticket = Ticket(command, self._plan(command.rows))
        for k, share in ticket.shares.items():
            self.children[k].post(command.of_child(share))
            self._pending[k].append(ticket)
        return ticket

    def _placed(self, request: Any, rows: NDArray[np.int64]) -> Any:
        """Returns the request for a chunk as the children get it."""
        return request

    def wait(self, ticket: Ticket, timeout_s: float = math.inf) -> bool:
        """Waits until all children have answered, for up to `timeout_s`. Returns whether they have.

        A wait for a rollout that Ctrl-C ends may be repeated.
        """
        deadline = time.monotonic() + timeout_s
        is_repeatable = ticket.command.op == Op.ROLLOUT
        while (k := ticket.missing()) is not None:
            poll_s = max(0.0, min(_POLL_S, deadline - time.monotonic()))
            with uninterrupted() if is_repeatable else contextlib.nullcontext():
                if not self._receive(k, poll_s):
                    self._receive_all()
            if k not in ticket.answers and time.monotonic() >= deadline:
                return False
        return True

    def wait_some(self, tickets: Sequence[Ticket], count: int = 1, timeout_s: float = math.inf) -> list[int]:
        """Waits until `count` of some commands are answered, for up to `timeout_s`.

        Returns:
            The indices of those that are answered.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            answered = [index for index, ticket in enumerate(tickets) if self.wait(ticket, 0.0)]
            left_s = deadline - time.monotonic()
            if len(answered) >= count or left_s <= 0:
                return answered
            oldest = next(ticket for index, ticket in enumerate(tickets) if index not in answered)
            self.wait(oldest, min(_ANY_POLL_S, left_s))

    def _receive_all(self) -> None:
        """Receives what children have answered meanwhile, and replaces those that are lost."""
        for k, pending in enumerate(self._pending):
            while pending and self._receive(k, 0.0):
                pass

    def _receive(self, k: int, timeout_s: float) -> bool:
        """Receives the answer of one child to its oldest pending command. Returns whether it has come."""
        try:
            answer = self.children[k].wait(timeout_s)
        except ChildLost as lost:
            self.replace(k, lost)
            return False
        if answer is None:
            return False
        ticket = self._pending[k][answer.place]
        del self._pending[k][answer.place]
        ticket.answers[k] = answer
        self._keep(k, ticket, answer)
        if ticket.shares[k].places is _ALL:  # no caller takes its answer
            self._note_repeated(k, answer)
        return True

    def _keep(self, k: int, ticket: Ticket, answer: Answer) -> None:
        """Remembers an answer: a child may die while it writes the next one."""
        if self._start is None:
            return
        op, rest, rows = ticket.command.op, ticket.command.rest, ticket.shares[k].of_all
        if op in IN_ARRAYS:
            for kept, array in self._kept:
                kept[rows] = array[rows]
        elif op == Op.ROLLOUT and answer.failure is None:  # the child may have begun the next one
            for kept, leaf in zip(
                tree_leaves(self._last["obs"]), tree_leaves(answer.value.chunk.last_obs), strict=True
            ):
                kept[rows] = leaf
            self._last["episode"][rows] = EpisodeState.RUNNING
        elif answer.failure is None and (op in _OF_POLICIES or (op in _CALLS and rest[0] in self._replay_calls)):
            command = ticket.command.of_child(ticket.shares[k])
            key = rest[0] if op in _OF_POLICIES else (op, rest[0], command.rows.tobytes())
            self._loaded[k].pop(key, None)
            if op != Op.DROP:
                self._loaded[k][key] = command

    def take(self, ticket: Ticket) -> Answer:
        """Returns what a command has brought that all its children have answered."""
        if ticket.command.op in IN_ARRAYS and not (self.notes or any(each.is_news for each in ticket.answers.values())):
            return NO_NEWS
        answers = [(k, ticket.answers[k]) for k in ticket.shares]
        notes = (*self.notes, *(note for _, answer in answers for note in answer.notes))
        self.notes = []
        failure = next((answer.failure for _, answer in answers if answer.failure is not None), None)
        infos = [(self._rows[k], answer.infos) for k, answer in answers if answer.infos]
        value: Any = None
        if failure is None and ticket.command.op in (Op.CALL, Op.SET, Op.TIMES, Op.GET_STATE):
            value = [None] * len(ticket.command.rows)
            for k, answer in answers:
                places = np.arange(len(value))[ticket.shares[k].places].tolist()
                for place, of_env in zip(places, answer.value, strict=True):
                    value[place] = of_env
        elif failure is None and ticket.command.op == Op.ROLLOUT:
            value = [answer.value for _, answer in answers]
        return Answer(merge(infos, self.num_envs) if infos else {}, value, failure, notes)

    def run(self, command: Command) -> Answer:
        """Executes a command.

        Raises:
            Exception: What an environment raised that was not restarted. Its ``__cause__`` is an ``EnvError``.
        """
        ticket = self.post(command)
        self.wait(ticket)
        answer = self.take(ticket)
        if answer.failure is not None:
            raise answer.failure.rebuild()
        return answer

    def replace(self, k: int, lost: ChildLost) -> None:
        """Starts a child in place of one that is lost. Its environments resume from their last answers.

        Raises:
            RayvecError: Lost children are not replaced, or this one was lost too often.
        """
        child = self.children[k]
        child.kill()
        if self._start is None:
            raise lost.error
        if not self._budget.spend(k, lost.waited_s):
            raise type(lost.error)(
                f"{child.name} was lost again and again ({RestartBudget.rule()} are allowed): {lost.error}"
            ) from lost.error
        ids = range(self.first_id + self._rows[k].start, self.first_id + self._rows[k].stop)
        self.notes.append(Note(f"restarted {child.name} ({self._described(ids)}: {lost.error}", ids, self.kind))
        try:
            replacement = self._start(k, lost)
        except ChildLost as again:  # the replacement was lost while it started
            self.replace(k, again)
        else:
            self.resume(k, replacement)

    def _note_repeated(self, k: int, answer: Answer) -> None:
        """Notes what went wrong in a command that was repeated in a replacement, or in one that restored states."""
        self.notes += answer.notes
        if (failure := answer.failure) is not None:
            text = f"{failure.where} raised {failure.type_name} in a repeated command: {failure.text}"
            self.notes.append(Note(text, range(0)))

    def resume(self, k: int, child: Any, states: Sequence[Any] | None = None) -> None:
        """Lets a child, which has started, resume the environments of child k from their last answers.

        Args:
            k: Its index.
            child: The child.
            states: States of the environments, so that their episodes continue; without them the episodes are cut.
        """
        rows, episode = self._rows[k], self.arrays["episode"]
        tree_map(lambda array, kept: array.__setitem__(rows, kept[rows]), self.arrays["obs"], self._last["obs"])
        running = self._last["episode"][rows] == EpisodeState.RUNNING
        episode[rows] = np.where(running, EpisodeState.CUT, self._last["episode"][rows])
        again = [*self._loaded[k].values()]
        if states is None:
            count_restarts(self.arrays, rows, self._restarts)
        else:
            again.append(Command(Op.SET_STATE, np.arange(len(states)), rest=(states, None)))
        self.children[k] = child
        self._open(k)
        if self.children[k] is not child:  # it was lost, and its own replacement has resumed them
            return
        asked = [ticket for ticket in self._pending[k] if ticket.shares[k].places is not _ALL]
        self._pending[k].clear()
        self._pending[k].extend(Ticket(each, {k: Share(_ALL, each.rows, rows)}) for each in again)
        self._pending[k].extend(asked)
        for ticket in self._pending[k]:
            child.post(ticket.command.of_child(ticket.shares[k]))

    def _described(self, ids: range) -> str:
        """Returns the indices and seeds of environments, for the log."""
        found = [seed_of(self.arrays, env_id - self.first_id, env_id) for env_id in ids]
        more = ", ..." if len(found) > _SHOWN_SEEDS else ""
        return f"environments {ids[0]} to {ids[-1]}), seeds [{', '.join(map(str, found[:_SHOWN_SEEDS]))}{more}]"

    def close(self, timeout_s: float | None = None) -> None:
        """Closes the environments and ends the children. What runs after `timeout_s` (10 s) is killed."""
        timeout_s = CLOSE_S if timeout_s is None else timeout_s
        self._start = None  # a wait of another thread replaces no child
        deadline = time.monotonic() + timeout_s
        for child in sorted(self.children, key=is_here):  # the others close while the last one does
            child.close(timeout_s)
        killed = [child.name for child in self.children if not child.join(max(0.0, deadline - time.monotonic()))]
        if killed and timeout_s > 0:
            names = ", ".join(killed)
            logger.warning("killed after %s, since their environments had not closed: %s", duration(timeout_s), names)
        self.children = []


def started(starting: Iterable[Any]) -> tuple[list[Any], list[PoolSpaces]]:
    """Starts children. Returns them and their spaces, once all have started. If one can't, all are killed.

    Raises:
        Exception: Why it can't.
    """
    children: list[Any] = []
    try:
        for child in starting:
            children.append(child)
        return children, [child.spaces() for child in children]
    except BaseException as error:
        for child in children:
            with contextlib.suppress(Exception):
                child.kill()
        if isinstance(error, ChildLost):
            raise error.error from error
        raise


def is_here(child: Any) -> bool:
    """Whether a child is a node of this process, which starts and closes while its methods are called."""
    return getattr(child, "transport", "") == "shm"


def _planned(bounds: NDArray[np.int64], rows: bytes) -> dict[int, Share]:
    """Returns which environments belong to which child."""
    of_fleet = np.frombuffer(rows, np.int64)
    owners, plan = np.searchsorted(bounds, of_fleet, side="right") - 1, {}
    for k in np.unique(owners).tolist():
        places = np.flatnonzero(owners == k)
        plan[k] = Share(as_slice(places), of_fleet[places] - bounds[k], as_slice(of_fleet[places]))
    return plan
