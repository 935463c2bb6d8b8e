"""``rayvec bench cost``: the cheapest mix of machines for sampling and learning."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rayvec.config.schema import Bounds, check, plain
from rayvec.errors import ConfigError

if TYPE_CHECKING:
    from rayvec.bench.cost_model.model import Cluster, Fit

__all__ = ["Cost", "Instance", "Mix", "cheapest", "read_prices"]

Positive = Annotated[float, Bounds(0, above=True)]
PRICES = Path(__file__).with_name("prices_2023.yaml")


@dataclass(frozen=True, slots=True)
class Instance:
    """A machine that can be had for money.

    Attributes:
        name: Its type.
        cpus: Cores.
        gpus: GPUs.
        price_per_hour: In the price file's currency.
    """

    name: str
    cpus: int
    gpus: int
    price_per_hour: float


@dataclass(frozen=True, slots=True)
class Mix:
    """Machines, and what they give.

    Attributes:
        counts: Of each type that is used.
        cpus: Cores in all.
        gpus: GPUs in all.
        price_per_hour: In all.
    """

    counts: dict[str, int]
    cpus: int
    gpus: int
    price_per_hour: float

    def __str__(self) -> str:
        return " + ".join(f"{count} {name}" for name, count in self.counts.items())

    @property
    def nodes(self) -> int:
        """How many machines."""
        return sum(self.counts.values())


def mix_of(instances: Sequence[Instance], counts: Sequence[int]) -> Mix:
    """Returns so many of each instance as a mix."""
    pairs = [(each, count) for each, count in zip(instances, counts, strict=True) if count]
    return Mix(
        {each.name: count for each, count in pairs},
        sum(count * each.cpus for each, count in pairs),
        sum(count * each.gpus for each, count in pairs),
        sum(count * each.price_per_hour for each, count in pairs),
    )


def cheapest(instances: Sequence[Instance], enough: Callable[[Mix], bool], most: int = 128) -> Mix | None:
    """Returns the cheapest mix that is enough; of equally cheap ones that of the fewest machines.

    Searches counts of every instance by price, cheapest mix first, so that the first that is enough is the answer.

    Args:
        instances: To choose from.
        enough: Whether a mix does what is wanted. A mix with more machines may do less, since nodes cost something.
        most: Machines of a mix at most.

    Returns:
        The mix, or None if none of up to `most` machines is enough.

    >>> big, small = Instance("big", 8, 0, 1.0), Instance("small", 2, 0, 0.3)
    >>> str(cheapest([big, small], lambda mix: mix.cpus >= 10))
    '1 big + 1 small'
    """
    import heapq

    start = (0,) * len(instances)
    heap: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, start)]
    while heap:
        _, nodes, counts = heapq.heappop(heap)
        mix = mix_of(instances, counts)
        if nodes and enough(mix):
            return mix
        if nodes == most:
            continue
        # Each mix is made in one way only: by adding to its last type, or to one after that.
        last = max((place for place, count in enumerate(counts) if count), default=0)
        for place in range(last, len(instances)):
            more = (*counts[:place], counts[place] + 1, *counts[place + 1 :])
            heapq.heappush(heap, (round(mix_of(instances, more).price_per_hour, 9), nodes + 1, more))
    return None


def read_prices(path: Path) -> tuple[str, list[Instance]]:
    """Returns the currency and the instances of a price file.

    Raises:
        ConfigError: It has another form.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
        instances = [
            Instance(str(name), int(each["cpus"]), int(each.get("gpus", 0)), float(each["price_per_hour"]))
            for name, each in content["instances"].items()
        ]
        if not instances or any(each.price_per_hour <= 0 or each.cpus < 1 or each.gpus < 0 for each in instances):
            raise ValueError("prices are above 0, cores at least 1")
        return str(content.get("currency", "")), instances
    except (OSError, KeyError, TypeError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise ConfigError(
            "--price-file is YAML that lists instances.",
            expected="instances: {name: {cpus: 4, gpus: 1, price_per_hour: 0.1578}}",
            got=f"{path} ({type(error).__name__}: {error})",
            remedy=f"Write it after the example {PRICES}.",
        ) from error


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Find the cheapest mix of machines for so many steps/s, or for so many cores and GPUs.

    Without options it is the published case: 64 sampling cores and 8 GPUs.
    """

    price_file: Path = PRICES
    """YAML with the cores, the GPUs and the price an hour of each instance."""

    steps_per_s: Positive | None = None
    """Wanted steps/s; sampling follows the model in --fit, learning the throughput given below."""

    sampling_cpus: Annotated[int, Bounds(0)] = 64
    """Cores for environments, where --steps-per-s is not given."""

    gpus: Annotated[int, Bounds(0)] = 8
    """GPUs for learners, where --steps-per-s is not given."""

    fit: Path | None = None
    """A model.json of rayvec bench model, for --steps-per-s."""

    step_duration: Positive = 0.001
    """Seconds that an environment takes for a step, for --steps-per-s."""

    gpu_samples_per_s: Positive | None = None
    """What a GPU learns from, in samples a second (rayvec bench learner --device cuda)."""

    network_latency_us: Annotated[float, Bounds(0)] | None = None
    """As of rayvec bench model: one way between machines, beside what was measured."""

    network_gbit: Positive | None = None
    """As of rayvec bench model: bandwidth of the driver's network, beside what was measured."""

    cpu_samples_per_s: Positive | None = None
    """What a core learns from that does nothing else (rayvec bench learner)."""

    compare_with: tuple[str, ...] = ("g4dn.metal",)
    """Types whose cheapest mix alone is shown beside it."""

    out: Path = Path("runs/bench-cost")
    """Directory for cost.json and cost.csv; what was there before is replaced."""

    def run(self, mentioned: frozenset[str] = frozenset()) -> None:
        """Searches, prints the table, and writes the files."""
        check(self)
        from rayvec.bench.results import Results
        from rayvec.bench.terminal import console, show_table

        currency, instances = read_prices(self.price_file)
        enough, wanted = self._need()
        chosen = self._choose(instances, enough, "all")
        others = [
            (name, self._choose([each for each in instances if each.name == name], enough, name))
            for name in self.compare_with
            if any(each.name == name for each in instances)
        ]
        values = {name: str(value) if isinstance(value, Path) else value for name, value in plain(self).items()}
        results = Results("cost", values, self.out / "cost.json")
        terminal = console()
        lines = []
        for what, mix in [("cheapest", chosen), *((f"{name} alone", mix) for name, mix in others)]:
            factor = mix.price_per_hour / chosen.price_per_hour
            results.rows.append({"what": what, **asdict(mix), "mix": str(mix), "factor": factor})
            lines.append((what, str(mix), str(mix.cpus), str(mix.gpus), f"{mix.price_per_hour:.4f}", f"{factor:.2f}"))
        show_table(
            terminal,
            f"For {wanted}",
            ("", "machines", "cores", "GPUs", f"{currency} an hour", "times the cheapest"),
            lines,
        )
        results.write()
        terminal.print(f"written: {results.path}, {results.write_csv()}")

    def _choose(self, instances: Sequence[Instance], enough: Callable[[Mix], bool], what: str) -> Mix:
        mix = cheapest(instances, enough)
        if mix is None:
            raise ConfigError(
                "Some mix of machines does what is wanted.",
                expected="at most 128 machines",
                got=f"none of {', '.join(each.name for each in instances)} ({what}) is enough",
                remedy="Ask for less, or add larger instances to the price file.",
            )
        return mix

    def _need(self) -> tuple[Callable[[Mix], bool], str]:
        """Returns what a mix must fulfil, and the same in words."""
        if self.steps_per_s is None:
            wanted = f"{self.sampling_cpus} sampling cores and {self.gpus} GPUs"
            return lambda mix: mix.cpus >= self.sampling_cpus and mix.gpus >= self.gpus, wanted
        if self.fit is None or (self.gpu_samples_per_s is None and self.cpu_samples_per_s is None):
            raise ConfigError(
                "--steps-per-s needs to know what machines do.",
                expected="--fit model.json, and --gpu-samples-per-s or --cpu-samples-per-s",
                got=f"--fit {self.fit}, {self.gpu_samples_per_s} and {self.cpu_samples_per_s} samples/s",
                remedy="Measure with rayvec bench model and rayvec bench learner, and pass what they say.",
            )
        from rayvec.bench.cost_model.calibrate import read_measured
        from rayvec.bench.cost_model.plan import cluster_beside

        measured = read_measured(self.fit)
        found, network = measured.fit(), cluster_beside(measured, self.network_latency_us, self.network_gbit)
        rates = {"gpu": self.gpu_samples_per_s or 0.0, "cpu": self.cpu_samples_per_s or 0.0}

        def enough(mix: Mix) -> bool:
            return suffices(mix, float(self.steps_per_s or 0.0), found, self.step_duration, rates, network)

        return enough, f"{self.steps_per_s:,.0f} steps/s, sampled and learned from"


def suffices(
    mix: Mix, steps_per_s: float, found: Fit, step_s: float, samples_per_s: Mapping[str, float], network: Cluster
) -> bool:
    """Says whether machines sample and learn from so many steps a second.

    GPUs learn first; what they don't do is learned by cores, which then sample nothing. A GPU takes a core to feed it.
    """
    from rayvec.bench.cost_model.model import Setting
    from rayvec.bench.cost_model.model import steps_per_s as predicted

    gpus = mix.gpus if samples_per_s["gpu"] else 0
    left = max(0.0, steps_per_s - gpus * samples_per_s["gpu"])
    if left and not samples_per_s["cpu"]:
        return False
    learning = gpus + (math.ceil(left / samples_per_s["cpu"]) if left else 0)
    sampling = mix.cpus - learning
    if sampling < 1:
        return False
    workers = max(1, math.ceil(sampling / mix.nodes))
    setting = Setting(mix.nodes, workers, inference="worker", chunk_steps=128, step_s=step_s)
    each = predicted(found, setting, network) / setting.num_envs
    return sampling * each >= steps_per_s
