"""Wrappers of environments: Atari, starts at different times, action masks, several agents."""

from rayvec.wrappers.action_mask import MASK_KEY, ActionMask, num_choices
from rayvec.wrappers.atari_games import FireToServe, atari
from rayvec.wrappers.pettingzoo_agents import ParallelAgents
from rayvec.wrappers.staggered_start import StaggeredStart

__all__ = ["MASK_KEY", "ActionMask", "FireToServe", "ParallelAgents", "StaggeredStart", "atari", "num_choices"]
