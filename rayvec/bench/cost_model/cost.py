"""``rayvec bench cost``: the cheapest mix of machines for sampling and learning."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import yaml

from rayvec.bench.cost_model.command import cluster_of
from rayvec.bench.cost_model.measuring import Measured
from rayvec.bench.cost_model.model import Cluster, Fit, Setting, steps_per_s
from rayvec.bench.results import Results
from rayvec.bench.settings import PRICES, Cost
from rayvec.bench.terminal import show_table
from rayvec.config.schema import check
from rayvec.errors import ConfigError

__all__ = ["Instance", "Mix", "cheapest", "read_prices", "run", "suffices"]


_FOR_CORES = ("sampling_cpus", "gpus")
_FOR_STEPS = (
    "fit", "step_duration", "gpu_samples_per_s", "cpu_samples_per_s", "network_latency_us", "network_gbit"
)  # fmt: skip
"""Settings of the two searches: for cores and GPUs, and for steps/s."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A machine for rent.

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
    """Machines, and what they have together.

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

    @classmethod
    def of(cls, instances: Sequence[Instance], counts: Sequence[int]) -> Mix:
        """Returns so many of each instance."""
        pairs = [(each, count) for each, count in zip(instances, counts, strict=True) if count]
        cpus, gpus = (sum(count * getattr(each, what) for each, count in pairs) for what in ("cpus", "gpus"))
        price = round(sum(count * each.price_per_hour for each, count in pairs), 9)
        return cls({each.name: count for each, count in pairs}, cpus, gpus, price)

    def __str__(self) -> str:
        return " + ".join(f"{count} {name}" for name, count in self.counts.items())


def cheapest(instances: Sequence[Instance], enough: Callable[[Mix], bool], most: int = 128) -> Mix | None:
    """Returns the cheapest mix that is enough; of equally cheap ones that of the fewest machines.

    Searches counts of every instance by price, cheapest mix first, so the first that is enough is the answer.

    Args:
        instances: To choose from.
        enough: Whether a mix suffices. A mix with more machines may do less, since nodes cost something.
        most: Machines of a mix at most.

    Returns:
        The mix, or None if none of up to `most` machines is enough.

    >>> big, small = Instance("big", 8, 0, 1.0), Instance("small", 2, 0, 0.3)
    >>> str(cheapest([big, small], lambda mix: mix.cpus >= 10))
    '1 big + 1 small'
    """
    ones = np.eye(len(instances), dtype=int).tolist()
    heap = [(each.price_per_hour, 1, tuple(counts)) for each, counts in zip(instances, ones, strict=True)]
    heapq.heapify(heap)
    while heap:
        _, nodes, counts = heapq.heappop(heap)
        mix = Mix.of(instances, counts)
        if enough(mix):
            return mix
        # Each mix is made in one way only: by adding to its last type, or to one after that.
        last = max(place for place, count in enumerate(counts) if count)
        for place in range(last, len(instances) if nodes < most else 0):
            more = (*counts[:place], counts[place] + 1, *counts[place + 1 :])
            heapq.heappush(heap, (Mix.of(instances, more).price_per_hour, nodes + 1, more))
    return None


def read_prices(path: Path) -> tuple[str, list[Instance]]:
    """Returns the currency and the instances of a price file.

    Raises:
        ConfigError: It has another form.
    """
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


def run(settings: Cost) -> None:
    """Searches, prints the table, and writes the files."""
    check(settings)
    currency, instances = read_prices(settings.price_file)
    _check_used(settings, {each.name for each in instances})
    enough, wanted = _need(settings)
    groups = {"cheapest": instances}
    for name in settings.compare_with:
        groups |= {f"{name} alone": [each] for each in instances if each.name == name}
    mixes = {what: _choose(group, enough) for what, group in groups.items()}
    results = Results.of("cost", settings)
    lines = []
    for what, mix in mixes.items():
        factor = mix.price_per_hour / mixes["cheapest"].price_per_hour
        results.rows.append({"what": what, **asdict(mix), "mix": str(mix), "factor": factor})
        lines.append((what, str(mix), str(mix.cpus), str(mix.gpus), f"{mix.price_per_hour:.4f}", f"{factor:.2f}"))
    show_table(f"For {wanted}", ("", "machines", "cores", "GPUs", f"{currency} per hour", "times the cheapest"), lines)
    results.finish()


def _check_used(settings: Cost, instances: Collection[str]) -> None:
    """Refuses settings that would have no effect.

    Raises:
        ConfigError: One is for the other kind of search, or names an instance that is not in the price file.
    """
    names = _FOR_CORES if settings.steps_per_s is not None else _FOR_STEPS
    unused = [name for name in names if getattr(settings, name) != getattr(Cost, name)]
    if unused:
        takes = "without" if settings.steps_per_s is not None else "with"
        raise ConfigError(
            "The search is for steps/s (--steps-per-s), or for cores and GPUs.",
            expected=f"these options only {takes} --steps-per-s",
            got=", ".join(f"--{name.replace('_', '-')} {getattr(settings, name)}" for name in unused),
            remedy="Leave --steps-per-s out, or these options." if takes == "without" else "Pass --steps-per-s too.",
        )
    unknown = [name for name in settings.compare_with if name not in instances]
    if unknown and settings.compare_with != Cost.compare_with:  # other price files may lack the default
        raise ConfigError(
            "--compare-with names instances of the price file.",
            expected=f"some of {', '.join(sorted(instances))}",
            got=", ".join(unknown),
            remedy="Correct the name, or leave it out.",
        )


def _choose(instances: Sequence[Instance], enough: Callable[[Mix], bool]) -> Mix:
    mix = cheapest(instances, enough)
    if mix is None:
        raise ConfigError(
            "Some mix of machines must suffice.",
            expected="at most 128 machines",
            got=f"no mix of {', '.join(each.name for each in instances)} is enough",
            remedy="Ask for less, or add larger instances to the price file.",
        )
    return mix


def _need(settings: Cost) -> tuple[Callable[[Mix], bool], str]:
    """Returns what a mix must fulfil, and the same in words."""
    if settings.steps_per_s is None:
        wanted = f"{settings.sampling_cpus} sampling cores and {settings.gpus} GPUs"
        return lambda mix: mix.cpus >= settings.sampling_cpus and mix.gpus >= settings.gpus, wanted
    if settings.fit is None or (settings.gpu_samples_per_s is None and settings.cpu_samples_per_s is None):
        has_rate = settings.gpu_samples_per_s is not None or settings.cpu_samples_per_s is not None
        missing = ["--fit"] * (settings.fit is None) + ["samples/s"] * (not has_rate)
        raise ConfigError(
            "--steps-per-s needs the throughput of machines.",
            expected="--fit model.json, and --gpu-samples-per-s or --cpu-samples-per-s",
            got=" and ".join(f"no {each}" for each in missing),
            remedy="Measure with rayvec bench model and rayvec bench learner, and pass what they print.",
        )
    measured, wanted_per_s = Measured.read(settings.fit), settings.steps_per_s
    found, network = measured.fit(), cluster_of(measured, settings.network_latency_us, settings.network_gbit)
    learned = {"gpu": settings.gpu_samples_per_s or 0.0, "cpu": settings.cpu_samples_per_s or 0.0}
    return (
        lambda mix: suffices(mix, wanted_per_s, found, settings.step_duration, learned, network),
        f"{wanted_per_s:,.0f} steps/s, sampled and learned from",
    )


def suffices(
    mix: Mix, wanted_per_s: float, found: Fit, step_s: float, samples_per_s: Mapping[str, float], network: Cluster
) -> bool:
    """Says whether machines sample and learn from so many steps per second.

    GPUs learn first; cores learn what GPUs don't, and then sample nothing. A GPU takes a core that feeds it.
    """
    gpus = mix.gpus if samples_per_s["gpu"] else 0
    left = max(0.0, wanted_per_s - gpus * samples_per_s["gpu"])
    if left and not samples_per_s["cpu"]:
        return False
    learning = gpus + (math.ceil(left / samples_per_s["cpu"]) if left else 0)
    sampling = mix.cpus - learning
    if sampling < 1:
        return False
    nodes = sum(mix.counts.values())
    workers = max(1, math.ceil(sampling / nodes))
    setting = Setting(nodes, workers, inference="worker", chunk_steps=128, step_s=step_s)
    each = steps_per_s(found, setting, network) / setting.num_envs
    return sampling * each >= wanted_per_s
