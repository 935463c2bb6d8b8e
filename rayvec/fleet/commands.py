"""What is asked of environments, and what they answer: the same from the driver down to a slice of environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rayvec.data.columns import Columns
from rayvec.data.trees import Tree, tree_map
from rayvec.errors import RayvecError, RemoteFailure

_T = TypeVar("_T")


class Op:
    """What a command asks for. What `Command.rest` holds is in parentheses.

    These are no members of an enum, because looking one up takes as long as a tenth of a step.
    """

    STEP = 0
    """A step of each environment, with its action (nothing)."""
    RESET = 1
    """A reset of each environment (a list with the seed or None of each, and the options)."""
    BEGIN = 2
    """A reset of those environments that are between two episodes (nothing)."""
    ROLLOUT = 3
    """A chunk of steps with a policy (what the policy host asks for)."""
    CALL = 4
    """A call of a method, or the value of an attribute, of each environment (name, args, kwargs)."""
    SET = 5
    """A new value of an attribute of each environment (name, a list with the value of each)."""
    LOAD = 6
    """A policy (its key, the pickled policy; nodes also get whether it acts in the node's process)."""
    DROP = 7
    """The end of a policy (its key alone)."""
    TIMES = 8
    """How long steps and resets have taken (nothing)."""
    GET_STATE = 9
    """What the episode of each environment needs to continue elsewhere (nothing)."""
    SET_STATE = 10
    """A state of each environment that GET_STATE has returned (a list with the state of each, None)."""


STEPPING = (Op.STEP, Op.RESET, Op.BEGIN, Op.ROLLOUT, Op.SET_STATE)
"""The operations after which environments show other observations."""
IN_ARRAYS = (Op.STEP, Op.RESET, Op.BEGIN, Op.SET_STATE)
"""The operations whose answers lie in the arrays: that to a chunk does not."""


class Autoreset(IntEnum):
    """When an environment is reset after its episode has ended.

    The names are those of Gymnasium's ``AutoresetMode``. The numbers are part of the frame format.
    """

    NEXT_STEP = 0
    """The next step resets the environment and ignores the action."""
    SAME_STEP = 1
    """The step that ends the episode also resets the environment. The info holds the final observation."""
    DISABLED = 2
    """Only an explicit call of ``reset`` resets the environment."""


class Share(NamedTuple):
    """The environments of a command that belong to one child.

    Attributes:
        places: Where they stand among the rows of the command, a slice if these are consecutive.
        rows: Their rows in the child, ``int64 [k]``.
        of_all: Their rows in the fleet, a slice if these are consecutive.
    """

    places: Any
    rows: NDArray[np.int64]
    of_all: Any


class Command(NamedTuple):
    """Something that some environments are asked to do. It may be asked twice, if a child dies in between.

    Attributes:
        op: What to do.
        rows: Which environments, ``int64 [k]``, without repetition. They are not written afterwards.
        actions: For a step, tree of ``[k, *act_shape]`` in the order of `rows`.
        mode: For a step, when environments are reset whose episode has ended.
        rest: What else the operation needs.
    """

    op: int
    rows: NDArray[np.int64]
    actions: Tree = None
    mode: Autoreset = Autoreset.NEXT_STEP
    rest: Any = None

    def of_child(self, share: Share) -> Command:
        """Returns the command for the environments of one child."""
        if self.op == Op.STEP:
            return Command(Op.STEP, share.rows, tree_map(itemgetter(share.places), self.actions), self.mode)
        rest = self.rest
        if self.op in (Op.RESET, Op.SET, Op.SET_STATE):
            places = np.arange(len(self.rows))[share.places].tolist()
            which = 1 if self.op == Op.SET else 0
            own = [rest[which][place] for place in places]
            rest = (rest[0], own) if which else (own, rest[1])
        return self._replace(rows=share.rows, rest=rest)


def is_like(command: Command, last: Command | None) -> bool:
    """Whether a command is a step that differs from the last one in the values of its actions alone.

    A fleet passes the same rows again.
    """
    if last is None or command.rows is not last.rows or command.mode != last.mode:
        return False
    new, old = command.actions, last.actions
    if type(new) is not np.ndarray or type(old) is not np.ndarray or new.dtype.hasobject:
        return False
    return bool(new.dtype == old.dtype and new.shape == old.shape)


class ByRows(Generic[_T]):
    """Computes something of the rows of commands, and remembers it: most commands have the same rows again.

    Args:
        function: Of the bytes of the rows.
        size: For how many different rows it remembers.
    """

    def __init__(self, function: Callable[[bytes], _T], size: int) -> None:
        self._function = lru_cache(size)(function)
        self._last: tuple[Any, Any] = None, None

    def __call__(self, rows: NDArray[np.int64]) -> _T:
        """Returns it for the rows of a command."""
        last = self._last  # another thread may call too
        if rows is not last[0]:
            last = self._last = rows, self._function(rows.tobytes())
        found: _T = last[1]
        return found


class Note(NamedTuple):
    """Says that environments were restarted, and why.

    Attributes:
        text: For the log.
        env_ids: Global indices of the environments.
        replaced: What was replaced, ``"worker"`` or ``"node"``; "" for the environment alone.
    """

    text: str
    env_ids: range
    replaced: str = ""


class Answer(NamedTuple):
    """What a command has brought, beside the arrays: these hold observations, rewards and the ends of episodes.

    Attributes:
        infos: The infos of the environments, with a row for each of the child's, not only for those of the command.
        value: The results of a call, the chunk of a rollout.
        failure: The first exception of an environment that was not restarted.
        notes: What was restarted.
        place: The place of its command among those that are pending in the child.
        objects: The leaves of the observations that are objects, on their way from another process.
    """

    infos: Columns = {}  # noqa: RUF012  # never written
    value: Any = None
    failure: RemoteFailure | None = None
    notes: tuple[Note, ...] = ()
    place: int = 0
    objects: Sequence[NDArray[Any]] = ()

    @property
    def is_news(self) -> bool:
        """Whether it holds anything."""
        return bool(self.infos or self.notes or self.failure or self.objects) or self.value is not None


NO_NEWS = Answer()
"""The answer to most steps: all results lie in the arrays."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A command that was posted. Whoever holds the ticket may wait for it.

    Attributes:
        command: The command.
        shares: The environments of each child that executes it, by the child's index.
        answers: What these have answered so far.
    """

    command: Command
    shares: dict[int, Share]
    answers: dict[int, Answer] = field(default_factory=dict)

    def missing(self) -> int | None:
        """Returns a child that has not answered, None if all have: the last to start, which usually ends last."""
        for k in reversed(self.shares.keys()):
            if k not in self.answers:
                return k
        return None


class ChildLost(Exception):
    """A child has died, or hangs.

    Attributes:
        error: What is raised where it is not replaced.
        waited_s: Seconds that passed until a hang was noticed.
    """

    def __init__(self, error: RayvecError, waited_s: float = 0.0) -> None:
        super().__init__(str(error))
        self.error, self.waited_s = error, waited_s
