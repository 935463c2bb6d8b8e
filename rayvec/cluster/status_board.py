"""The status of a run on a Ray cluster, where other processes can read it.

A board is an actor with a name. It claims no core, and ends with the process that trains.
"""

from __future__ import annotations

import contextlib
import uuid
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

__all__ = ["StatusBoard", "read_boards"]

_NAMESPACE = "rayvec-status"
_ANSWER_S = 10.0


class _Board:
    """Keeps the last text that it was given; runs as an actor."""

    def __init__(self) -> None:
        self._text = ""

    def put(self, text: str) -> None:
        """Replaces the text."""
        self._text = text

    def get(self) -> str:
        """Returns the text."""
        return self._text


class StatusBoard:
    """A board on the node of this process. It belongs to the Ray that is initialised when it is made."""

    def __init__(self) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        options = {"num_cpus": 0, "name": uuid.uuid4().hex, "namespace": _NAMESPACE, "scheduling_strategy": here}
        self._actor: Any = ray.remote(_Board).options(**options).remote()
        self._last: Any = None

    def put(self, text: str) -> None:
        """Replaces what the board shows, without waiting; left out while the text before is still on its way."""
        if not ray.is_initialized():  # else the next line would start a Ray
            return
        if self._last is None or ray.wait([self._last], timeout=0)[0]:
            self._last = self._actor.put.remote(text)

    def close(self) -> None:
        """Removes the board."""
        if ray.is_initialized():  # else `kill` would start a Ray
            with contextlib.suppress(Exception):
                ray.kill(self._actor)


def read_boards() -> list[str]:
    """Returns the text of each board of the cluster that this process is connected to."""
    found = ray.util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in found if each["namespace"] == _NAMESPACE]
    refs: list[Any] = []
    for name in names:
        with contextlib.suppress(ValueError):  # the run has ended since
            refs.append(ray.get_actor(name, _NAMESPACE).get.remote())
    done, _ = ray.wait(refs, num_returns=len(refs), timeout=_ANSWER_S) if refs else ([], [])
    texts = []
    for ref in done:
        with contextlib.suppress(ray.exceptions.RayError):
            texts.append(ray.get(ref))
    return [text for text in texts if text]
