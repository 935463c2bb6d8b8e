"""A trained policy in one line: ``rayvec.load`` reads a run; the agent acts without Ray, and exports itself to ONNX."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from rayvec.config import TrainConfig
from rayvec.data import Tree, tree_leaves, tree_map
from rayvec.errors import ConfigError, require
from rayvec.policies.distributions import Categorical, Gaussian, TanhGaussian
from rayvec.policies.encoders import assembled, leaf_spaces
from rayvec.policies.networks import load_flat_weights
from rayvec.policies.noise import keyed_noise
from rayvec.policies.policy import Policy
from rayvec.policies.recurrent import RecurrentActorCritic
from rayvec.training.atomic_files import local_path, written_whole
from rayvec.training.checkpoint import spaces_from_bytes
from rayvec.training.environments import make_one_env
from rayvec.training.run_dir import load_checkpoint, load_config
from rayvec.training.runs import network_of, with_own_parts


def load(
    run_dir: Path | str,
    checkpoint: str = "checkpoint.pt",
    *,
    env: Any = None,
    network: Callable[..., Any] | None = None,
    seed: int = 0,
) -> Agent:
    """Returns the agent that a run has trained.

    Args:
        run_dir: Directory of the run.
        checkpoint: File in that directory: ``"checkpoint.pt"``, the last one, ``"best.pt"``, of the best evaluation,
            or one of :class:`rayvec.CheckpointHistory`, such as ``"checkpoints/000000010240.pt"``.
        seed: Of the actions that are drawn with ``deterministic=False``.
        env: The environment of the run, where it was passed in Python and has no name. It is made only where the
            checkpoint can't describe its spaces.
        network: The network of the run, where it was passed in Python and has no name.

    Raises:
        ConfigError: `run_dir` is not the directory of a run.
        CheckpointError: The file is missing or damaged.
    """
    run_dir = local_path(run_dir)
    config = with_own_parts(load_config(run_dir), env, network, begun=True)
    state = load_checkpoint(run_dir, checkpoint)
    if described := spaces_from_bytes(state["spaces"]):
        observation_space, action_space = described
    else:
        with make_one_env(config) as made:
            observation_space, action_space = made.single_observation_space, made.single_action_space
    return Agent(config, observation_space, action_space, state["weights"].numpy(), seed=seed)


class Agent:
    """Acts as a run has learned to, normalisation of observations included.

    Args:
        config: Settings of the run.
        observation_space: Of one environment.
        action_space: Of one environment.
        weights: The acting weights, ``float32 [P]``.
        seed: Of the actions that are drawn.

    Attributes:
        config: The settings.
        observation_space: Of one environment.
        action_space: Of one environment.
        module: The network, an ``nn.Module`` on the CPU.
        is_recurrent: Whether the policy has a memory.

    Raises:
        ConfigError: The weights are those of another network.
    """

    def __init__(
        self,
        config: TrainConfig,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        weights: NDArray[np.float32],
        *,
        seed: int = 0,
    ) -> None:
        self.config, self.observation_space, self.action_space = config, observation_space, action_space
        self.module = network_of(config, observation_space, action_space)
        load_flat_weights(self.module, weights)
        self._policies = {greedy: Policy(self.module, action_space, deterministic=greedy) for greedy in (True, False)}
        self._seed, self._num_calls = seed, 0
        self.is_recurrent = self._policies[True].initial_state(1) is not None

    def predict(self, obs: Any, state: NDArray[np.float32] | None = None, deterministic: bool = True) -> Any:
        """Returns the action for an observation, or the actions for a batch of them; with memory, also its state.

        Args:
            obs: An observation of one environment, as `observation_space` contains it; or a batch ``[k, *obs_shape]``,
                in a Dict or Tuple space a dict or tuple of such batches.
            state: Of a policy with memory, what the call before returned: ``float32 [D]``, for a batch ``[k, D]``. None
                where episodes begin.
            deterministic: Take the most probable action (for SAC, the mean before squashing) instead of drawing one.

        Returns:
            The action of one environment, as ``env.step`` takes it; for a batch, actions ``[k, *act_shape]``. A policy
            with memory returns a pair: this, and the state for the next call.

        Raises:
            ConfigError: The shape fits neither, or a number is not finite, or outside a discrete space or the
                dtype of a Box.
        """
        batch, is_single = self._batched(obs)
        count = len(next(iter(tree_leaves(batch))))
        policy = self._policies[deterministic]
        noise = keyed_noise(
            policy.noise, seed=self._seed, env_ids=np.arange(count), first_step=self._num_calls, num_steps=1
        )
        self._num_calls += not deterministic
        if state is None:
            state = policy.initial_state(count)
        elif is_single:
            state = np.asarray(state)[None]
        action, _, state = policy.act_from(batch, noise[0], state)
        if is_single:
            action, state = tree_map(lambda leaf: leaf[0], action), None if state is None else state[0]
        return (action, state) if self.is_recurrent else action

    def export(self, path: Path | str) -> Path:
        """Writes the greedy policy to an ONNX file, which runs without rayvec; returns its path.

        The file has an input for each array of an observation (``obs``, or the names in a Dict), with any number of
        rows, and one output, ``action``. Arrays have the dtypes of the space. A policy with memory has an input
        ``state`` besides, zeros where episodes begin, and an output ``next_state``.

        Args:
            path: Ends with ``.onnx``.

        Raises:
            ConfigError: The path has another ending, or the network has several actions.
            ImportError: ONNX is not installed: ``pip install onnx onnxruntime onnxscript``.
        """
        path = local_path(path)
        require(
            path.suffix == ".onnx",
            f"The path {path} does not end with .onnx. Policies are exported to ONNX.",
        )
        greedy = GreedyModule(self.module, self.observation_space).eval().requires_grad_(False)
        inputs, outputs, examples = [], ["action"], []
        for keys, space in leaf_spaces(self.observation_space):
            name = "_".join(map(str, keys)) or "obs"
            inputs.append(f"{name}_" if name in ("action", "state", "next_state") else name)
            examples.append(
                torch.tensor(np.stack([space.sample(), space.sample()]))
            )  # of one row torch makes a constant
        if isinstance(self.module, RecurrentActorCritic):
            examples.append(torch.zeros(2, self.module.cell.state_size))
            inputs, outputs = [*inputs, "state"], ["action", "next_state"]
        rows = torch.export.Dim("rows", min=1)
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        with written_whole(path) as file, warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch warns of its own future
            program: Any = torch.onnx.export(
                greedy,
                tuple(examples),
                input_names=inputs,
                output_names=outputs,
                dynamic_shapes=(tuple({0: rows} for _ in examples),),
                verbose=False,
                dynamo=True,
            )
            file.write(program.model_proto.SerializeToString())
        return path

    def _batched(self, obs: Any) -> tuple[Tree, bool]:
        """Returns observations as a batch, and whether they are of one environment."""
        space = self.observation_space
        try:
            arrays = _arrays(obs, space)
            leaves = zip(tree_leaves(arrays), leaf_spaces(space), strict=True)
            (lengths,) = {_leading(array.shape, leaf.shape or ()) for array, (_, leaf) in leaves}
        except ConfigError:
            raise
        except (TypeError, KeyError, IndexError, ValueError, RuntimeError) as error:  # tensors raise the last
            raise ConfigError(
                f"The agent was given {repr(obs)[:200]} ({error}). It acts on one observation of {space}, or on a "
                "batch with one more dimension in front. Pass what the environment returned, with the wrappers of "
                "training."
            ) from None
        return (arrays, False) if lengths else (tree_map(lambda array: array[None], arrays), True)


def _leading(shape: tuple[int, ...], expected: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the dimensions of an array before those of one observation: none, or one."""
    lengths = shape[: len(shape) - len(expected)]
    if shape != (*lengths, *expected) or len(lengths) > 1:
        raise ValueError(f"an array of shape {shape}, expected {expected}")
    return lengths


def _arrays(obs: Any, space: spaces.Space[Any]) -> Any:
    """Returns observations as a tree of arrays in the dtypes of a space."""
    match space:
        case spaces.Dict():
            return {key: _arrays(obs[key], part) for key, part in space.spaces.items()}
        case spaces.Tuple():
            return tuple(_arrays(obs[i], part) for i, part in enumerate(space.spaces))
    given = np.asarray(obs)
    if not np.can_cast(given.dtype, np.result_type(space.dtype, np.int8), "same_kind"):
        raise ValueError(f"not of a kind that {space.dtype} holds")
    low, high = _limits(space)
    require(
        np.all((given >= low) & (given <= high)),
        f"The agent was given {repr(obs)[:200]}, with a number that no observation has. Pass numbers of {space}, "
        f"from {low} to {high}.",
    )
    return given.astype(space.dtype)


def _limits(space: Any) -> tuple[Any, Any]:
    """Returns the least and the largest number that a space has; in a Box, all that its dtype holds are taken."""
    match space:
        case spaces.Discrete():
            return space.start, space.start + space.n - 1
        case spaces.MultiDiscrete():
            return space.start, space.start + space.nvec - 1
        case spaces.Box() if space.dtype != np.bool_:
            info = np.finfo(space.dtype) if space.dtype.kind == "f" else np.iinfo(space.dtype)
            return info.min, info.max
    return 0, 1


class GreedyModule(nn.Module):
    """From the arrays of observations to greedy actions ``[B, *act_shape]``, in torch alone.

    A network with memory takes states ``[B, D]`` after the observations, and returns the next ones after the actions.

    Args:
        module: A network of a learner: an actor-critic, or the actor of SAC.
        observation_space: Of one environment.

    Raises:
        ConfigError: The network is of another kind.
    """

    def __init__(self, module: Any, observation_space: spaces.Space[Any]) -> None:
        super().__init__()
        distribution: Any = getattr(module, "distribution", None)
        require(
            isinstance(distribution, Categorical | Gaussian | TanhGaussian),
            f"{type(module).__name__} can't be exported. That is for networks of PPO, IMPALA and SAC whose actions "
            "are one array: export the torch module itself, agent.module.",
        )
        self.module, self._space, self._distribution = module, observation_space, distribution
        if not isinstance(distribution, Categorical):
            arrays = (distribution.low, distribution.high, *distribution.units)
            for name, array in zip(("low", "high", "centre", "unit"), arrays, strict=True):
                self.register_buffer(name, torch.tensor(array), persistent=False)

    def forward(self, *arrays: Tensor) -> Any:
        """Returns the actions for a batch; an array for each leaf of the observation space, in its order."""
        obs, rest = assembled(self._space, leaves := iter(arrays)), list(leaves)
        rows = self.module.encode(obs)
        if not rest:
            return self._greedy(self.module.action_parameters(rows))
        following = self.module.next_state(rows, rest[0])
        return self._greedy(self.module.heads(following, self.module.split(rows)[1])[0]), following

    def _greedy(self, params: Tensor) -> Tensor:
        """Returns the most probable actions; for a squashed normal, the means squashed."""
        distribution = self._distribution
        if isinstance(distribution, Categorical):
            ends = list(itertools.accumulate(distribution.sizes, initial=0))
            chosen = [params[..., start:end].argmax(-1) for start, end in itertools.pairwise(ends)]
            action = torch.stack(chosen, -1) + torch.tensor(distribution.starts)
            return action.reshape(-1, *distribution.shape).to(torch.from_numpy(np.zeros(0, distribution.dtype)).dtype)
        low, high, centre, unit = map(self.get_buffer, ("low", "high", "centre", "unit"))
        mean = params.chunk(2, -1)[0].reshape(params.shape[0], *low.shape)
        if isinstance(distribution, TanhGaussian):
            mean = mean.tanh()
        return torch.minimum(torch.maximum(centre + unit * mean, low), high).to(low.dtype)
