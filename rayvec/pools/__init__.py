"""Environment pools for one process, one node and one cluster. See :mod:`rayvec.pools.base`."""
