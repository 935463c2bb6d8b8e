"""How long one SAC update takes: rayvec's, and those of other libraries, interleaved on the same core.

    python benchmarks/sac_update.py --venvs VENVS          (what is not installed is left out)

Libraries that rayvec does not depend on live in virtual environments of their own:

    benchmarks/make_peer_venvs.sh VENVS stable-baselines3 jax
"""

from __future__ import annotations

import itertools
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path

import tyro
from measure import heading, markdown, share_modules
from sac_peers import PEERS

from rayvec.bench.peers import PeerProcess, marked_environment, peer_process

VENVS = {"Stable-Baselines3": "stable-baselines3", "JAX jit": "jax", "JAX jit, scanned over 32": "jax"}
OURS = "rayvec compiled"


def compare(names: list[str], width: int, threads: int, venvs: Path, repeats: int, updates: int) -> str:
    """Returns the table of one width and number of threads."""
    eigen = f"--xla_cpu_multi_thread_eigen={str(threads > 1).lower()} intra_op_parallelism_threads={threads}"
    environment = {**marked_environment(), "OMP_NUM_THREADS": str(threads), "XLA_FLAGS": eigen}
    times_ms: dict[str, list[float]] = {}
    with ExitStack() as stack:
        processes: dict[str, PeerProcess] = {}
        for name in names:  # one after another, so that none compiles while another is measured
            python = venvs / VENVS[name] / "bin" / "python" if name in VENVS else Path(sys.executable)
            task = {"name": name, "width": width, "threads": threads, "updates": updates}
            if python.exists():
                start = peer_process("sac_peers:Peer", environment, task, str(python), "builtins:dict")
                process, started = stack.enter_context(start)
                if "missing" not in started:
                    processes[name], times_ms[name] = process, []
        for _ in range(repeats):
            for name, process in processes.items():
                found = process.do("update", seconds=0.0)
                times_ms[name].append(1e3 * sum(found["times_s"]) / found["samples"])
    rows = []
    for name, ms in times_ms.items():
        ratios = [a / b for a, b in zip(ms, times_ms.get(OURS, ()), strict=False)]
        against = f"{statistics.median(ratios):.2f}" if ratios else ""
        rows.append([name, f"{statistics.median(ms):.2f}", f"{min(ms):.2f} to {max(ms):.2f}", against])
    rows += [[name, "not installed", "", ""] for name in names if name not in times_ms]
    header = [f"{width}x{width}, {threads} thread{'s' * (threads > 1)}", "ms, median", "from, to", f"time / {OURS}"]
    return markdown(header, rows)


def main(
    venvs: Path = Path("venvs"),
    widths: tuple[int, ...] = (256, 128),
    threads: tuple[int, ...] = (1, 2),
    repeats: int = 15,
    updates: int = 96,
    only: tuple[str, ...] = tuple(PEERS),
) -> None:
    """Prints a table for each width and number of threads.

    Args:
        venvs: Directory of the virtual environments.
        widths: Units of the hidden layers.
        threads: To compute with.
        repeats: Turns of each peer.
        updates: In each of the three runs of a turn; a multiple of 32.
        only: Which peers.
    """
    share_modules()
    print(heading(("torch", "numpy", "tianshou")))
    for count, width in itertools.product(threads, widths):
        print(compare(list(only), width, count, venvs, repeats, updates), end="\n\n", flush=True)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
