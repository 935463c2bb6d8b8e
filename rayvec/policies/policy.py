"""The policy: a module's actor, and how an action is drawn from its distribution. It imports torch only for modules."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rayvec.data import Tree, tree_leaves
from rayvec.errors import ConfigError
from rayvec.policies.distributions import make_distribution
from rayvec.policies.masks import allowed, masked
from rayvec.policies.noise import NO_NOISE, NoiseSpec

Float = NDArray[np.float32]


class Policy:
    """Acts with a module: draws from the distribution that it outputs, or takes the most probable action.

    Only the actor runs here. The learner computes values for a whole chunk in one large batch, with the weights that it
    is about to change: that is cheaper than small batches at every step.

    Every action is valid in its space: a normal sample is clipped to the Box. The extras hold the sample itself, to
    which ``logp`` belongs, as ``raw_act``.

    The policy holds a copy of the module's weights: training the module does not change it, `load_weights` does. It
    pickles without gradients, and without torch where the module is an MLP of tanh or ReLU layers without memory.

    For a recurrent module, the policy keeps a hidden state for each environment, and acts on the same environments in
    each call. A rollout resets the states where episodes begin. `act_from` acts from states that the caller keeps.

    Args:
        module: Either an ``nn.Module`` with a method ``make_actor``, such as
            :class:`rayvec.policies.networks.ActorCritic`, or any ``nn.Module`` that is called with the observations
            as tensors (``[k, *obs_shape]``, in their own dtype but float64 as float32; a dict or tuple of these where
            the space is one) and returns the parameters ``[k, P]`` of the distribution that fits `action_space`: all
            logits for Discrete, MultiDiscrete and MultiBinary (two per bit), or means, then logarithms of standard
            deviations, for Box.
        action_space: Of one environment; needed by a module without ``make_actor``.
        deterministic: Take the most probable action instead of drawing one.
        random_start: Draw every action with the same probability until weights are loaded for the first time; only for
            the actor of SAC, and for choices alone.
        device: Where the module computes, ``"cpu"`` or ``"cuda"``. The policy moves there when it first acts, in the
            process where it acts. Images are uploaded as bytes.

    Attributes:
        noise: The noise that `act` takes.
        loaded_weights: A copy of what `load_weights` loaded last, ``float32 [P]``. A pickled policy has none.

    Raises:
        ConfigError: The module has no ``make_actor`` and there is no action space, or none that has a distribution; or
            it can act only on the CPU; or its distribution can't draw evenly.
    """

    noise: NoiseSpec
    loaded_weights: Float | None = None

    def __init__(
        self,
        module: Any,
        action_space: spaces.Space[Any] | None = None,
        *,
        deterministic: bool = False,
        random_start: bool = False,
        device: str = "cpu",
    ) -> None:
        self._actor: Any = _make_actor(module, action_space, device)
        self._is_masked: bool = getattr(module, "is_masked", False)
        if random_start and not hasattr(self._actor.distribution, "uniform"):
            raise ConfigError(
                f"random_start=True, or random_steps above 0, with a {type(self._actor.distribution).__name__}. Random "
                "starts are for the actor of SAC and for choices: leave random_start or random_steps out."
            )
        self._random = random_start
        self._deterministic = deterministic
        self.noise = NO_NOISE if deterministic else self._actor.distribution.noise
        if self._is_recurrent:  # see rayvec.rollout.loop.ActingPolicy
            self.begin_episodes = self._actor.begin_episodes
            self.state_to_record = self._actor.state_to_record

    @property
    def _is_recurrent(self) -> bool:
        return hasattr(self._actor, "initial_state")

    def act(self, obs: Tree, noise: NDArray[np.float64]) -> tuple[Tree, dict[str, NDArray[Any]]]:
        """Chooses an action for each of k environments.

        Args:
            obs: Observations, tree of ``[k, *obs_shape]``.
            noise: ``float64 [k, lanes]``, of the kind that `noise` asks for.

        Returns:
            Actions, tree of ``[k, *act_shape]`` in the dtypes of the space, and extras: ``logp`` ``float32 [k]``, the
            log-probability of the sample, and ``raw_act`` ``float32 [k, C]``, the sample, where actions do not tell it:
            for a Box, whose bounds cut it off, and for a Dict or Tuple.
        """
        distribution = self._actor.distribution
        if self._random and not self._is_masked:
            sample, logp = distribution.uniform(noise)
            return distribution.action(sample), {"logp": logp, **distribution.extras(sample)}
        params = np.zeros((len(noise), distribution.num_params), np.float32) if self._random else self._actor(obs)
        if self._is_masked:
            params = masked(params, allowed(obs, distribution))
        sample, logp = distribution.mode(params) if self._deterministic else distribution.sample(params, noise)
        return distribution.action(sample), {"logp": logp, **distribution.extras(sample)}

    def initial_state(self, count: int) -> Float | None:
        """Returns the hidden state of `count` environments whose episodes begin, for `act_from`.

        It is ``float32 [count, D]``, or None for a module without a hidden state.
        """
        return self._actor.initial_state(count) if self._is_recurrent else None

    def act_from(
        self, obs: Tree, noise: NDArray[np.float64], state: Float | None
    ) -> tuple[Tree, dict[str, NDArray[Any]], Float | None]:
        """Chooses actions as `act` does, from hidden states that the caller keeps. Those of `act` are not touched.

        Args:
            obs: Observations, tree of ``[k, *obs_shape]``.
            noise: ``float64 [k, lanes]``.
            state: ``float32 [k, D]`` of `initial_state` or of the call before; None for a module without one.

        Returns:
            Actions and extras, as `act`, and the next states.

        Raises:
            ConfigError: There is not one state for each observation.
        """
        if not self._is_recurrent:
            return *self.act(obs, noise), None
        expected = self._actor.initial_state(len(next(tree_leaves(obs)))).shape
        if state is None or np.shape(state) != expected:
            raise ConfigError(
                f"The hidden state is {None if state is None else np.shape(state)}. It must have shape "
                f"{expected}: pass policy.initial_state(k) where episodes begin, and then what the last call "
                "returned."
            )
        own, self._actor.state = self._actor.state, np.asarray(state, np.float32)
        try:
            return *self.act(obs, noise), self._actor.state
        finally:
            self._actor.state = own

    def load_weights(self, weights: Float) -> None:
        """Loads new weights, ``float32``: one flat vector of the module's parameters, then its buffers; copied.

        Raises:
            ConfigError: The vector is of another length than the module's parameters.
        """
        self._actor.load_weights(weights)
        self._random = False
        self.loaded_weights = np.array(weights, np.float32)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "loaded_weights": None}


def _make_actor(module: Any, action_space: spaces.Space[Any] | None, device: str) -> Any:
    if hasattr(module, "make_actor") and device == "cpu":
        return module.make_actor()
    if hasattr(module, "make_actor"):
        if not hasattr(module, "action_parameters") or hasattr(module, "next_state"):
            raise ConfigError(
                f"{type(module).__name__} can't act on {device!r}. That needs a module without memory, with "
                "encode(obs) and action_parameters(rows). Leave device out, or add these methods."
            )
        from rayvec.policies.networks import EncodedActor

        return EncodedActor(module, module.distribution, device)
    if action_space is None:
        raise ConfigError(f"{type(module).__name__} has no make_actor(). Pass action_space=env.single_action_space.")
    from rayvec.policies.networks import ModuleActor

    return ModuleActor(module, make_distribution(action_space), device)
