"""Where the time of emulated cores goes: each is in exactly one state at any time.

A *call* asks all environments for one step, or for a chunk of them, and is answered when the slowest is done. Seen
from one worker process, the time from one call to the next is, in this order: on the way there (transport,
or the driver's own work as far as that has used CPU),
environment and inference alternating, with bookkeeping between them (serialisation), waiting for the slowest
worker, on the way back (likewise), and the driver's own work until the next call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["STATES", "split", "split_ahead"]

STATES = ("environment", "inference", "serialisation", "transport", "waiting", "driver", "unattributed")
Times = NDArray[np.float64]


def split(
    calls: Times,
    clocks: Sequence[Times],
    inference_s: NDArray[np.float64] | None = None,
    packing_s: float = 0.0,
    driver_s: float = 0.0,
) -> dict[str, float]:
    """Returns the share of each state in the time of all workers; the shares sum to 1.

    Args:
        calls: When each was requested and when it was answered, ``float64 [C, 2]``, in order.
        clocks: For each worker when its steps began and ended, by the clock of the calls, ``float64 [m, 2]``, in order.
        inference_s: Seconds that each worker's policy took in each call, ``float64 [C, workers]``.
        packing_s: Seconds of a call that are known, from timing it apart, to be spent on packing and unpacking on
            the way; they are taken out of the transport.
        driver_s: Seconds of CPU time that the driver's process used in a call beside packing; likewise.

    >>> shares = split(np.array([[0.0, 0.8], [1.0, 1.8]]), [np.array([[0.1, 0.6]]), np.array([[0.1, 0.7]])])
    >>> {state: round(float(share), 3) for state, share in shares.items() if share > 1e-9}
    {'environment': 0.55, 'transport': 0.2, 'waiting': 0.05, 'driver': 0.2}
    """
    total = dict.fromkeys(STATES, 0.0)
    firsts = [times[:, 0] for times in clocks]
    for number in range(len(calls) - 1):
        asked, answered = calls[number]
        period = calls[number + 1, 0] - asked
        spans = [slice(*np.searchsorted(first, (asked, answered)).tolist()) for first in firsts]
        ends = [times[span][-1, 1] for times, span in zip(clocks, spans, strict=True) if span.start < span.stop]
        last = min(max(ends, default=answered), answered)
        for worker, (times, span) in enumerate(zip(clocks, spans, strict=True)):
            if span.start == span.stop:
                total["unattributed"] += period
                continue
            steps = times[span]
            environment = float((steps[:, 1] - steps[:, 0]).sum())
            inference = 0.0 if inference_s is None else float(inference_s[number, worker])
            between = steps[-1, 1] - steps[0, 0] - environment
            on_the_way = max(0.0, steps[0, 0] - asked) + max(0.0, answered - last)
            before_first = max(0.0, inference - between)  # the first choice precedes the first step
            packing = min(packing_s, on_the_way - before_first)
            driver = min(driver_s, on_the_way - before_first - packing)
            states = {
                "environment": environment,
                "inference": inference,
                "serialisation": max(0.0, between - inference) + packing,
                "transport": on_the_way - before_first - packing - driver,
                "waiting": max(0.0, last - steps[-1, 1]),
                "driver": calls[number + 1, 0] - answered + driver,
            }
            for state, seconds in states.items():
                total[state] += seconds
            total["unattributed"] += abs(period - sum(states.values()))
    return _shares(total)


def split_ahead(
    clocks: Sequence[Times], chunk_steps: Sequence[int], inference_s: NDArray[np.float64], packing_s: float = 0.0
) -> dict[str, float]:
    """Returns the same for prefetched chunks, which are requested before the previous chunk is answered.

    From the first step of a chunk to that of the next a worker is in its environments, infers or writes down, and then
    in the gap: packing, waiting for the slowest worker, and transport. The driver works while a chunk is pending.

    Args:
        clocks: As of :func:`split`; the last chunk of each worker is there only to end the one before.
        chunk_steps: Steps of each worker's environments in a chunk.
        inference_s: Seconds of inference in the chunks before the last, ``float64 [C, workers]``.
        packing_s: Seconds of packing of a chunk, timed apart; they are taken out of the gap.

    >>> steps = np.array([[0.0, 0.8], [1.0, 1.8]])
    >>> shares = split_ahead([steps], [1], np.array([[0.1]]))
    >>> {state: round(float(share), 3) for state, share in shares.items() if share > 1e-9}
    {'environment': 0.8, 'inference': 0.1, 'transport': 0.1}
    """
    total = dict.fromkeys(STATES, 0.0)
    count = min(len(inference_s), *(len(times) // m - 1 for times, m in zip(clocks, chunk_steps, strict=True)))
    if count < 1:
        return _shares(total)
    chunks = [times[-m * (count + 1) :].reshape(-1, m, 2) for times, m in zip(clocks, chunk_steps, strict=True)]
    slowest = np.max([chunk[:-1, -1, 1] for chunk in chunks], axis=0)
    for worker, chunk in enumerate(chunks):
        first, last = chunk[:, 0, 0], chunk[:-1, -1, 1]
        environment = (chunk[:-1, :, 1] - chunk[:-1, :, 0]).sum(1)
        between, gap = last - first[:-1] - environment, first[1:] - last
        inference = inference_s[-count:, worker]
        written = np.maximum(0.0, between - inference)
        before_first = np.minimum(inference - (between - written), gap)  # the first choice precedes the first step
        packing = np.minimum(packing_s, gap - before_first)
        waiting = np.minimum(slowest - last, gap - before_first - packing)
        for state, seconds in {
            "environment": environment,
            "inference": between - written + before_first,
            "serialisation": written + packing,
            "transport": gap - before_first - packing - waiting,
            "waiting": waiting,
        }.items():
            total[state] += float(seconds.sum())
    return _shares(total)


def _shares(seconds: dict[str, float]) -> dict[str, float]:
    """Returns the share of each state; of no time at all, everything is unattributed."""
    whole = sum(seconds.values())
    return {state: each / whole for state, each in seconds.items()} if whole else {**seconds, "unattributed": 1.0}
