"""Wrappers of environments: Atari, starts at different times, action masks."""

from rayvec.wrappers.action_mask import MASK_KEY, ActionMask, num_choices
from rayvec.wrappers.atari_games import FireToServe, atari
from rayvec.wrappers.staggered_start import StaggeredStart

__all__ = ["MASK_KEY", "ActionMask", "FireToServe", "StaggeredStart", "atari", "num_choices"]
