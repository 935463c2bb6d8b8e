"""Finds out by one environment whether a machine needs a worker for each core or for each environment."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rayvec.envs.factory import EnvFactory
from rayvec.envs.step_time import StepTime, StepTimer
from rayvec.errors import WorkerLostError
from rayvec.fleet.commands import Command, Op
from rayvec.fleet.restarts import EnvRules

MAX_WAITING_WORKERS = 256
"""The most workers that a machine starts by default for environments that wait."""
MIN_WAITING_CORES = 0.05
"""The least share of a core that a worker of an environment that waits claims from Ray."""
_MEASURING_S = 1.0

logger = logging.getLogger(__name__)


def probe_step(
    factory: EnvFactory, env_rules: EnvRules, open_fleet: Callable[[EnvFactory, EnvRules], Any]
) -> StepTime | None:
    """Makes the first environment in a worker process, measures its steps, closes it, and logs the result.

    Args:
        factory: Makes all environments.
        env_rules: Its limits of time are the worker's.
        open_fleet: Starts a machine or a cluster of one worker, which makes the environment of a factory.

    Returns:
        What was measured; None if the environment's reset or step, or its worker, failed. The error is logged and not
        raised, since the rules decide what happens when an environment fails.

    Raises:
        Exception: What the constructor of the environment raised.
    """
    began_s = time.monotonic()
    timer = replace(factory, env_fns=(partial(StepTimer, factory.env_fns[0]),))
    limit_s = env_rules.step_timeout_s
    step_timeout_s = limit_s and 3 * limit_s + _MEASURING_S  # the command to measure has a reset and several steps
    limits = replace(env_rules, restart=False, step_timeout_s=step_timeout_s, spare_envs=0)
    fleet = open_fleet(timer, limits)
    try:
        fleet.allocate(fleet.spaces.observation, fleet.spaces.action)
        found: StepTime | str = fleet.run(Command(Op.CALL, np.zeros(1, np.int64), rest=("measure", (), {}))).value[0]
    except WorkerLostError as error:
        found = str(error)
    finally:
        fleet.close()
    took_s = time.monotonic() - began_s
    if isinstance(found, str):
        logger.warning("one worker per core: no step could be measured (%.2f s): %s", took_s, found)
        return None
    kind = f"environment, up to {MAX_WAITING_WORKERS}" if found.waits else "core"
    logger.info("one worker per %s: %s (measured in %.2f s)", kind, found, took_s)
    return found
