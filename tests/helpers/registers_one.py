"""Registers an environment when it is imported."""

from __future__ import annotations

from functools import partial

import gymnasium
from gymnasium import spaces

from helpers.exact import SpaceEnv

gymnasium.register("rayvec-tests/ByModule-v0", entry_point=partial(SpaceEnv, spaces.Discrete(11)))
