"""One Ray for the whole test session, private, with more cores than the machine has, shut down for sure."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from rayvec.vector.ray_vec_env import RayVecEnv

_OF_THE_USER = re.compile("(RAY|WANDB|MLFLOW|OMP|RAYVEC(?!_TEST))_|CUDA_VISIBLE_DEVICES$")
if "RAYVEC_TEST_BEGAN" not in os.environ:  # workers that import this have what a test has set
    os.environ["RAYVEC_TEST_BEGAN"] = "yes"
    for _name in filter(_OF_THE_USER.match, [*os.environ]):  # else a test would use the user's cluster, for example
        del os.environ[_name]
if threading.current_thread() is threading.main_thread():  # a node's thread imports this with a policy
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs us in the background has it ignored
# Workers import what tests define: from the folders of the test modules and from this one.
_FOLDERS = [str(path) for path in Path(__file__).parent.glob("*/") if path.is_dir()]
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [os.path.dirname(__file__), *_FOLDERS, os.environ.get("PYTHONPATH")])
)
os.environ["RAY_health_check_period_ms"] = "300"  # a killed raylet is noticed in 2 s; one that is slow has 10 s a check
os.environ["RAY_worker_niceness"] = "0"  # else what computes in this process keeps workers off the cores
os.environ.setdefault("NUMBA_DISABLE_JIT", "1")  # each process would compile Tianshou's loops for seconds
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # else torch compiles six programs to try the processor, 10 s
os.environ.setdefault("RAY_AUTH_TOKEN", "rayvec-tests-" + os.urandom(16).hex())  # Ray would write one to the home

hypothesis.settings.register_profile("few", max_examples=20, deadline=None, derandomize=True)
hypothesis.settings.register_profile("many", max_examples=100, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="run the tests marked slow too, and more examples of properties"
    )


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("many" if config.getoption("--all") else "few")
    if not config.getoption("--all"):  # the tests compile one program: a precompiled header costs 5 s more
        os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
    if not hasattr(config, "workerinput"):  # xdist's processes inherit what the first process sets
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="rvt-")
        Finalize(None, shutil.rmtree, (tempfile.tempdir, True), exitpriority=-200)  # after multiprocessing's own


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects slow tests without ``--all``."""
    if not config.getoption("--all"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("slow")])
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    """Sets what differs between tests in the environment to one value: a fork server serves one environment."""
    os.environ["PYTEST_CURRENT_TEST"] = ""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call() -> None:
    """Does the same where a test begins: pytest has just set it again."""
    os.environ["PYTEST_CURRENT_TEST"] = ""


def pytest_collection_finish() -> None:
    """Excludes what the test modules have imported from garbage collection, which would take 0.3 s each time.

    And torch computes in one thread: what is computed here is small, and a second thread would wait for the first.
    """
    gc.collect()
    gc.freeze()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[object]:
    """Two simulated nodes on this machine, 24 and 8 cores; the driver runs on the first."""
    import ray
    from ray.cluster_utils import Cluster

    directory = tempfile.mkdtemp(prefix="c-")
    os.mkdir(f"{directory}/ray")
    os.environ["RAY_TMPDIR"] = directory  # so that no stray address file names our cluster to others
    head = {"num_cpus": 24, "include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    cluster = _patiently(lambda: Cluster(initialize_head=True, head_node_args=head))
    add_node = cluster.add_node
    cluster.add_node = lambda **node: _patiently(lambda: add_node(**node))  # tests add nodes, too
    cluster.add_node(num_cpus=8)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def _patiently(start: Callable[[], Any]) -> Any:
    """Starts a node again that took longer than the 30 s that Ray gives it, as on a machine that is very busy."""
    for _ in range(5):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    return start()


MakeVec = Callable[..., "RayVecEnv"]


@pytest.fixture
def make_vec(ray_cluster: object) -> Iterator[MakeVec]:
    """Makes vector environments on the shared cluster, by default on one worker, and closes them in the end."""
    yield from _making()


@pytest.fixture(scope="class")
def make_class_vec(ray_cluster: object) -> Iterator[MakeVec]:
    """The same for environments that all tests of a class use."""
    yield from _making()


@pytest.fixture(scope="module")
def make_module_vec(ray_cluster: object) -> Iterator[MakeVec]:
    """The same for environments that all tests of a module use."""
    yield from _making()


def _making() -> Iterator[MakeVec]:
    from rayvec.vector.ray_vec_env import RayVecEnv

    made: list[RayVecEnv] = []
    gc.collect()  # environments that an earlier test left open hold cores until they are collected

    def make(env: Any, nodes: int = 1, workers: int | None = 1, **kwargs: Any) -> RayVecEnv:
        made.append(RayVecEnv(env, num_nodes=nodes, workers_per_node=workers, **kwargs))
        return made[-1]

    yield make
    for env in made:
        with suppress(Exception):  # some tests break their environment for good
            env.close()


AssertRefused = Callable[..., None]


@pytest.fixture
def assert_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> AssertRefused:
    """Runs ``rayvec`` on arguments that can't work: exit code 2, one line with all the words, and no new file."""
    from rayvec.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the command appends the folder

    def check(arguments: list[str], *words: str) -> None:
        files = sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        assert main(arguments) == 2
        output = capsys.readouterr()
        assert output.out == "" or arguments[0] == "bench"  # which says what it is about to measure
        assert output.err.startswith("rayvec: ") and output.err.count("\n") == 1
        assert not [word for word in words if word not in output.err]
        assert sorted(tmp_path.rglob("*")) == files

    return check


@pytest.fixture
def record(record_property: Callable[[str, Any], None]) -> Callable[[str, float], None]:
    """Keeps a figure, by default in seconds, in the test report and among what is printed (``-rP``)."""

    def keep(what: str, value: float) -> None:
        record_property(what, round(value, 1))
        print(f"{what}: {value:.1f}")

    return keep
