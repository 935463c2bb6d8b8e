"""One slice: it executes commands for some environments in this process, and restarts those that raise.

An episode's end is decided in :meth:`Slice._step_row`. After an environment was restarted, its episode is CUT or has
ENDED, and the same step of its row runs again: a cut episode then ends without a step, at the last true observation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from rayvec.data.columns import Columns, columns_of
from rayvec.data.layouts import ArrayLayout, index_tree, split_actions, tree_writer
from rayvec.envs.factory import EnvFactory, check_env
from rayvec.envs.failures import (
    FAILURES,
    captured,
    copied_shallowly,
    copied_value,
    end_if_forked,
    failures_ignored,
    is_ctrl_c,
)
from rayvec.envs.spaces import PoolSpaces
from rayvec.errors import ConfigError, EnvError, RemoteFailure
from rayvec.fleet.commands import NO_NEWS, Answer, Autoreset, Command, Op
from rayvec.fleet.restarts import (
    ENV_ARRAYS,
    NO_RESTARTS,
    RESTARTED,
    EpisodeState,
    RestartBudget,
    RestartPolicy,
    seed_of,
    store_seed,
)

__all__ = ["Slice", "own_arrays"]

NEW, RUNNING, ENDED, CUT = map(int, EpisodeState)
_IMMUTABLE = (bool, int, float, str, bytes, type(None), np.generic)
_NOTE_CHARS = 1000
"""How much of an exception's text is in the log line of a restart."""


def own_arrays(layout: ArrayLayout, num_envs: int) -> dict[str, Any]:
    """Allocates the arrays of a slice or a fleet in this process."""
    arrays: dict[str, Any] = {name: np.zeros(num_envs, dtype) for name, dtype in ENV_ARRAYS.items()}
    return {**arrays, "obs": layout.empty((num_envs,))}


class Slice:
    """Executes commands for environments that step one after another.

    A *unit* is what fails and restarts as a whole: an environment.

    Args:
        factory: Makes exactly the units of this slice.
        first_id: Global index of the first environment, for errors and seeds.
        where: Name of this process, for errors.
        restart_policy: Whether units that raise are restarted.
        infos_stay: Whether infos are read in this process: those that can't be copied are then returned themselves.

    Attributes:
        spaces: The spaces and metadata of the environments.
        num_envs: How many environments there are.
        native_mode: The autoreset mode of native sub-batches; None for ordinary environments.
        unit_bounds: Bounds of the units, ``int64 [units + 1]``.
        progress: ``int64 [1]``, odd while a command is executed. It changes with each command.

    Raises:
        Exception: What the constructor of an environment raised. Its ``__cause__`` is an ``EnvError``.
    """

    native_mode: Autoreset | None = None
    _unit_kind = "environment"

    def __init__(
        self,
        factory: EnvFactory,
        first_id: int = 0,
        where: str = "this process",
        restart_policy: RestartPolicy = NO_RESTARTS,
        *,
        infos_stay: bool = False,
    ) -> None:
        self.first_id, self._where, self._infos_stay = first_id, where, infos_stay
        self._factory, self._owner = factory, os.getpid()
        self._restart, self._budget = restart_policy.restart, RestartBudget()
        self._envs: list[Any] = []
        try:
            for unit in range(factory.num_envs):
                self._envs.append(self._make(unit))
            self._check_distinct()
            self._set_up()
            end_if_forked(self._owner)
        except FAILURES as error:
            end_if_forked(self._owner, error)
            unit = len(self._envs)
            first = first_id if self.native_mode is None else 0
            name = where if unit == factory.num_envs else f"{where}, {self._unit_kind} {first + unit}"
            failure = captured(error, name)
            with failures_ignored():
                self.close()
            raise failure.rebuild() from failure.cause()
        self._notes: list[str] = []
        self.progress: Any = np.zeros(1, np.int64)

    def _make(self, unit: int) -> Any:
        return check_env(self._factory.make(unit))

    def _check_distinct(self) -> None:
        """Raises ``ConfigError`` if two units are, or wrap, the same object: each would step the other's episode."""
        made = [getattr(env, "unwrapped", env) for env in self._envs]
        if len(set(map(id, made))) < len(made):
            raise ConfigError(
                f"The callables have made the same environment more than once, among {len(made)} of a process. "
                "Make it inside the callable: lambda: gymnasium.make(...)."
            )

    def _set_up(self) -> None:
        """Reads the spaces and sizes of the units."""
        self.num_envs = len(self._envs)
        self.spaces = PoolSpaces.join(
            [
                (1, PoolSpaces(env.observation_space, env.action_space, dict(env.metadata), env.render_mode))
                for env in self._envs
            ]
        )
        self.unit_bounds = np.arange(self.num_envs + 1)

    def open(self, layout: ArrayLayout, arrays: dict[str, Any]) -> None:
        """Attaches the arrays into which the slice writes: ``obs``, and those of `ENV_ARRAYS`.

        They outlive this process. A replacement resumes from the seeds and the states of episodes that they hold.
        """
        self.layout, self.arrays = layout, arrays
        self._obs, self._write_obs = arrays["obs"], tree_writer(arrays["obs"])
        self._rew, self._terminated, self._truncated = (arrays[name] for name in ("rew", "terminated", "truncated"))
        self._episode: Any = arrays["episode"].data  # a memoryview is three times as fast
        self._to_seed = set(np.flatnonzero(arrays["restarts"]).tolist())
        self._rows_key, self._row_list = b"", list[int]()  # of the last command

    def execute(self, command: Command) -> Answer:
        """Executes a command. All environments complete it, also if one raises."""
        self._infos: list[tuple[Any, Any]] = []
        self._failure: RemoteFailure | None = None
        self.progress[0] += 1
        key = command.rows.tobytes()
        if key != self._rows_key:
            self._rows_key, self._row_list = key, command.rows.tolist()
        value = self._execute(command, self._row_list)
        self.progress[0] += 1
        if not (self._infos or self._failure or self._notes or value is not None):
            return NO_NEWS
        notes, self._notes = tuple(self._notes), []
        return Answer(self._columns() if self._infos else {}, value, self._failure, notes)

    def _execute(self, command: Command, rows: list[int]) -> Any:
        if command.op == Op.STEP:
            return self._step(rows, command.actions, command.mode)
        if command.op == Op.RESET:
            return self._reset(rows, *command.rest)
        if command.op == Op.BEGIN:
            return self._begin(rows)
        call = self._call if command.op == Op.CALL else self._set
        return call(rows, *command.rest)

    def _step(self, rows: list[int], actions: Any, mode: Autoreset) -> None:
        """Steps environments."""
        step_row = self._step_row
        for row, action in zip(rows, split_actions(actions, len(rows)), strict=True):
            try:
                step_row(row, action, mode)
            except FAILURES as error:
                self._recover(row, error, partial(step_row, row, action, mode))

    def _step_row(self, row: int, action: Any, mode: Autoreset) -> None:
        """Steps one environment, or does in place of the step what the state of its episode asks for."""
        if self._episode[row] != RUNNING and self._step_is_replaced(row, mode):
            return
        result = self._envs[row].step(action)
        try:
            obs, reward, terminated, truncated, info = result
        except (TypeError, ValueError) as error:
            raise _not_api("step", "obs, reward, terminated, truncated, info", result) from error
        try:
            self._rew[row] = reward
        except (TypeError, ValueError) as error:
            raise _no_number(reward) from error
        self._terminated[row], self._truncated[row] = terminated, truncated
        is_over = terminated or truncated
        if is_over and mode == Autoreset.SAME_STEP:
            final = {"final_obs": copied_value(obs), "final_info": self._copied(info)}
            self._episode[row] = ENDED
            self._infos.append((row, final))
            self._reset_row(row)
            return
        self._write_obs(row, obs)
        if is_over:
            self._episode[row] = ENDED
        if info or not isinstance(info, dict):
            self._infos.append((row, self._copied(info)))

    def _step_is_replaced(self, row: int, mode: Autoreset) -> bool:
        """Ends a cut episode, or begins the next one. Returns False if neither is due: the episode begins to run."""
        state = self._episode[row]
        if state == CUT:
            self._end_cut(row, mode)
        elif state == ENDED and mode == Autoreset.NEXT_STEP:
            self._reset_row(row)
            self._clear(row)
        elif state == ENDED and mode == Autoreset.SAME_STEP:  # the reset within the step has failed
            self._reset_row(row)
        else:
            self._episode[row] = RUNNING
            return False
        return True

    def _end_cut(self, row: int, mode: Autoreset) -> None:
        """Ends an interrupted episode without a step: the last true observation, reward 0, truncated."""
        mark = {RESTARTED: True}
        self._rew[row], self._terminated[row], self._truncated[row] = 0.0, False, True
        self._episode[row] = ENDED
        if mode == Autoreset.SAME_STEP:
            final_obs = copied_value(index_tree(self._obs, row))
            self._infos += [(row, {"final_obs": final_obs, "final_info": mark}), (row, mark)]
            self._reset_row(row)
        else:
            self._infos.append((row, mark))

    def _reset_row(self, row: int, **kwargs: Any) -> None:
        """Resets one environment. The first reset after a restart has a seed of its own."""
        if row in self._to_seed and kwargs.get("seed") is None:
            seed = seed_of(self.arrays, row, self.first_id + row)
            kwargs |= {} if seed is None else {"seed": seed}
        self._to_seed.discard(row)
        obs, info = _reset_result(self._envs[row].reset(**kwargs))
        self._write_obs(row, obs)
        self._episode[row] = RUNNING
        if info or not isinstance(info, dict):
            self._infos.append((row, self._copied(info)))

    def _clear(self, row: Any) -> None:
        self._rew[row] = 0.0
        self._terminated[row] = self._truncated[row] = False

    def _reset(self, rows: Sequence[int], seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> None:
        """Resets environments, each with its seed."""
        for row, seed in zip(rows, seeds, strict=True):
            if seed is not None:
                store_seed(self.arrays, row, seed)
                self._to_seed.discard(row)
            self._episode[row] = ENDED
            self._clear(row)
            reset = partial(self._reset_row, row, options=None if options is None else dict(options))
            try:
                reset(seed=seed)
            except FAILURES as error:
                self._recover(row, error, partial(reset, seed=None))

    def _begin(self, rows: Sequence[int]) -> None:
        """Resets those environments that are between two episodes."""
        for row in rows:
            if self._episode[row] != RUNNING:
                if self._episode[row] == CUT:
                    self._infos.append((row, {RESTARTED: True}))
                self._reset([row], [None], None)

    def _recover(self, unit: int, error: BaseException, again: Callable[[], None]) -> None:
        """Restarts a unit after an error and repeats what it was doing.

        If that raises too, it tries again until it succeeds or the restart budget is spent.
        """
        while True:
            failure = self._captured(unit, error)
            if not self._restart or isinstance(error, ConfigError):
                self._failure = self._failure or failure
                return
            if not self._budget.spend(unit):
                self._failure = self._failure or self._too_often(failure)
                return
            try:
                with failures_ignored():
                    self._envs[unit].close()
                self._note_restart(unit, failure)
                self._envs[unit] = self._make(unit)
                self._check_distinct()
                again()
                return
            except FAILURES as raised:
                error = raised

    def _captured(self, unit: int, error: BaseException) -> RemoteFailure:
        end_if_forked(self._owner, error)
        return captured(error, f"{self._where}, {self._name(unit)}")

    def _name(self, unit: int) -> str:
        env_id = self.first_id + unit
        return f"environment {env_id}, seed {seed_of(self.arrays, unit, env_id)}"

    def _note_restart(self, unit: int, failure: RemoteFailure) -> None:
        """Cuts the episodes of a unit that is restarted, and notes why."""
        rows = range(*self.unit_bounds[unit : unit + 2].tolist())
        text = " ".join(failure.text.split())[:_NOTE_CHARS]
        self._notes.append(f"{failure.where} raised {failure.type_name}: {text}; restarted")
        self._to_seed.update(rows)
        for row in rows:
            self.arrays["restarts"][row] += 1
            if self._episode[row] == RUNNING:
                self._episode[row] = CUT

    def _too_often(self, failure: RemoteFailure) -> RemoteFailure:
        error = EnvError(
            f"The same {self._unit_kind} raised again and again: {failure.type_name}: {failure.text}. The limit is "
            f"{RestartBudget.rule()}. Correct the environment. Its traceback:\n\n{failure.remote_traceback}"
        )
        return RemoteFailure.capture(error, failure.where)

    def _copied(self, info: Any) -> dict[Any, Any]:
        """Copies an info: environments may modify it after they return it."""
        if not hasattr(info, "items"):
            raise EnvError(f"The info of a step or reset was {type(info).__name__}. It must be a dict, maybe empty.")
        return {
            key: value if isinstance(value, _IMMUTABLE) else self._info_value(key, value) for key, value in info.items()
        }

    def _info_value(self, key: Any, value: Any) -> Any:
        try:
            return copied_value(value)
        except Exception as error:
            if self._infos_stay:
                return copied_shallowly(value)
            raise TypeError(
                f"The info {key!r} holds a {type(value).__name__}, which can't be copied ({error}). Infos are pickled "
                "and sent to the driver: leave it out, or pass num_nodes=0 and workers_per_node=0."
            ) from error

    def _columns(self) -> Columns:
        return columns_of(self._infos, self.num_envs)

    def _call(self, rows: Sequence[int], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Calls a method, or reads an attribute, of environments, through their wrappers."""
        values = []
        for row in rows:
            try:
                attribute = self._envs[row].get_wrapper_attr(name)
                values.append(attribute(*args, **kwargs) if callable(attribute) else attribute)
            except FAILURES as error:
                self._failure = self._captured(row, error)
                break
        return values

    def _set(self, rows: Sequence[int], name: str, values: Sequence[Any]) -> Any:
        """Sets an attribute of environments, through their wrappers."""
        for row, value in zip(rows, values, strict=True):
            try:
                self._envs[row].set_wrapper_attr(name, value)
            except FAILURES as error:
                self._failure = self._captured(row, error)
                break
        return [None] * len(rows)

    def close(self) -> None:
        """Closes all environments. If some raise, it raises the first error after all are closed."""
        errors: list[BaseException] = []
        while self._envs:
            try:
                self._envs.pop().close()
            except FAILURES as error:
                if is_ctrl_c(error):
                    raise
                errors.append(error)
        if errors:
            raise errors[0]


def _reset_result(result: Any) -> Any:
    if isinstance(result, np.ndarray | dict):  # an observation alone; one of two parts would be unpacked
        raise _not_api("reset", "obs, info", result)
    try:
        obs, info = result
    except (TypeError, ValueError) as error:
        raise _not_api("reset", "obs, info", result) from error
    return obs, info


def _not_api(method: str, expected: str, got: Any) -> EnvError:
    """Returns the error for a result that is not that of a Gymnasium environment."""
    described = f"{len(got)} values" if isinstance(got, tuple | list) else type(got).__name__
    return EnvError(
        f"{method}() of an environment has returned {described}. gymnasium.Env returns {expected}. Correct the "
        "environment, or wrap one of the old gym library, for example with shimmy."
    )


def _no_number(reward: Any) -> EnvError:
    """Returns the error for a reward that is no number."""
    size = reward.size if isinstance(reward, np.ndarray) else len(reward) if isinstance(reward, list | tuple) else 1
    got = f"an array of shape {reward.shape}" if isinstance(reward, np.ndarray) else f"{reward!r:.80}"
    combine = "Combine its numbers into one, for example with mo_gymnasium.wrappers.LinearReward."
    remedy = combine if size > 1 else "Let step() return float(reward)."
    return EnvError(f"The reward of a step is {got}. It must be one number. {remedy}")
