"""N learner ranks against one plain Tianshou algorithm, on the same data, minibatches and noise."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import tianshou.algorithm
import torch
import torch.nn.functional as F
from helpers import tianshou_algorithms as kit
from helpers.tianshou_stage import OneRank, Stage, Twins
from helpers.waiting import alive, wait_until
from tianshou.algorithm import NPG, Reinforce
from tianshou.algorithm.algorithm_base import Algorithm
from tianshou.algorithm.modelfree.sac import FixedAlpha
from tianshou.data import Batch, Collector, SequenceSummaryStats, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OffPolicyTrainerParams, OnPolicyTrainerParams

import rayvec.tianshou
from rayvec.distributed.rank_group import RankGroup
from rayvec.errors import ConfigError, LearnerError
from rayvec.tianshou import IMPALA, data_parallel
from rayvec.tianshou.learn.algorithm_state import AlgorithmState
from rayvec.tianshou.learn.data_parallel import EQUAL, _check_algorithm, pickle_algorithm, wrap
from rayvec.tianshou.learn.random_draws import Cut, NoDraws, SlicedDraws

Parallel = Callable[..., Any]
SMOKE = ("ppo_variant", "impala", "sac", "rainbow")
"""On-policy with everything that ranks patch, V-trace, patched draws, priorities: on 2 ranks; all others are slow."""


def slow_unless(is_smoke: bool, *values: Any) -> Any:
    """One case of a test, slow unless it is one of the smoke tests."""
    return pytest.param(*values, marks=() if is_smoke else pytest.mark.slow)


@pytest.fixture(scope="module")
def parallel(ray_cluster: object) -> Iterator[Parallel]:
    """Makes algorithms data-parallel on ranks that are started once for each number of them; two run without Ray."""
    groups: dict[int, RankGroup] = {}

    def make(algorithm: Any, num_ranks: int, averages: bool = True) -> Any:
        if num_ranks not in groups:
            groups[num_ranks] = RankGroup(Stage, num_ranks, num_cpus=1, num_nodes=0 if num_ranks == 2 else None)
        group = groups[num_ranks]
        group.run("begin", [(pickle_algorithm(algorithm), averages)] * num_ranks)
        return wrap(algorithm, group)

    yield make
    for group in groups.values():
        group.close()


def difference(one: Algorithm[Any, Any], other: Algorithm[Any, Any]) -> float:
    """Returns the largest difference between parameters and lagged parameters, relative to each tensor's largest."""
    pairs = zip(AlgorithmState(one).capture()["tensors"], AlgorithmState(other).capture()["tensors"], strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs)


def optimizer_difference(one: Algorithm[Any, Any], other: Algorithm[Any, Any]) -> float:
    worst = 0.0
    for mine, theirs in zip(
        AlgorithmState(one).capture()["optimizers"], AlgorithmState(other).capture()["optimizers"], strict=True
    ):
        for a, b in zip(mine, theirs, strict=True):
            assert a.keys() == b.keys()
            values = [(torch.as_tensor(a[name]), torch.as_tensor(b[name])) for name in a]
            worst = max([worst, *(float((x - y).abs().max() / y.abs().max().clamp(min=1e-6)) for x, y in values)])
    return worst


def both(name: str, dtype: torch.dtype, make: Callable[[Any], Any], **how: Any) -> tuple[Any, Any, Any, Any]:
    """Updates a plain algorithm and a data-parallel one with the same; returns both, and their last statistics."""
    plain, other = kit.make(name, dtype), make(kit.make(name, dtype))
    stats = []
    for algorithm in (plain, other):
        buffer = kit.fill(algorithm, dtype)
        stats.append(kit.updates(algorithm, buffer, **how)[-1])
    return plain, other, *stats


class TestRanksEqualOne:
    @pytest.mark.parametrize(
        ("name", "num_ranks"),
        [slow_unless(n == 2 and name in SMOKE, name, n) for name in kit.MAKERS for n in (2, 3)],
    )
    def test_in_float64(self, parallel: Parallel, name: str, num_ranks: int) -> None:
        plain, other, stats, other_stats = both(name, torch.float64, lambda each: parallel(each, num_ranks))
        start = kit.make(name)
        assert difference(other, plain) < 1e-9 < 1e-4 < difference(start, plain)
        assert optimizer_difference(other, plain) < 1e-8
        assert other_stats.get_loss_stats_dict() == pytest.approx(stats.get_loss_stats_dict(), rel=1e-8)
        assert type(other_stats) is type(stats)

    @pytest.mark.usefixtures("ray_cluster")
    @pytest.mark.parametrize("name", kit.MAKERS)
    def test_one_rank_in_this_process_and_no_patch_is_left(self, name: str) -> None:
        patched = [vars(Batch)["split"], vars(SequenceSummaryStats)["from_sequence"]]
        plain, other, stats, other_stats = both(
            name, torch.float64, lambda each: wrap(each, OneRank(pickle_algorithm(each))), count=3
        )
        assert difference(other, plain) < 1e-9 < 1e-5 < difference(kit.make(name), plain)
        assert other_stats.get_loss_stats_dict() == pytest.approx(stats.get_loss_stats_dict(), rel=1e-8)
        assert patched == [vars(Batch)["split"], vars(SequenceSummaryStats)["from_sequence"]]
        algorithm: Any = other._group._rank.algorithm
        own = {name for holder in (algorithm, *algorithm._optimizers) for name in vars(holder)}
        assert not own & {"compute_episodic_return", "compute_vtrace", "step"}

    @pytest.mark.slow
    @pytest.mark.parametrize("name", kit.MAKERS)
    def test_in_float32(self, parallel: Parallel, name: str) -> None:
        plain, other, _, _ = both(name, torch.float32, lambda each: parallel(each, 3))
        assert difference(other, plain) < 1e-4

    @pytest.mark.parametrize("name", [slow_unless(name == "ppo", name) for name in ("ppo", "impala", "sac", "dqn")])
    def test_not_without_averaging(self, parallel: Parallel, name: str) -> None:
        plain, other, _, _ = both(name, torch.float64, lambda each: parallel(each, 2, averages=False), count=3)
        assert difference(other, plain) > 1e-5

    @pytest.mark.parametrize(("name", "num_ranks"), [("td3", 2), *(slow_unless(False, name, 3) for name in kit.MAKERS)])
    def test_all_ranks_end_with_the_same_bits(self, parallel: Parallel, name: str, num_ranks: int) -> None:
        other = parallel(kit.make(name), num_ranks)
        kit.updates(other, kit.fill(other), count=3)
        first, *others = other._group.ask_all("state_dict")
        assert len(others) == num_ranks - 1
        start = AlgorithmState(kit.make(name)).capture()["tensors"]
        assert not all(map(torch.equal, first["tensors"], start))
        for state in others:
            assert all(map(torch.equal, state["tensors"], first["tensors"]))
            for mine, theirs in zip(state["optimizers"], first["optimizers"], strict=True):
                for a, b in zip(mine, theirs, strict=True):
                    assert a.keys() == b.keys()
                    assert all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in a)

    @pytest.mark.parametrize(
        ("name", "num_ranks"), [("td3", 2), *(slow_unless(False, name, 3) for name in ("ppo", "impala", "td3"))]
    )
    def test_with_fewer_rows_than_ranks(self, parallel: Parallel, name: str, num_ranks: int) -> None:
        plain, other, _, _ = both(
            name, torch.float64, lambda each: parallel(each, num_ranks), count=5, rows=num_ranks - 1
        )
        assert difference(other, plain) < 1e-9

    def test_numbers_come_back(self, parallel: Parallel) -> None:
        plain, other, _, _ = both("td3", torch.float64, lambda each: parallel(each, 2), count=5)
        theirs = AlgorithmState(other.plain()).numbers()
        for place, value in AlgorithmState(plain).numbers().items():
            assert theirs[place] == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value), place
        assert plain._cnt == 5

    def test_moments_and_schedules_come_back(self, parallel: Parallel) -> None:
        plain, other, _, _ = both("ppo_variant", torch.float64, lambda each: parallel(each, 2), count=5)
        assert other.ret_rms.count == plain.ret_rms.count == 5 * 2 * 120
        assert other.ret_rms.var == pytest.approx(plain.ret_rms.var, rel=1e-12)
        rates = [each.optim._optim.param_groups[0]["lr"] for each in (plain, other)]
        assert rates[0] == rates[1] < 1e-3

    def test_generators_come_back(self, parallel: Parallel) -> None:
        left = []
        for make in (lambda each: each, lambda each: parallel(each, 2)):
            algorithm = make(kit.make("sac"))
            kit.updates(algorithm, kit.fill(algorithm), count=2)
            left.append((np.random.random(), torch.rand(1).item()))
        assert left[0] == left[1]

    def test_priorities_come_back(self, parallel: Parallel) -> None:
        weights = []
        for make in (lambda each: each, lambda each: parallel(each, 2)):
            algorithm = make(kit.make("rainbow"))
            buffer: Any = kit.fill(algorithm)
            before = buffer.weight[np.arange(120)]
            kit.updates(algorithm, buffer, count=5)
            weights.append(buffer.weight[np.arange(120)])
            assert (weights[-1] != before).any()
        np.testing.assert_allclose(weights[1], weights[0], rtol=1e-9)


class TestDriver:
    def test_shares_policy_nets_and_optimizers(self, parallel: Parallel) -> None:
        algorithm = kit.make("sac")
        other = parallel(algorithm, 2)
        assert isinstance(other, type(algorithm))
        assert other.policy is algorithm.policy
        before = copy.deepcopy(algorithm.state_dict())
        kit.updates(other, kit.fill(other), count=1)
        after, theirs = other.state_dict(), algorithm.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], theirs[name]) for name in after if name != "_optimizers")
        assert not torch.equal(after["critic.last.model.0.weight"], before["critic.last.model.0.weight"])
        assert [len(each["state"]) for each in after["_optimizers"]] == [8, 6, 6]

    def test_what_changes_here_reaches_the_ranks(self, parallel: Parallel) -> None:
        results = []
        for make in (lambda each: each, lambda each: parallel(each, 2)):
            algorithm = make(kit.make("ppo"))
            buffer = kit.fill(algorithm)
            kit.updates(algorithm, buffer, count=2)
            algorithm.ent_coef, algorithm.eps_clip = 0.5, 0.05
            kit.updates(algorithm, buffer, count=1)
            algorithm.policy.load_state_dict(kit.make("ppo", seed=7).policy.state_dict())
            kit.updates(algorithm, buffer, count=1)
            algorithm.load_state_dict(copy.deepcopy(kit.make("ppo", seed=8).state_dict()))
            kit.updates(algorithm, buffer, count=1)
            results.append(algorithm)
        assert difference(*results) < 1e-9

    @pytest.mark.parametrize("name", ["ppo", "sac"])
    def test_parameters_that_are_frozen_here_are_frozen_on_the_ranks(self, parallel: Parallel, name: str) -> None:
        results = []
        for make in (lambda each: each, lambda each: parallel(each, 2)):
            algorithm = make(kit.make(name))
            buffer = kit.fill(algorithm)
            for flag in (True, False, True):
                algorithm.policy.actor.requires_grad_(flag)
                before = copy.deepcopy(algorithm.policy.actor.state_dict())
                kit.updates(algorithm, buffer, count=1)
                after = algorithm.policy.actor.state_dict()
                assert flag != all(torch.equal(after[key], before[key]) for key in before)
            results.append(algorithm)
        assert difference(*results) < 1e-9

    def test_weights_that_are_written_past_autograd_reach_the_ranks(self, parallel: Parallel) -> None:
        results = []
        for make in (lambda each: each, lambda each: parallel(each, 2)):
            algorithm = make(kit.make("dqn"))
            buffer = kit.fill(algorithm)
            kit.updates(algorithm, buffer, count=1)
            for mine, theirs in zip(algorithm.policy.parameters(), kit.make("dqn", seed=7).parameters(), strict=False):
                mine.data.copy_(theirs)  # leaves the version of a tensor as it is
            kit.updates(algorithm, buffer, count=1)
            results.append(algorithm)
        assert difference(*results) < 1e-9 < 1e-3 < difference(results[1], kit.make("dqn"))

    def test_states_of_optimizers_that_are_loaded_reach_the_ranks(self, parallel: Parallel) -> None:
        results = []
        for make in (lambda each: each, lambda each: parallel(each, 2)):
            algorithm = make(kit.make("dqn"))
            buffer = kit.fill(algorithm)
            optimizer = algorithm.optim._optim
            fresh = copy.deepcopy(optimizer.state_dict())
            kit.updates(algorithm, buffer, count=2)
            optimizer.load_state_dict(fresh)
            kit.updates(algorithm, buffer, count=1)
            results.append(algorithm)
            assert {float(each["step"]) for each in optimizer.state.values()} == {1.0}
        assert difference(*results) < 1e-9
        assert optimizer_difference(*results) < 1e-8

    def test_schedules_of_momenta_reach_the_ranks(self, parallel: Parallel) -> None:
        results = []
        for make in (lambda each: each, lambda each: parallel(each, 2)):
            algorithm = make(kit.make("dqn"))
            optimizer = algorithm.optim._optim
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=5, cycle_momentum=True)
            for _ in range(4):
                kit.updates(algorithm, kit.fill(algorithm), count=1)
                schedule.step()
            results.append(algorithm)
        assert difference(*results) < 1e-9

    def test_a_fixed_coefficient_that_changes_here_reaches_the_ranks(self, parallel: Parallel) -> None:
        results = []
        for make in (lambda each: each, lambda each: parallel(each, 2)):
            algorithm = kit.make("sac")
            del algorithm.alpha  # a module, whose place only a module may take
            algorithm.alpha = FixedAlpha(0.1)
            algorithm = make(algorithm)
            kit.updates(algorithm, kit.fill(algorithm), count=1)
            algorithm.alpha._value = 2.0
            kit.updates(algorithm, kit.fill(algorithm), count=1)
            results.append(algorithm)
        assert difference(*results) < 1e-9

    def test_copies_are_plain(self, parallel: Parallel) -> None:
        other = parallel(kit.make("ddpg"), 2)
        kit.updates(other, kit.fill(other), count=2)
        copies = [copy.deepcopy(other), pickle.loads(pickle.dumps(other)), other.plain()]
        for each in copies:
            assert type(each).__name__ == "DDPG"
            assert difference(each, other) == 0
            assert vars(each).keys() == vars(kit.make("ddpg")).keys()
        kit.updates(copies[0], kit.fill(copies[0]), count=1)
        assert difference(copies[0], other) > 0

    def test_update_outside_of_a_training_step(self, parallel: Parallel) -> None:
        other = parallel(kit.make("dqn"), 2)
        with pytest.raises(RuntimeError, match="training step"):
            other.update(buffer=kit.fill(other), sample_size=8)


def wait_for_end(pid: int) -> None:
    wait_until(lambda: not alive(pid), "the rank has ended")


def as_class(kind: type[Any]) -> Any:
    algorithm = kit.make("ppo")
    algorithm.__class__ = kind
    return algorithm


class TestRefused:
    @pytest.mark.parametrize("kind", [NPG, Reinforce])
    def test_algorithms_that_were_not_shown_to_be_equal(self, kind: type[Any]) -> None:
        with pytest.raises(ConfigError, match=f"Got: {kind.__name__}"):
            data_parallel(as_class(kind), 2)

    def test_every_other_algorithm_of_tianshou(self) -> None:
        kinds = {
            each for each in vars(tianshou.algorithm).values() if isinstance(each, type) and issubclass(each, Algorithm)
        }
        made = {type(kit.make(name)) for name in kit.MAKERS}
        assert made == set(EQUAL) <= {*kinds, IMPALA}  # whatever is allowed is under test above
        for kind in kinds - made:
            with pytest.raises(ConfigError, match=kind.__name__):
                data_parallel(as_class(kind), 2)

    def test_a_subclass_that_changes_methods(self) -> None:
        with pytest.raises(ConfigError, match="Changed, which changes _update_with_batch"):
            data_parallel(as_class(kit.Changed), 2)

    def test_no_algorithm(self) -> None:
        with pytest.raises(ConfigError, match="Pass the algorithm, not its policy"):
            data_parallel(kit.make("ppo").policy, 2)

    @pytest.mark.parametrize(
        "layer",
        [
            torch.nn.BatchNorm1d(kit.OBS),
            torch.nn.Dropout(0.1),
            torch.nn.GRU(kit.OBS, kit.OBS, num_layers=2, dropout=0.1),
            torch.nn.MultiheadAttention(kit.OBS, 1, dropout=0.1),
        ],
    )
    def test_layers_that_mix_rows_or_draw(self, layer: torch.nn.Module) -> None:
        algorithm = kit.make("dqn")
        algorithm.policy.model = kit.Layers(layer, torch.nn.Linear(kit.OBS, kit.ACTIONS))
        with pytest.raises(ConfigError, match=type(layer).__name__):
            data_parallel(algorithm, 2)

    def test_dropout_between_layers_of_which_there_is_one(self) -> None:
        algorithm = kit.make("dqn")
        with pytest.warns(UserWarning, match="dropout option"):
            layer = torch.nn.GRU(kit.OBS, kit.OBS, dropout=0.1)
        algorithm.policy.model = kit.Layers(layer, torch.nn.Linear(kit.OBS, kit.ACTIONS))
        _check_algorithm(algorithm)

    @pytest.mark.parametrize("num_learners", [0, -1, 1.5, True])
    def test_no_count(self, num_learners: Any) -> None:
        with pytest.raises(ConfigError, match="num_learners"):
            data_parallel(kit.make("dqn"), num_learners)

    def test_a_device_that_is_none(self) -> None:
        with pytest.raises(ConfigError, match="device"):
            data_parallel(kit.make("dqn"), 2, "tpu")  # type: ignore[arg-type]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_cuda_that_is_absent(self, ray_cluster: object) -> None:
        with pytest.raises(ConfigError, match="GPU"):
            data_parallel(kit.make("dqn"), 2, "cuda")

    def test_what_cannot_be_pickled(self) -> None:
        algorithm = kit.make("dqn")
        algorithm.lock = threading.Lock()
        with pytest.raises(ConfigError, match="pickle"):
            data_parallel(algorithm, 2)

    def test_a_second_time(self, parallel: Parallel) -> None:
        with pytest.raises(ConfigError, match="once"):
            data_parallel(parallel(kit.make("dqn"), 2), 2)

    def test_tianshou_1(self, tmp_path: Any) -> None:
        (tmp_path / "tianshou").mkdir()
        (tmp_path / "tianshou" / "__init__.py").write_text('__version__ = "1.2.0"\n')
        code = "from rayvec.tianshou import data_parallel"
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 1
        assert "ConfigError: rayvec.tianshou works with Tianshou 2." in done.stderr
        assert "Got: tianshou 1.2.0" in done.stderr


def test_public_names_are_no_modules() -> None:
    """A module of the name of what it defines would take its place in the package once it is imported."""
    names = {path.stem for path in Path(rayvec.tianshou.__file__).parent.glob("*.py")}
    assert not names & set(rayvec.tianshou.__all__)


def test_a_subclass_that_adds(parallel: Parallel) -> None:
    other = parallel(as_class(kit.Named), 2)
    kit.updates(other, kit.fill(other), count=1)
    assert other.describe() == "mine"
    assert type(other.plain()) is kit.Named


class NoSubclass:
    """A distribution of its own class."""

    def sample(self) -> torch.Tensor:
        return torch.randn_like(torch.zeros(3))

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        return value


def attend(value: torch.Tensor, dropout_p: float = 0.0) -> torch.Tensor:
    return F.scaled_dot_product_attention(value, value, value, dropout_p=dropout_p)


class TestDraws:
    def test_noise_of_some_rows_is_cut_from_that_of_all(self) -> None:
        torch.manual_seed(0)
        whole = torch.randn(5, 2)
        draws = SlicedDraws()
        draws.cut = Cut(5, torch.tensor([1, 3]), 0.4)
        torch.manual_seed(0)
        with draws:
            assert torch.equal(torch.randn(2, 2), whole[[1, 3]])

    @pytest.mark.parametrize("draw", [torch.randn_like, torch.Tensor.cauchy_, torch.nn.functional.dropout])
    def test_draws_that_cannot_be_cut_are_refused(self, draw: Any) -> None:
        draws = SlicedDraws()
        draws.cut = Cut(5, torch.tensor([1, 3]), 0.4)
        with draws, pytest.raises(LearnerError, match="can't be cut"):
            draw(torch.zeros(2, 2))

    @pytest.mark.parametrize(
        ("layer", "error"),
        [
            (kit.Functional, "only torch distributions may draw.* Got: dropout"),
            (kit.Scatter, "only torch distributions may draw.* Got: randn"),
            (kit.Running, "Got: other buffers after the update"),
        ],
    )
    def test_nets_that_an_on_policy_update_refuses(self, layer: Any, error: str) -> None:
        algorithm = kit.make("a2c", torch.float32)
        algorithm.policy.actor.preprocess = kit.Body(layer())
        other = wrap(algorithm, OneRank(pickle_algorithm(algorithm), Twins()))
        with pytest.raises(LearnerError, match=error):
            kit.updates(other, kit.fill(other, torch.float32), count=1)
        alone = wrap(algorithm, OneRank(pickle_algorithm(algorithm)))
        kit.updates(alone, kit.fill(alone, torch.float32), count=1)

    def test_nets_whose_buffers_stay(self) -> None:
        algorithm = kit.make("a2c", torch.float32)
        algorithm.policy.actor.preprocess = kit.Body(torch.nn.Identity())
        algorithm.policy.register_buffer("constant", torch.ones(3))
        other = wrap(algorithm, OneRank(pickle_algorithm(algorithm), Twins()))
        kit.updates(other, kit.fill(other, torch.float32), count=1)

    @pytest.mark.parametrize(
        "dist",
        [kit.Normal(torch.zeros(3), 1.0), kit.OwnDraws(0.0, 1.0), NoSubclass()],
        ids=["torch's", "own", "no subclass"],
    )
    def test_distributions_may_draw_on_policy(self, dist: Any) -> None:
        with NoDraws():
            dist.sample()
            with pytest.raises(LearnerError, match="Got: rand"):
                torch.rand(3)

    @pytest.mark.parametrize("refuses", [SlicedDraws, NoDraws])
    @pytest.mark.parametrize(
        ("draws", "keeps"),
        [
            (partial(F.dropout, p=0.5), partial(F.dropout, p=0.0)),
            (partial(F.dropout1d, p=0.5), partial(F.dropout1d, training=False)),
            (partial(F.rrelu, training=True), F.rrelu),
            (partial(torch.dropout, p=0.5, train=True), partial(torch.dropout, p=0.5, train=False)),
            (partial(attend, dropout_p=0.5), attend),
        ],
    )
    def test_dropout_that_draws_nothing(self, refuses: Any, draws: Any, keeps: Any) -> None:
        mode = refuses()
        mode.cut = Cut(5, torch.tensor([1, 3]), 0.4)
        with mode:
            keeps(torch.ones(2, 2, 2))
            with pytest.raises(LearnerError):
                draws(torch.ones(2, 2, 2))


class TestTrainers:
    """Tianshou's trainers, unmodified."""

    def test_on_policy(self, parallel: Parallel) -> None:
        algorithm = kit.cartpole_ppo()
        start = copy.deepcopy(algorithm)
        other = parallel(algorithm, 2)
        collector = Collector(other, DummyVectorEnv([kit.make_cartpole] * 4), VectorReplayBuffer(400, 4))
        result = other.run_training(
            OnPolicyTrainerParams(
                training_collector=collector,
                test_collector=None,
                max_epochs=2,
                epoch_num_steps=200,
                collection_step_num_env_steps=100,
                update_step_num_repetitions=2,
                batch_size=32,
            )
        )
        assert result.update_step == 4
        assert difference(other, start) > 1e-4
        assert difference(other, algorithm) == 0

    def test_off_policy_as_one(self, parallel: Parallel) -> None:
        """The whole run is that of plain Tianshou from the same generators: what it collects is the same, too."""
        ends = []
        for make in (lambda each: each, lambda each: parallel(each, 2)):
            algorithm = make(kit.pendulum_sac())
            np.random.seed(0)
            torch.manual_seed(0)
            env = DummyVectorEnv([kit.make_pendulum] * 2)
            env.seed(0)
            collector = Collector(algorithm, env, VectorReplayBuffer(200, 2), exploration_noise=True)
            collector.reset(gym_reset_kwargs={"seed": 0})
            collector.collect(n_step=40, random=False)
            algorithm.run_training(
                OffPolicyTrainerParams(
                    training_collector=collector,
                    test_collector=None,
                    max_epochs=1,
                    epoch_num_steps=20,
                    collection_step_num_env_steps=4,
                    update_step_num_gradient_steps_per_sample=1.0,
                    batch_size=16,
                )
            )
            ends.append((algorithm, collector.buffer.obs[:60], collector.buffer.rew[:60]))
        (plain, obs, rew), (other, other_obs, other_rew) = ends
        np.testing.assert_allclose(other_obs, obs, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(other_rew, rew, rtol=1e-3, atol=1e-3)
        assert difference(other, plain) < 1e-3


class TestErrorsOnRanks:
    """After an error the group starts its ranks again, which takes seconds: these come last."""

    @pytest.mark.slow
    def test_what_a_net_raises(self, parallel: Parallel) -> None:
        other = parallel(kit.make("dqn"), 2)
        buffer = kit.fill(other)
        kit.updates(other, buffer, count=1)
        other.huber_loss_delta = -1.0
        with pytest.raises(RuntimeError, match="non-positive values for delta") as caught:
            kit.updates(other, buffer, count=1)
        assert isinstance(caught.value.__cause__, LearnerError)

    @pytest.mark.parametrize(
        ("layer", "error"),
        [
            slow_unless(False, kit.Jitter, "randn_like"),
            slow_unless(False, kit.Dust, "cauchy_"),
            slow_unless(False, kit.Running, "Got: other buffers after the update"),
            (kit.Flicker, r"the same state of torch's generators.* Got: 2 different states on 2 ranks"),
        ],
    )
    def test_what_differs_between_ranks(self, parallel: Parallel, layer: Any, error: str) -> None:
        algorithm = kit.make("dqn")
        algorithm.policy.model = kit.Layers(layer(), torch.nn.Linear(kit.OBS, kit.ACTIONS))
        other = parallel(algorithm.float(), 2)
        with pytest.raises(LearnerError, match=error):
            kit.updates(other, kit.fill(other, torch.float32), count=1)


class TestLostRanks:
    @pytest.mark.parametrize(
        ("name", "how", "num_nodes"),
        [("sac", "SIGKILL", None), slow_unless(False, "sac", "SIGKILL", 0), slow_unless(False, "ppo", "SIGSTOP", None)],
    )
    @pytest.mark.slow
    def test_lost_in_an_update(
        self, ray_cluster: object, tmp_path: Any, name: str, how: str, num_nodes: Literal[0] | None
    ) -> None:
        """All are started again as they were before the update, which is done again: no number changes."""
        plain, struck = kit.make(name), kit.make(name)
        kit.updates(plain, kit.fill(plain), count=3)
        mark = tmp_path / "struck"
        struck.critic.register_module("falls", kit.Falls(str(mark), 4, signal.Signals[how]))
        struck.critic.register_forward_hook(kit.fall)
        timeout_s = 60 if how == "SIGKILL" else 15
        with data_parallel(struck, 2, num_cpus=0, timeout_s=timeout_s, num_nodes=num_nodes) as other:
            pids = other.group.pids
            kit.updates(other, kit.fill(other), count=3)
            assert int(mark.read_text()) in pids
            assert not set(other.group.pids) & set(pids)
            assert difference(other, plain) < 1e-9
            pids = other.group.pids
        other.close()  # once more
        for pid in pids:
            wait_for_end(pid)
        with pytest.raises(LearnerError, match="closed"):
            kit.updates(other, kit.fill(other), count=1)

    def test_ranks_wait_a_minute_unless_told_otherwise(self) -> None:
        assert inspect.signature(data_parallel).parameters["timeout_s"].default == 60

    @pytest.mark.slow
    def test_ranks_end_when_the_algorithm_is_collected(self) -> None:
        other = data_parallel(kit.make("dqn"), 1, num_nodes=0)
        kit.updates(other, kit.fill(other), count=1)
        pid = other.group.pids[0]
        del other
        gc.collect()
        wait_for_end(pid)
