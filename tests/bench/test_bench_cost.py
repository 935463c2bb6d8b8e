"""The cheapest mix: the published case, and a search that can be checked by trying everything."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from conftest import AssertRefused
from helpers.examples import examples
from hypothesis import given, strategies as st

from rayvec.bench.cost_model.cost import Instance, Mix, cheapest, read_prices, suffices
from rayvec.bench.cost_model.model import Cluster, Costs, Fit
from rayvec.bench.settings import PRICES
from rayvec.cli import main

FIT = Fit({"worker": {0.01: Costs()}})


def test_the_published_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cost", "--out", str(tmp_path)]) == 0
    assert "8 g4dn.xlarge + 4 m5.2xlarge" in capsys.readouterr().out
    content = json.loads((tmp_path / "cost.json").read_text())
    assert content["schema"] == "rayvec-bench-cost"
    mixed, metal = content["rows"]
    assert mixed["counts"] == {"g4dn.xlarge": 8, "m5.2xlarge": 4}
    assert (mixed["cpus"], mixed["gpus"]) == (64, 8) and mixed["price_per_hour"] == pytest.approx(2.0456)
    assert metal["counts"] == {"g4dn.metal": 1} and metal["price_per_hour"] == pytest.approx(3.6123)
    assert metal["factor"] == pytest.approx(1.766, abs=5e-4)


@examples(30)
@given(
    st.lists(st.tuples(st.integers(1, 16), st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=3),
    st.integers(0, 20),
    st.integers(0, 3),
)
def test_nothing_is_cheaper(types: list[tuple[int, int, int]], cpus: int, gpus: int) -> None:
    instances = [Instance(str(k), c, g, price / 10) for k, (c, g, price) in enumerate(types)]

    def enough(mix: Mix) -> bool:
        return mix.cpus >= cpus and mix.gpus >= gpus

    found = cheapest(instances, enough, most=4)
    tried = [Mix.of(instances, counts) for counts in itertools.product(range(5), repeat=len(instances))]
    good = [mix for mix in tried if 0 < sum(mix.counts.values()) <= 4 and enough(mix)]
    if not good:
        assert found is None
    else:
        assert found is not None and enough(found)
        assert found.price_per_hour == pytest.approx(min(mix.price_per_hour for mix in good))


@pytest.mark.parametrize(
    ("mix", "steps_per_s", "rates", "enough"),
    [
        (Mix({"a": 1}, 10, 0, 1.0), 1000.0, {"gpu": 0.0, "cpu": 500.0}, False),  # 2 cores learn, 8 sample 800
        (Mix({"a": 1}, 10, 0, 1.0), 800.0, {"gpu": 0.0, "cpu": 500.0}, True),
        (Mix({"a": 1}, 10, 1, 1.0), 900.0, {"gpu": 1000.0, "cpu": 0.0}, True),  # a core feeds the GPU
        (Mix({"a": 1}, 10, 1, 1.0), 901.0, {"gpu": 1000.0, "cpu": 0.0}, False),
        (Mix({"a": 1}, 100, 1, 1.0), 2000.0, {"gpu": 1000.0, "cpu": 0.0}, False),
        (Mix({"a": 1}, 2, 2, 1.0), 1.0, {"gpu": 1000.0, "cpu": 0.0}, False),  # no core is left to sample
    ],
)
def test_what_machines_do(mix: Mix, steps_per_s: float, rates: dict[str, float], enough: bool) -> None:
    assert suffices(mix, steps_per_s, FIT, 0.01, rates, Cluster()) is enough


def test_a_slow_network_takes_more_machines() -> None:
    mix, rates = Mix({"a": 1}, 10, 1, 1.0), {"gpu": 1e4, "cpu": 0.0}
    assert suffices(mix, 890.0, FIT, 0.01, rates, Cluster(latency_s=1e-4))
    assert not suffices(mix, 890.0, FIT, 0.01, rates, Cluster(latency_s=0.064))  # 1 ms for each of 128 steps


@pytest.mark.parametrize(
    "text",
    ["", "instances: {}", "instances: {a: {cpus: 4}}", "instances: {a: {cpus: 4, price_per_hour: 0}}", "[", "x: 1"],
)
def test_other_price_files_are_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    assert main(["bench", "cost", "--price-file", str(path), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "price_per_hour: 0.1578" in error and str(path) in error


def test_what_no_mix_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("instances: {a: {cpus: 1, price_per_hour: 1.0}}")
    assert main(["bench", "cost", "--price-file", str(path), "--gpus", "1", "--out", str(tmp_path)]) == 2
    assert "at most 128 machines" in capsys.readouterr().err
    assert main(["bench", "cost", "--steps-per-s", "1000", "--out", str(tmp_path)]) == 2
    assert "--fit model.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--fit nowhere.json", ["only with --steps-per-s", "Got: --fit nowhere.json"]),
        ("--step-duration 0.1 --gpu-samples-per-s 5", ["Got: --step-duration 0.1, --gpu-samples-per-s 5.0"]),
        ("--steps-per-s 5 --gpus 3", ["only without --steps-per-s", "Got: --gpus 3"]),
        ("--steps-per-s 5", ["Got: no --fit and no samples/s"]),
        ("--compare-with a1.metal", ["some of g4dn.metal, ", "Got: a1.metal"]),
    ],
)
def test_what_has_no_effect_is_refused(arguments: str, words: list[str], assert_refused: AssertRefused) -> None:
    assert_refused(["bench", "cost", *arguments.split()], *words)


def test_the_example_is_read() -> None:
    currency, instances = read_prices(PRICES)
    assert currency == "USD" and {each.name for each in instances} == {"g4dn.metal", "g4dn.xlarge", "m5.2xlarge"}
