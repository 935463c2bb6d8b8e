"""A collector factory for Tianshou's high-level builder."""

from __future__ import annotations

from typing import Any, Literal

from tianshou.algorithm.algorithm_base import Algorithm
from tianshou.data import ReplayBuffer
from tianshou.env import BaseVectorEnv
from tianshou.highlevel.params.collector import CollectorFactory

from rayvec.tianshou.collect.collector import Collector

__all__ = ["RayCollectorFactory"]


class RayCollectorFactory(CollectorFactory):
    """Makes :class:`rayvec.tianshou.Collector`, for ``ExperimentBuilder.with_collector_factory``.

    Args:
        inference: Where the policy acts: ``"worker"`` or ``"driver"``.
        unbiased: Whether ``n_episode`` assigns every environment its share of episodes beforehand.
        prefetch: Whether the workers take the next chunk while the algorithm updates. It applies to training: to
            collectors that get a buffer.
        max_staleness: Collects asynchronously, for training; see :class:`rayvec.tianshou.Collector`.
    """

    def __init__(
        self,
        *,
        inference: Literal["worker", "driver"] = "worker",
        unbiased: bool = False,
        prefetch: bool = False,
        max_staleness: int | None = None,
    ) -> None:
        self.inference = inference
        self.unbiased = unbiased
        self.prefetch = prefetch
        self.max_staleness = max_staleness

    def create_collector(
        self,
        algorithm: Algorithm[Any, Any],
        vector_env: BaseVectorEnv,
        buffer: ReplayBuffer | None = None,
        exploration_noise: bool = False,
    ) -> Collector[Any]:
        """Makes a collector.

        Args:
            algorithm: The algorithm whose policy acts.
            vector_env: A ``RayVectorEnv``, such as ``venv_type=RayVectorEnvType()`` gives, or another.
            buffer: Where steps are stored, for training; by default a new one.
            exploration_noise: Whether to add the policy's exploration noise.

        Raises:
            ConfigError: Settings that can't be combined, or `prefetch` for an algorithm that does not support it.
        """
        return Collector(
            algorithm,
            vector_env,
            buffer,
            exploration_noise,
            inference=self.inference,
            unbiased=self.unbiased,
            prefetch=self.prefetch and buffer is not None,
            max_staleness=None if buffer is None else self.max_staleness,
        )
