"""What compile='auto' decides, and what compiling needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.actor_critic_kit import BOX, OBS, make_batch, ppo_config
from torch import nn

from rayvec.config import IMPALAConfig, PPOConfig, SACConfig
from rayvec.errors import ConfigError
from rayvec.learners.compile_decision import compiles
from rayvec.learners.compiling import Compiled
from rayvec.learners.gradient import Gradient
from rayvec.learners.onednn import fast_products, onednn_is_faster
from rayvec.learners.ppo import PPOLearner
from rayvec.policies.policy import Policy
from rayvec.training.runs import wait_limit_s

NUMBERS = spaces.Box(-1, 1, (3,), np.float32)
LONG: dict[str, Any] = {"preset": "none", "total_steps": 100_000_000}


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        (PPOConfig, {}, False),
        (IMPALAConfig, {}, False),
        (SACConfig, {"total_steps": 10_000}, False),
        (PPOConfig, LONG, True),
        (IMPALAConfig, LONG, True),
        (SACConfig, LONG, True),
        (PPOConfig, {**LONG, "network": "some.module:function"}, False),
        (PPOConfig, {**LONG, "learner_device": "cuda"}, False),
        (PPOConfig, {"compile": True}, True),
        (SACConfig, {**LONG, "compile": False}, False),
    ],
    ids=str,
)
def test_long_runs_compile_unless_settings_say_otherwise(kind: Any, settings: dict[str, Any], expected: bool) -> None:
    config = kind(**settings)
    assert compiles(config, NUMBERS) is expected
    assert wait_limit_s(config) > wait_limit_s(PPOConfig()) or not expected


def test_parameters_of_two_kinds_or_none_are_refused() -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double())
    with pytest.raises(ConfigError, match=r"are \['torch.float32 on cpu', 'torch.float64 on cpu'\]"):
        Gradient(net, lambda *args: args)
    with pytest.raises(ConfigError, match=r"parameters are \[\]"):
        Gradient(nn.Tanh(), lambda *args: args)


@torch.compiler.set_stance("force_eager")
def test_what_fills_a_minibatch_up_is_not_too_likely() -> None:
    """Of twenty narrow Gaussians the density at 0 is beyond float32: rows of zeros would bring infinity times 0."""
    act: Any = BOX.__class__(-1, 1, (20,), np.float32)
    for size in (31, 64):  # minibatches of 33 and 31 steps in a loop, and one of them all
        learner = PPOLearner(OBS, act, ppo_config(compile=True, log_std_init=-6.0, minibatch_size=size))
        before = learner.weights()
        metrics = learner.update(make_batch(Policy(learner.module), invalid=True))
        assert np.isfinite([*metrics.values()]).all()
        assert (learner.weights() != before).any() and np.isfinite(learner.weights()).all()


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")  # once in a process
def test_without_a_compiler_it_says_what_to_install() -> None:
    from torch._inductor import config as inductor

    function = Compiled(lambda state, rows: 2 * state * rows)
    with (
        torch.compiler.config.patch(force_disable_caches=True),  # monkeypatch could undo neither of the two
        inductor.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.warns(RuntimeWarning, match=r"uncompiled.*Install a C\+\+ compiler") as warned,
    ):
        for _ in range(2):
            assert function(torch.ones(7), torch.ones(7)).tolist() == [2.0] * 7
    assert [each.category for each in warned].count(RuntimeWarning) == 1


ZEN_5 = "vendor_id : AuthenticAMD\ncpu family : 26\nflags : avx512f"


@pytest.mark.parametrize(
    "cpu", ["", ZEN_5.replace("26", "25"), ZEN_5 + " amx_bf16", ZEN_5.replace("AuthenticAMD", "I")]
)
def test_onednn_multiplies_where_it_is_known_to_be_faster(cpu: str) -> None:
    assert not onednn_is_faster(cpu)


@pytest.mark.skipif(not onednn_is_faster(Path("/proc/cpuinfo").read_text()), reason="MKL multiplies as fast here")
@pytest.mark.parametrize("of_all", ["none", "ieee"])
def test_products_by_onednn_are_those_of_float32(of_all: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, switch = torch.randn(256, 128), torch.randn(128, 128), torch.backends.mkldnn.matmul
    monkeypatch.setattr(torch.backends.mkldnn, "fp32_precision", of_all)
    for num_rows, own, expected in ((256, False, "bf16"), (255, False, of_all), (256, True, of_all)):
        with fast_products(num_rows, b.numel(), own):
            assert switch.fp32_precision == expected
            torch.testing.assert_close(a @ b, (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-4)
        assert switch.fp32_precision == of_all
    entered = fast_products(1 << 22, 1, False)
    with pytest.raises(ValueError, match="a learner's"), fast_products(1 << 22, 1, False):
        entered.__enter__()  # of another thread, which ends later
        raise ValueError("a learner's")
    assert switch.fp32_precision == "bf16"
    entered.__exit__(None, None, None)
    monkeypatch.undo()
    assert switch.fp32_precision == "none"  # inherited as before
