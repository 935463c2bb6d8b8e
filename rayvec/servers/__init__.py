"""Environments in other processes that dial in."""
