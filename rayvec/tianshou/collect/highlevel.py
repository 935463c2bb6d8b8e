"""A collector factory for Tianshou's high-level builder."""

from __future__ import annotations

from typing import Any

from tianshou.algorithm.algorithm_base import Algorithm
from tianshou.data import ReplayBuffer
from tianshou.env import BaseVectorEnv
from tianshou.highlevel.params.collector import CollectorFactory

from rayvec.tianshou.collect.collector import Collector


class RayCollectorFactory(CollectorFactory):
    """Makes :class:`rayvec.tianshou.Collector`, for ``ExperimentBuilder.with_collector_factory``.

    Args:
        prefetch: As for the collector. It applies to training: to collectors that get a buffer.
        **options: Other keywords of the collector: `inference`, `unbiased`.
    """

    def __init__(self, *, prefetch: bool = False, **options: Any) -> None:
        self._prefetch = prefetch
        self._options = options

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
        prefetch = self._prefetch and buffer is not None
        return Collector(algorithm, vector_env, buffer, exploration_noise, prefetch=prefetch, **self._options)
