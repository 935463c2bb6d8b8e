"""The tests of outside behaviour: what must hold whatever the inside of rayvec looks like.

    python tests/outside.py            # names tests of outside.txt that are lost: neither there nor in outside_gone.txt
    python tests/outside.py --run      # and runs those that are there
    PYTHONPATH=CHECKOUT python tests/outside.py --write    # runs them against another checkout: outside.txt anew

`outside.txt` has the ids that pass on commit 76ee18f5. A line of `outside_gone.txt` is a pattern of
ids, and why these tests are gone or where the behaviour is tested now.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
OUTSIDE, GONE = TESTS / "outside.txt", TESTS / "outside_gone.txt"
FILES = [
    *("vector", "collect", "rollout", "tianshou", "stable_baselines3", "hosts", "node/test_worker_death.py"),
    *("learners/test_returns.py", "learners/test_ranks.py", "learners/test_sequences.py", "learners/test_sac.py"),
    *("learners/test_ppo.py", "learners/test_impala.py", "distributed/test_learner_group.py", "test_cli.py"),
    *("training/test_train.py", "training/test_runs.py", "training/test_agent.py", "training/test_evaluation.py"),
    *("training/test_stop_signals.py", "wrappers", "test_docs.py", "test_examples.py"),
]
"""Files and folders of exactness, faults, hosts, runs, and blocks of README and docs. The soak is a program."""


class Passed:
    """A plugin of pytest that keeps the ids that were collected, and those that passed."""

    def __init__(self) -> None:
        self.collected: list[str] = []
        self.passed: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Keeps the ids of all tests."""
        self.collected = [item.nodeid for item in session.items]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps the id of a test that passed."""
        if report.when == "call" and report.passed:
            self.passed.append(report.nodeid)


def run(*arguments: str) -> Passed:
    """Runs pytest on the files of outside behaviour that there are."""
    plugin = Passed()
    files = [str(TESTS / name) for name in FILES if (TESTS / name).exists()]
    pytest.main([*arguments, "-q", "-p", "no:cacheprovider", "--rootdir", str(TESTS.parent), *files], plugins=[plugin])
    return plugin


def lost(there: list[str]) -> list[str]:
    """Returns the ids of `outside.txt` that are neither `there` nor in `outside_gone.txt`."""
    patterns = [line.split(" # ")[0].strip() for line in GONE.read_text().splitlines() if " # " in line]
    missing = sorted(set(OUTSIDE.read_text().splitlines()) - set(there))
    return [each for each in missing if not any(each == one or fnmatchcase(each, one) for one in patterns)]


def main() -> int:
    """Runs what the arguments say; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.write:
        OUTSIDE.write_text("".join(f"{each}\n" for each in sorted(run().passed)))
        return 0
    with contextlib.nullcontext() if options.run else contextlib.redirect_stdout(io.StringIO()):
        found = run() if options.run else run("--collect-only")
    missing = lost(found.passed if options.run else found.collected)
    print(*missing, f"{len(missing)} tests are lost", sep="\n")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
