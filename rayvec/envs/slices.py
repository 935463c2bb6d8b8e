"""One slice: it executes commands for some environments in this process, and restarts those that raise.

An episode's end is decided in :meth:`Slice._step`. After an environment was restarted, its episode is CUT or has
ENDED, and the same step of its row runs again: a cut episode then ends without a step, at the last true observation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np

from rayvec.data.columns import Columns, columns_of
from rayvec.data.trees import copied, index_tree, split_actions, tree_map, tree_writer
from rayvec.envs.factory import EnvFactory
from rayvec.envs.failures import FAILURES, captured, failures_ignored, is_ctrl_c, own_info, values_of
from rayvec.envs.spare import Spare
from rayvec.envs.times import Times
from rayvec.errors import ConfigError, EnvError, RemoteFailure
from rayvec.fleet.commands import NO_NEWS, Answer, Autoreset, Command, Note, Op
from rayvec.fleet.restarts import (
    DEFAULT_RULES,
    RESTARTED,
    EnvRules,
    EpisodeState,
    RestartBudget,
    count_restarts,
    episode_of,
    restart_seed,
    restore_episode,
    seed_of,
    store_seeds,
)
from rayvec.fleet.spaces import PoolSpaces
from rayvec.wrappers.save_state import set_state, state_of

logger = logging.getLogger(__name__)

NEW, RUNNING, ENDED, CUT = map(int, EpisodeState)
_QUERIES = (Op.CALL, Op.SET, Op.GET_STATE)
"""The operations that an environment may refuse by raising: its episode continues."""
_SPARE_SEED = 1 << 32
"""Stands for the number of restarts in the seed of the spare environment."""
_FOLD_EVERY = 1 << 13
"""Of which number `progress` is a multiple when durations are counted, so that lists of them stay short."""
_NOTE_CHARS = 1000
"""How much of an exception's text is in the log line of a restart."""


class Slice:
    """Executes commands for environments that step one after another.

    A *unit* is what fails and restarts as a whole: an environment.

    Args:
        factory: Makes exactly the units of this slice.
        first_id: Global index of the first environment, for errors and seeds.
        where: Name of this process, for errors.
        env_rules: What happens to environments that raise, hang or have run for long, and their limits.

    Attributes:
        spaces: The spaces and metadata of the environments.
        num_envs: How many environments there are.
        unit_bounds: Bounds of the units, ``int64 [units + 1]``.
        progress: ``int64 [1]``, odd while a command is executed; negative while it makes an environment again.

    Raises:
        Exception: What the constructor of an environment raised. Its ``__cause__`` is an ``EnvError``.
    """

    _unit_kind = "environment"

    def __init__(
        self,
        factory: EnvFactory,
        first_id: int = 0,
        where: str = "this process",
        env_rules: EnvRules = DEFAULT_RULES,
    ) -> None:
        self.first_id, self._where, self._factory = first_id, where, factory
        self._rules, self._budget, self._num_finished = env_rules, RestartBudget(), [0] * factory.num_envs
        self._spare: Spare | None = None
        self._calls: list[dict[Any, Callable[[], None]]] = [{} for _ in range(factory.num_envs)]  # to repeat, of a unit
        self._envs: list[Any] = []
        self._notes: list[Note] = []
        self._times = [(Times(), Times()) for _ in factory.env_fns]  # of the steps and of the resets of each unit
        self.progress: Any = np.zeros(1, np.int64).data
        self._functions: dict[int, Callable[[int, Any, Command], Any]] = {
            Op.STEP: self._step,
            Op.RESET: self._reset,
            Op.BEGIN: self._begin,
            Op.CALL: self._call,
            Op.SET: self._set,
            Op.GET_STATE: self._get_state,
            Op.SET_STATE: self._set_state,
        }
        try:
            for unit in range(factory.num_envs):
                self._envs.append(factory.make(unit))
            if env_rules.spare_envs:
                self._spare = Spare(partial(factory.make, 0))
            self._check_distinct()
            self._set_up()
            self.num_envs = self.spaces.num_envs
        except FAILURES as error:
            unit = len(self._envs)
            failure = captured(
                error, where if unit == factory.num_envs else f"{where}, {self._unit_kind} {first_id + unit}"
            )
            self.close()
            raise failure.rebuild() from failure.cause()

    def _check_distinct(self) -> None:
        """Raises ``ConfigError`` if two units are, or wrap, the same object: each would step the other's episode."""
        envs = self._envs if self._spare is None else [*self._envs, self._spare.env]
        if len({id(getattr(env, "unwrapped", env)) for env in envs}) < len(envs):
            raise ConfigError(
                f"The callables have made the same environment more than once, among {len(self._envs)} of a process. "
                "Make it inside the callable: lambda: gymnasium.make(...)."
            )

    def _set_up(self) -> None:
        """Reads the spaces and sizes of the units."""
        self.spaces = PoolSpaces.join(
            [
                PoolSpaces(env.observation_space, env.action_space, dict(env.metadata), env.render_mode)
                for env in self._envs
            ]
        )
        self.unit_bounds = np.arange(len(self._envs) + 1)

    def open(self, arrays: dict[str, Any]) -> None:
        """Attaches the arrays into which the slice writes: ``obs``, and those of `ENV_ARRAYS`.

        They outlive a worker. A replacement resumes from the seeds and the states of episodes that they hold.
        """
        self.arrays, self._obs, self._write_obs = arrays, arrays["obs"], tree_writer(arrays["obs"])
        results: list[Any] = [arrays[name].data for name in ("rew", "terminated", "truncated", "episode", "to_seed")]
        self._rew, self._terminated, self._truncated, self._episode, self._to_seed = results  # twice as fast as arrays
        self._unit_rows = [slice(*bounds) for bounds in pairwise(self.unit_bounds.tolist())]

    def execute(self, command: Command) -> Answer:
        """Executes a command. All environments complete it, also if one raises."""
        if command.op == Op.TIMES or self.progress[0] % _FOLD_EVERY == 0:
            times = [(*steps.fold(), *resets.fold()) for steps, resets in self._times]
            if command.op == Op.TIMES:
                units = np.searchsorted(self.unit_bounds, command.rows, side="right") - 1
                return Answer(value=[times[unit] for unit in units.tolist()])
        self._infos: list[tuple[Any, Any]] = []
        self._values: dict[int, Any] = {}
        self._failure: RemoteFailure | None = None
        if command.op == Op.RESET:
            store_seeds(self.arrays, command.rows, command.rest[0])
        self.progress[0] += 1
        function, is_call = self._functions[command.op], command.op in (Op.CALL, Op.SET)
        has_values = is_call or command.op == Op.GET_STATE
        for unit, argument in self._divided(command):
            try:
                function(unit, argument, command)
            except FAILURES as error:
                restores = command.op == Op.SET_STATE  # another environment is cut, and not restored again
                again = (lambda: None) if restores else partial(function, unit, argument, command)
                self._recover(unit, error, again, command.op)
            else:
                if is_call and command.rest[0] in self._rules.replay_calls:
                    self._calls[unit].pop(name := (command.op, command.rest[0]), None)
                    self._calls[unit][name] = partial(function, unit, argument, command)
        self.progress[0] = abs(self.progress[0]) + 1
        value = [self._values.get(row) for row in command.rows.tolist()] if has_values else None
        if not (self._infos or self._failure or self._notes or value is not None):
            return NO_NEWS
        notes, self._notes = tuple(self._notes), []
        return Answer(self._columns() if self._infos else {}, value, self._failure, notes)

    def _divided(self, command: Command) -> Iterable[tuple[int, Any]]:
        """Returns the units of a command, each with its action, seed or value."""
        rows = command.rows.tolist()
        if command.op == Op.STEP:  # environments may keep a reference to their actions
            return zip(rows, split_actions(tree_map(copied, command.actions), len(rows)), strict=True)
        if command.op in (Op.RESET, Op.SET_STATE):
            return zip(rows, command.rest[0], strict=True)
        return zip(rows, command.rest[1] if command.op == Op.SET else rows, strict=True)

    def _step(self, row: int, action: Any, command: Command) -> None:
        """Steps one environment, or does in place of the step what the state of its episode asks for."""
        if self._episode[row] != RUNNING and self._step_is_replaced(row, command.mode):
            return
        began_s = perf_counter()
        result = self._envs[row].step(action)
        self._times[row][0].recent.append(perf_counter() - began_s)
        try:
            obs, reward, terminated, truncated, info = result
        except (TypeError, ValueError):
            obs, reward, terminated, truncated, info = values_of("step", 5, result)  # which says what is wrong
        try:
            self._rew[row] = reward
        except (TypeError, ValueError):
            self._convert_reward(row, reward)
        self._terminated[row], self._truncated[row] = terminated, truncated
        ends = terminated or truncated
        resets = ends and command.mode == Autoreset.SAME_STEP
        if resets:
            self._infos.append((row, {"final_obs": copied(obs), "final_info": own_info(info)}))
        else:
            self._write_obs(row, obs)
            if info or type(info) is not dict:
                self._infos.append((row, own_info(info)))
        if ends:
            self._episode[row] = ENDED
            self._num_finished[row] += 1
            if resets:
                self._reset_unit(row)

    def _convert_reward(self, row: int, reward: Any) -> None:
        """Stores a reward that is no number as NumPy converts it: None is NaN."""
        try:
            self.arrays["rew"][row] = reward
        except (TypeError, ValueError) as error:
            raise EnvError(
                f"The reward of a step is {reward!r:.80}. It must be one number: let step() return float(reward), or "
                "combine several, for example with mo_gymnasium.wrappers.LinearReward."
            ) from error

    def _step_is_replaced(self, unit: int, mode: Autoreset) -> bool:
        """Ends a cut episode, or begins the next one. Returns False if neither is due: the episode begins to run."""
        rows = self._unit_rows[unit]
        state = self._episode[rows.start]
        if state == CUT:  # ends without a step: the last true observation, reward 0, truncated
            self._clear(rows)
            self.arrays["truncated"][rows] = True
            self.arrays["episode"][rows] = ENDED
            self._report_interrupted(unit, mode)
            if mode == Autoreset.SAME_STEP:
                self._reset_unit(unit)
        elif state == ENDED and mode != Autoreset.DISABLED:  # in SAME_STEP, the reset within the step has failed
            self._reset_unit(unit)
            if mode == Autoreset.NEXT_STEP:
                self._clear(rows)
        else:
            self.arrays["episode"][rows] = RUNNING
            return False
        return True

    def _report_interrupted(self, row: int, mode: Autoreset) -> None:
        mark = {RESTARTED: True}
        self._infos.append((row, mark))
        if mode == Autoreset.SAME_STEP:
            self._infos.append((row, {"final_obs": copied(index_tree(self._obs, row)), "final_info": mark}))

    def _reset_unit(self, unit: int, seed: int | None = None, options: Any = None) -> None:
        """Resets one environment. The first reset after a restart has a seed of its own."""
        if self._rules.max_episodes and self._num_finished[unit] >= self._rules.max_episodes:
            self._make_again(unit)
            if seed is None:
                count_restarts(self.arrays, unit)
        if self._to_seed[unit]:
            seed = seed_of(self.arrays, unit, self.first_id + unit)
            self._to_seed[unit] = False
        began_s = perf_counter()
        result = self._reset_env(unit, seed, options)
        self._times[unit][1].recent.append(perf_counter() - began_s)
        obs, info = values_of("reset", 2, result)
        self._write_obs(unit, obs)
        self._episode[unit] = RUNNING
        if info or type(info) is not dict:
            self._infos.append((unit, own_info(info)))

    def _reset_env(self, unit: int, seed: int | None, options: Any) -> Any:
        """Resets an environment, or takes the spare one, which has been reset, in its place."""
        kwargs = {name: value for name, value in (("seed", seed), ("options", options)) if value is not None}
        if self._spare is None or kwargs:
            result = self._envs[unit].reset(**kwargs)
            if self._spare is not None and seed is not None and unit == 0:
                self._spare.begin(restart_seed(seed, self.first_id, _SPARE_SEED))
            return result
        self._envs[unit], result = self._spare.swap(self._envs[unit])
        self._num_finished[unit], self._spare.num_finished = self._spare.num_finished, self._num_finished[unit]
        self._repeat_calls(unit)
        return result

    def _clear(self, row: Any) -> None:
        for name in ("rew", "terminated", "truncated"):
            self.arrays[name][row] = 0

    def _reset(self, row: int, seed: int | None, command: Command) -> None:
        """Resets an environment with a seed."""
        options = command.rest and command.rest[1]
        self._episode[row] = ENDED
        self._clear(row)
        self._reset_unit(row, seed=seed, options=None if options is None else dict(options))

    def _begin(self, row: int, _: Any, command: Command) -> None:
        """Resets an environment that is between two episodes."""
        if self._episode[row] != RUNNING:
            if self._episode[row] == CUT:
                self._report_interrupted(row, command.mode)
            self._reset(row, None, command)

    def _call(self, row: int, _: Any, command: Command) -> None:
        """Calls a method, or reads an attribute, of an environment, through its wrappers."""
        name, args, kwargs = command.rest
        attribute = self._envs[row].get_wrapper_attr(name)
        self._values[row] = attribute(*args, **kwargs) if callable(attribute) else attribute

    def _set(self, row: int, value: Any, command: Command) -> None:
        """Sets an attribute of an environment, through its wrappers."""
        self._envs[row].set_wrapper_attr(command.rest[0], value)

    def _get_state(self, row: int, _: Any, command: Command) -> None:
        """Returns what the episode of an environment needs to continue elsewhere, if the environment offers its state.

        With a spare environment it does not: a reset of that one is running.
        """
        if self._spare is None and (state := state_of(self._envs[row])) is not None:
            self._values[row] = {
                "env": state,
                "obs": copied(index_tree(self._obs, row)),
                "episode": episode_of(self.arrays, row),
                "num_finished": self._num_finished[row],
            }

    def _set_state(self, row: int, state: Any, command: Command) -> None:
        """Lets an environment continue an episode. If it can't, it is restarted, and that episode is cut."""
        self._write_obs(row, state["obs"])
        self._clear(row)
        restore_episode(self.arrays, row, state["episode"])
        self._num_finished[row] = state["num_finished"]
        set_state(self._envs[row], state["env"])

    def _recover(self, unit: int, error: BaseException, again: Callable[[], None], op: int) -> None:
        """Restarts a unit after an error and repeats what it was doing.

        If that raises too, it tries again until it succeeds or the restart budget is spent.
        """
        is_restarted = (self._rules.restart or op == Op.SET_STATE) and op not in _QUERIES
        is_restarted &= not isinstance(error, ConfigError)
        while True:
            failure = captured(error, f"{self._where}, {self._name(unit)}")
            if not is_restarted:
                self._failure = self._failure or failure
                return
            if not self._budget.spend(unit):
                self._failure = self._failure or self._too_often(failure)
                return
            try:
                self._note_restart(unit, failure)
                self._make_again(unit)
                again()
                return
            except FAILURES as raised:
                error = raised

    def _make_again(self, unit: int) -> None:
        """Closes a unit and makes another in its place."""
        with failures_ignored():
            self._envs[unit].close()
        self.progress[0] = -abs(self.progress[0])  # if it can't be made, until the command has failed
        self._envs[unit] = self._factory.make(unit)
        self.progress[0] = abs(self.progress[0])
        self._num_finished[unit] = 0
        self._check_distinct()
        self._repeat_calls(unit)

    def _repeat_calls(self, unit: int) -> None:
        for call in self._calls[unit].values():
            call()

    def _name(self, unit: int) -> str:
        env_id = self.first_id + unit
        return f"environment {env_id}, seed {seed_of(self.arrays, unit, env_id)}"

    def _note_restart(self, unit: int, failure: RemoteFailure) -> None:
        """Cuts the episodes of a unit that is restarted, and notes why."""
        rows = self._unit_rows[unit]
        text = " ".join(failure.text.split())[:_NOTE_CHARS]
        ids = range(self.first_id + rows.start, self.first_id + rows.stop)
        self._notes.append(Note(f"{failure.where} raised {failure.type_name}: {text}; restarted", ids))
        count_restarts(self.arrays, rows)
        episodes = self.arrays["episode"][rows]
        episodes[episodes == RUNNING] = CUT

    def _too_often(self, failure: RemoteFailure) -> RemoteFailure:
        error = EnvError(
            f"The same {self._unit_kind} raised again and again: {failure.type_name}: {failure.text}. The limit is "
            f"{RestartBudget.rule()}. Correct the environment. Its traceback:\n\n{failure.remote_traceback}"
        )
        return RemoteFailure.capture(error, failure.where)

    def _columns(self) -> Columns:
        return columns_of(self._infos, self.num_envs)

    def close(self) -> None:
        """Closes all environments, and logs the last error if some raise. Further calls do nothing."""
        self._envs += [] if self._spare is None else [self._spare]
        self._spare = None
        failed: BaseException | None = None
        while self._envs:
            try:
                self._envs.pop(0).close()
            except FAILURES as error:
                if is_ctrl_c(error):
                    raise
                failed = error
        if failed is not None:
            logger.error("%s: an environment raised in close()", self._where, exc_info=failed)
