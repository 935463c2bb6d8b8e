"""Pools of environments: in one process, on one node, on a cluster. See :mod:`rayvec.pools.base`."""
