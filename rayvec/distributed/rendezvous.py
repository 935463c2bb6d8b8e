"""What ranks tell each other through the key-value store of the Ray cluster: addresses, and who has its steps.

No rank listens for this exchange, and only a process that is connected to the Ray cluster can take part in it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed
from ray.experimental import internal_kv

_NAMESPACE = b"rayvec-ranks"
_POLL_S = 0.02
_ARRIVALS_S = 0.01


class RayStore(torch.distributed.Store):  # type: ignore[misc, name-defined]
    """A store of torch.distributed whose keys lie in the key-value store of the Ray cluster.

    Args:
        name: Of the rendezvous; stores with the same name have the same keys.
        timeout_s: How long `get` waits for a key, in seconds.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        super().__init__()
        self._name, self._timeout_s = name, timeout_s

    def set(self, key: str, value: bytes | str) -> None:
        """Writes a value."""
        data = value.encode() if isinstance(value, str) else value
        internal_kv._internal_kv_put(self._key(key), data, namespace=_NAMESPACE)

    def get(self, key: str) -> bytes:
        """Returns a value as soon as a rank has written it.

        Raises:
            RuntimeError: No rank wrote it in time.
        """
        self.wait([key])
        value: bytes = internal_kv._internal_kv_get(self._key(key), namespace=_NAMESPACE)
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys have values; raises as `get` does."""
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline_s = time.monotonic() + limit_s
        while not self.check(keys):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"not every rank wrote its address within {limit_s:g} s")
            time.sleep(_POLL_S)

    def check(self, keys: Sequence[str]) -> bool:
        """Says whether all keys have values."""
        return all(internal_kv._internal_kv_exists(self._key(key), namespace=_NAMESPACE) for key in keys)

    def _key(self, key: str) -> bytes:
        return f"{self._name}/{key}".encode()


class RayArrivals:
    """Arrivals of ranks anywhere in a Ray cluster; see :class:`~rayvec.distributed.stragglers.Arrivals`.

    Args:
        name: Of the rendezvous.
        rank: Number of this rank.
    """

    def __init__(self, name: str, rank: int) -> None:
        self._name, self._rank = name, rank
        self._seen = (0, 0)
        self._next_poll_s = 0.0

    def arrive(self, iteration: int) -> None:
        """See :class:`~rayvec.distributed.stragglers.Arrivals`."""
        internal_kv._internal_kv_put(self._key(iteration) + str(self._rank).encode(), b"", namespace=_NAMESPACE)
        # every rank is beyond the iteration before the last
        internal_kv._internal_kv_del(self._key(iteration - 2), del_by_prefix=True, namespace=_NAMESPACE)

    def have_arrived(self, iteration: int, count: int) -> bool:
        """See :class:`~rayvec.distributed.stragglers.Arrivals`."""
        if self._seen[0] != iteration or (self._seen[1] < count and time.monotonic() >= self._next_poll_s):
            there = internal_kv._internal_kv_list(self._key(iteration), namespace=_NAMESPACE)
            self._seen, self._next_poll_s = (iteration, len(there)), time.monotonic() + _ARRIVALS_S
        return self._seen[1] >= count

    def _key(self, iteration: int) -> bytes:
        return f"{self._name}/{iteration}/".encode()


def delete_rendezvous(name: str) -> None:
    """Deletes all keys of a rendezvous."""
    internal_kv._internal_kv_del(f"{name}/".encode(), del_by_prefix=True, namespace=_NAMESPACE)
