"""The innermost pool: it steps environments one after another in this process, and resets them after an episode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rayvec.data import RawInfo
from rayvec.data.layouts import ArrayLayout, index_tree, tree_writer
from rayvec.envs.factory import check_env
from rayvec.errors import EnvError, RemoteFailure
from rayvec.pools.base import Autoreset, PoolSpaces
from rayvec.pools.in_process_base import FAILURES, EnvsFailed, InProcessPool, copied_value, raise_failures
from rayvec.pools.restart_state import RESTARTED, EpisodeState, seed_of, store_seed

__all__ = ["SerialPool"]

RUNNING, ENDED, CUT = int(EpisodeState.RUNNING), int(EpisodeState.ENDED), int(EpisodeState.CUT)


class SerialPool(InProcessPool):
    """Steps environments in a loop. It decides where an episode ends, and resets the environment."""

    _envs: list[gymnasium.Env[Any, Any]]

    def _make(self, unit: int) -> Any:
        return check_env(self._factory.make(unit))

    def _set_up(self) -> None:
        self._restart_seeds: dict[int, int | None] = {}
        self._all_rows = list(range(self.num_envs))
        self.action_layout = ArrayLayout.of(self._envs[0].action_space)
        self.attach_own(ArrayLayout.of(self._envs[0].observation_space))

    def attach(self, layout: ArrayLayout | None, arrays: Mapping[str, Any]) -> None:
        """See :class:`~rayvec.pools.in_process_base.InProcessPool`."""
        super().attach(layout, arrays)
        self._episode: memoryview[int] = arrays["episode"].data
        self._write_obs: Callable[[int, Any], None] = tree_writer(self.obs)
        for row in range(self.num_envs):
            if arrays["restarts"][row] > 0:
                self._restart_seeds[row] = seed_of(arrays, row, self.first_id + row)

    @property
    def spaces(self) -> PoolSpaces:
        """The spaces and metadata of the environments."""
        return PoolSpaces.join(
            [
                (1, PoolSpaces(env.observation_space, env.action_space, dict(env.metadata), env.render_mode))
                for env in self._envs
            ]
        )

    def step_rows(self, rows: Sequence[int], actions: Iterable[Any], autoreset: Autoreset) -> list[RawInfo]:
        """Steps some environments, given by row. Writes results into the arrays and returns raw infos.

        Raises:
            EnvsFailed: Some environments raised and were not restarted. The others completed their step.
        """
        infos: list[RawInfo] = []
        failures: list[tuple[int, RemoteFailure]] = []
        next_step, same_step = autoreset == Autoreset.NEXT_STEP, autoreset == Autoreset.SAME_STEP
        envs, write_obs, episode = self._envs, self._write_obs, self._episode
        rew, terminated, truncated = self.rew, self.terminated, self.truncated
        end_cut_episode, reset_again = self._end_cut_episode, self._reset_again
        selected = slice(None) if len(rows) == self.num_envs else rows
        terminated[selected] = truncated[selected] = False  # most steps end no episode and write neither
        for row, action in zip(rows, actions, strict=True):
            recovery = end_cut_episode
            try:
                state = episode[row]
                if state != RUNNING:
                    if state == CUT:
                        end_cut_episode(row, same_step, infos)
                        continue
                    if next_step and state == ENDED:
                        recovery = reset_again
                        reset_again(row, same_step, infos)
                        continue
                result = envs[row].step(action)
                try:
                    obs, reward, term, trunc, info = result
                except (TypeError, ValueError) as error:
                    raise _not_api("step", "obs, reward, terminated, truncated, info", result) from error
                try:
                    rew[row] = reward
                except (TypeError, ValueError) as error:
                    raise _no_number(reward) from error
                if term or trunc:
                    terminated[row], truncated[row] = term, trunc
                    if same_step:
                        infos.append(RawInfo(self.first_id + row, {}, copied_value(obs), self._copied(info)))
                        recovery = self._reset_within_step
                        self._reset_within_step(row, same_step, infos)
                        continue
                    episode[row] = ENDED
                elif state != RUNNING:
                    episode[row] = RUNNING
                write_obs(row, obs)
                if info or not hasattr(info, "items"):  # None and [] are errors, as in Gymnasium
                    infos.append(RawInfo(self.first_id + row, self._copied(info)))
            except FAILURES as error:
                self._recover(row, error, failures, partial(recovery, row, same_step, infos))
        raise_failures(failures)
        return infos

    def reset_rows(
        self, rows: Sequence[int], seeds: Sequence[int | None], options: Mapping[str, Any] | None
    ) -> list[RawInfo]:
        """Resets some environments, given by row, each with its seed.

        Raises:
            EnvsFailed: Some environments raised and were not restarted. The others have been reset.
        """
        infos: list[RawInfo] = []
        failures: list[tuple[int, RemoteFailure]] = []
        for row, seed in zip(rows, seeds, strict=True):
            if self._episode[row] == CUT:
                self._episode[row] = ENDED
            if seed is not None:
                store_seed(self._arrays, row, seed)
                self._restart_seeds.pop(row, None)
            try:
                self._reset_row(row, seed, options, infos)
            except FAILURES as error:
                self._recover(row, error, failures, partial(self._reset_row, row, None, options, infos))
        raise_failures(failures)
        return infos

    def begin_rows(self, rows: Sequence[int]) -> list[RawInfo]:
        """Resets, without a seed, those of the given environments that are between two episodes."""
        waiting = [row for row in rows if self._episode[row] != RUNNING]
        marked = {self.first_id + row: {RESTARTED: True} for row in sorted(waiting) if self._episode[row] == CUT}
        infos = self.reset_rows(waiting, [None] * len(waiting), None)
        merged = [info._replace(info={**info.info, **marked.pop(info.env_id, {})}) for info in infos]
        return merged + [RawInfo(env_id, info) for env_id, info in marked.items()]

    def _reset_row(self, row: int, seed: int | None, options: Mapping[str, Any] | None, infos: list[RawInfo]) -> None:
        """Resets on request of the caller."""
        seed = self._restart_seeds.pop(row, None) if seed is None else seed
        self._begin_episode(row, infos, seed=seed, options=None if options is None else dict(options))

    def _reset_again(self, row: int, same_step: bool, infos: list[RawInfo]) -> None:
        """Resets instead of stepping, because the previous step ended an episode."""
        self._begin_episode(row, infos, **self._reset_arguments(row))

    def _begin_episode(self, row: int, infos: list[RawInfo], **kwargs: Any) -> None:
        obs, info = self._reset(row, **kwargs)
        self._write_obs(row, obs)
        self.rew[row] = 0.0
        self.terminated[row] = self.truncated[row] = False
        self._episode[row] = RUNNING
        if info or not hasattr(info, "items"):
            infos.append(RawInfo(self.first_id + row, self._copied(info)))

    def _reset(self, row: int, **kwargs: Any) -> tuple[Any, Any]:
        result = self._envs[row].reset(**kwargs)
        if isinstance(result, np.ndarray | dict):  # an observation alone; one of two parts would be unpacked
            raise _not_api("reset", "obs, info", result)
        try:
            obs, info = result
        except (TypeError, ValueError) as error:
            raise _not_api("reset", "obs, info", result) from error
        return obs, info

    def _reset_within_step(self, row: int, same_step: bool, infos: list[RawInfo]) -> None:
        """Resets within the step that ended an episode. The last entry of `infos` describes that end."""
        self._episode[row] = ENDED
        obs, info = self._reset(row, **self._reset_arguments(row))
        self._write_obs(row, obs)
        self._episode[row] = RUNNING
        last = infos[-1]
        infos[-1] = RawInfo(last.env_id, self._copied(info), last.final_obs, last.final_info)

    def _end_cut_episode(self, row: int, same_step: bool, infos: list[RawInfo]) -> None:
        """Ends an interrupted episode without a step: the last true observation, reward 0, truncated."""
        self._episode[row] = ENDED
        self.rew[row] = 0.0
        self.terminated[row], self.truncated[row] = False, True
        if same_step:
            if infos and infos[-1].env_id == self.first_id + row:
                infos.pop()  # from an earlier attempt whose reset raised
            infos.append(RawInfo(self.first_id + row, {}, deepcopy(index_tree(self.obs, row)), {RESTARTED: True}))
            self._reset_within_step(row, same_step, infos)
            infos[-1] = infos[-1]._replace(info={**infos[-1].info, RESTARTED: True})
        else:
            infos.append(RawInfo(self.first_id + row, {RESTARTED: True}))

    def _identify(self, unit: int) -> tuple[int, str]:
        return unit, f"environment {self.first_id + unit}, seed {seed_of(self._arrays, unit, self.first_id + unit)}"

    def _end_episodes(self, unit: int) -> None:
        self._arrays["restarts"][unit] += 1
        self._restart_seeds[unit] = seed_of(self._arrays, unit, self.first_id + unit)

    def _reset_arguments(self, row: int) -> dict[str, Any]:
        """Returns the arguments of an automatic reset. Like Gymnasium, it passes none unless there is a new seed."""
        seed = self._restart_seeds.pop(row, None)
        return {} if seed is None else {"seed": seed}

    def _rows_of(self, env_ids: NDArray[np.int64]) -> list[int]:
        return self._all_rows if env_ids is self._everyone else env_ids.tolist()

    def call_rows(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: Sequence[int]) -> list[Any]:
        """Calls a method or reads an attribute of some environments, through their wrappers.

        Raises:
            EnvsFailed: An environment raised.
        """
        results = []
        for row in rows:
            try:
                attribute = self._envs[row].get_wrapper_attr(name)
                results.append(attribute(*args, **kwargs) if callable(attribute) else attribute)
            except FAILURES as error:
                raise EnvsFailed([self._failure(row, error)]) from error
        return results

    def set_rows(self, name: str, values: Sequence[Any], rows: Sequence[int]) -> None:
        """Sets an attribute of some environments, through their wrappers.

        Raises:
            EnvsFailed: An environment raised.
        """
        for row, value in zip(rows, values, strict=True):
            try:
                self._envs[row].set_wrapper_attr(name, value)
            except FAILURES as error:
                raise EnvsFailed([self._failure(row, error)]) from error


def _not_api(method: str, expected: str, got: Any) -> EnvError:
    """Returns the error for a result that is not that of a Gymnasium environment."""
    described = f"{len(got)} values" if isinstance(got, tuple | list) else type(got).__name__
    return EnvError(
        "Environments have the API of gymnasium.Env.",
        expected=f"{method}() to return {expected}",
        got=described,
        remedy="Correct the environment, or wrap one of the old gym library, for example with shimmy.",
    )


def _no_number(reward: Any) -> EnvError:
    """Returns the error for a reward that is no number."""
    size = reward.size if isinstance(reward, np.ndarray) else len(reward) if isinstance(reward, list | tuple) else 1
    return EnvError(
        "The reward of a step is one number.",
        expected="a float",
        got=f"an array of shape {reward.shape}" if isinstance(reward, np.ndarray) else f"{reward!r:.80}",
        remedy="Combine its numbers into one, for example with mo_gymnasium.wrappers.LinearReward."
        if size > 1
        else "Let step() return float(reward).",
    )
