"""Wrappers of environments: Atari, starts at different times, action masks, infos that are read, states."""

from rayvec.wrappers.action_mask import MASK_KEY, ActionMask, num_choices
from rayvec.wrappers.atari_games import FireToServe, atari
from rayvec.wrappers.keep_infos import KeepInfos
from rayvec.wrappers.save_state import SaveState
from rayvec.wrappers.staggered_start import StaggeredStart

__all__ = ["MASK_KEY", "ActionMask", "FireToServe", "KeepInfos", "SaveState", "StaggeredStart", "atari", "num_choices"]
