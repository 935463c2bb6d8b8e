"""How long one SAC update takes: ours, and those of other libraries, taking turns on the same core.

    python benchmarks/sac_update.py --venvs VENVS          (what is not installed is left out)

Libraries that rayvec does not depend on live in virtual environments of their own:

    benchmarks/make_peer_venvs.sh VENVS stable-baselines3 jax
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from measure import heading, markdown
from sac_peers import PEERS

VENVS = {"Stable-Baselines3": "stable-baselines3", "JAX jit": "jax", "JAX jit, scanned over 32": "jax"}
OURS = "rayvec compiled"


class Peer:
    """One library in a process of its own.

    Args:
        name: Which.
        width: Of the hidden layers.
        threads: To compute with.
        peers: Directory of the virtual environments.
    """

    def __init__(self, name: str, width: int, threads: int, peers: Path) -> None:
        self.name = name
        self.times_s: list[float] = []
        python = peers / VENVS[name] / "bin" / "python" if name in VENVS else Path(sys.executable)
        self._process: subprocess.Popen[str] | None = None
        if not python.exists():
            return
        eigen = f"--xla_cpu_multi_thread_eigen={str(threads > 1).lower()} intra_op_parallelism_threads={threads}"
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "XLA_FLAGS": eigen}
        if name in VENVS:
            env.pop("PYTHONPATH", None)
        command = [str(python), str(Path(__file__).with_name("sac_peers.py")), name, str(width), str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )

    def ready(self) -> bool:
        """Waits until the library is; False if it can't be imported."""
        if self._process is None:
            return False
        assert self._process.stdout is not None and self._process.stderr is not None
        if self._process.stdout.readline().strip() == "ready":
            return True
        print(f"{self.name}: {self._process.stderr.read().strip().splitlines()[-1:]}", file=sys.stderr)
        return False

    def take_turn(self, updates: int) -> None:
        """Lets it run while the others wait."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{updates}\n")
        self._process.stdin.flush()
        self.times_s.append(float(self._process.stdout.readline()))

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.communicate()


def compare(width: int, threads: int, options: argparse.Namespace) -> str:
    """Returns the table of one width and number of threads."""
    names = [name for name in PEERS if not options.only or name in options.only]
    peers, absent = [], []
    for name in names:  # one after another, so that nobody compiles while another measures
        peer = Peer(name, width, threads, options.venvs)
        (peers if peer.ready() else absent).append(peer)
    for _ in range(options.repeats):
        for peer in peers:
            peer.take_turn(options.updates)
    for peer in peers + absent:
        peer.close()
    ours = next((peer.times_s for peer in peers if peer.name == OURS), None)
    rows = []
    for peer in peers:
        ms = [1e3 * each for each in peer.times_s]
        against = f"{statistics.median(a / b for a, b in zip(peer.times_s, ours, strict=True)):.2f}" if ours else ""
        rows.append([peer.name, f"{statistics.median(ms):.2f}", f"{min(ms):.2f} to {max(ms):.2f}", against])
    rows += [[peer.name, "not installed", "", ""] for peer in absent]
    header = [f"{width}x{width}, {threads} thread{'s' * (threads > 1)}", "ms, median", "from, to", f"time / {OURS}"]
    return markdown(header, rows)


def main() -> None:
    """Prints a table for each width and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venvs", type=Path, default=Path("venvs"), help="directory of the virtual environments")
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 128])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--updates", type=int, default=96, help="updates in a turn; a multiple of 32")
    parser.add_argument("--only", nargs="+", choices=list(PEERS), help="leave the others out")
    options = parser.parse_args()
    print(heading(("torch", "numpy", "tianshou")))
    for threads in options.threads:
        for width in options.widths:
            print(compare(width, threads, options), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
