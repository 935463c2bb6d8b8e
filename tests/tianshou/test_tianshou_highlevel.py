"""Tianshou's high-level builder with our environments and collectors."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from tianshou.highlevel.config import OffPolicyTrainingConfig, OnPolicyTrainingConfig
from tianshou.highlevel.env import EnvFactoryRegistered
from tianshou.highlevel.params.algorithm_params import DQNParams, PPOParams

from rayvec.tianshou import Collector, RayCollectorFactory, RayVectorEnv, RayVectorEnvType

builders = pytest.importorskip(
    "tianshou.highlevel.experiment", reason="Tianshou's high-level builder needs what its extra 'eval' installs"
)
CONFIG = {"max_epochs": 1, "epoch_num_steps": 128, "num_training_envs": 4, "num_test_envs": 2, "buffer_size": 1000}
ONE_WORKER = RayVectorEnvType(num_nodes=0, workers_per_node=1)


def experiment(builder_class: Any, training: Any, params: Any, factory: RayCollectorFactory) -> Any:
    config = builders.ExperimentConfig(persistence_enabled=False, watch=False, device="cpu", seed=1)
    builder = builder_class(EnvFactoryRegistered(task="CartPole-v1", venv_type=ONE_WORKER), config, training)
    getattr(builder, f"with_{type(params).__name__.removesuffix('Params').lower()}_params")(params)
    return builder.with_collector_factory(factory).build()


def on_policy() -> OnPolicyTrainingConfig:
    return OnPolicyTrainingConfig(
        **CONFIG, collection_step_num_env_steps=64, update_step_num_repetitions=2, test_step_num_episodes=3
    )


def test_an_experiment_runs_on_our_environments_and_collectors() -> None:
    result = experiment(
        builders.PPOExperimentBuilder,
        on_policy(),
        PPOParams(lr=1e-3),
        pickle.loads(pickle.dumps(RayCollectorFactory())),
    ).run()
    world = result.world
    assert isinstance(world.training_collector, Collector) and isinstance(world.test_collector, Collector)
    assert isinstance(world.envs.training_envs, RayVectorEnv)
    assert result.trainer_result.train_step == 128
    assert world.training_collector.collect_step == 128
    world.envs.training_envs.close()
    world.envs.test_envs.close()


@pytest.mark.slow
def test_off_policy_experiments_prefetch() -> None:
    training = OffPolicyTrainingConfig(
        **CONFIG,
        collection_step_num_env_steps=32,
        update_step_num_gradient_steps_per_sample=0.1,
        start_timesteps=64,
        start_timesteps_random=True,
        test_step_num_episodes=2,
    )
    result = experiment(
        builders.DQNExperimentBuilder, training, DQNParams(lr=1e-3), RayCollectorFactory(prefetch=True)
    ).run()
    stats = result.world.training_collector.collect(n_step=32)
    assert stats.staleness == 1
    assert not hasattr(result.world.test_collector.collect(n_episode=2), "staleness")
    result.world.envs.training_envs.close()
    result.world.envs.test_envs.close()
