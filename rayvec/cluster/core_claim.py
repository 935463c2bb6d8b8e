"""Claims of cores on this process's own node, whose workers are no actors of Ray."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayvec.cluster.reachability import can_call_ray

__all__ = ["CoreClaim"]


class CoreClaim:
    """Cores that Ray gives to nothing else until they are released, or until this process ends.

    In a driver, a placement group holds them, which needs no process: Ray removes it with the driver's job. Within a
    task or an actor, such as a trial of Ray Tune, the job outlives the process. There an actor holds them, which ends
    with the process that made it.

    Args:
        node_id: The node, by Ray's id.
        num_cpus: Number of cores; 0 claims none.
    """

    def __init__(self, node_id: str, num_cpus: float) -> None:
        self._actor: Any = None
        self._group: Any = None
        if num_cpus == 0:
            return
        if ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
            affinity = NodeAffinitySchedulingStrategy(node_id, soft=False)
            self._actor = ray.remote(_Holder).options(num_cpus=num_cpus, scheduling_strategy=affinity).remote()
        else:
            self._group = placement_group([{"CPU": num_cpus}], bundle_label_selector=[{"ray.io/node-id": node_id}])

    def wait(self, timeout_s: float) -> bool:
        """Waits until Ray has reserved the cores. Returns False if they did not become free in time.

        Raises:
            RayError: The actor could not start.
        """
        if self._group is not None:
            return bool(self._group.wait(timeout_s))
        try:
            if self._actor is None:
                return True
            ray.get(self._actor.__ray_ready__.remote(), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            return False
        return True

    def release(self) -> None:
        """Makes the cores free again."""
        if self._group is not None and can_call_ray():
            remove_placement_group(self._group)
        if self._actor is not None and can_call_ray():
            ray.kill(self._actor)


class _Holder:
    """Holds cores as long as it lives."""
