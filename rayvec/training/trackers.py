"""Trackers: services that show the metrics of many runs, beside the files in each run's directory.

A tracker is opened before the directory of a new run is made: one that can't be reached loses no work. Later, while the
run trains, its errors are logged and end tracking, not training.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import secrets
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rayvec.config import TrainConfig
from rayvec.errors import ConfigError
from rayvec.training.loggers import Tracker
from rayvec.training.status import end_state

__all__ = ["TRACKERS", "check_tracker", "open_tracker"]

_PROJECT = "rayvec"
_ANSWER_S = 20.0
logger = logging.getLogger(__name__)


class WandbTracker:
    """A run of Weights & Biases, in the project ``WANDB_PROJECT`` or else "rayvec".

    With ``WANDB_MODE=offline`` its files are written for ``wandb sync``. They are beside the run's directory.

    Args:
        config: Settings of the run.
        run_dir: Its directory.
        run_id: Of the run to continue; None begins one.
    """

    def __init__(self, config: TrainConfig, run_dir: Path, run_id: str | None) -> None:
        wandb = importlib.import_module("wandb")
        try:
            run_dir.parent.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", _PROJECT),
                name=run_dir.name,
                id=run_id or secrets.token_hex(4),
                resume="allow",
                dir=os.fspath(run_dir.parent),
                config=config.to_plain(),
                reinit=None if wandb.run is None else "create_new",  # the caller's own run stays as it is
                settings=wandb.Settings(init_timeout=_ANSWER_S, silent=True),
            )
        except (wandb.errors.Error, OSError) as error:
            remedy = "Run `wandb login`, set WANDB_MODE=offline, or pass a run_dir that you may write to"
            raise _unreachable("wandb", str(error), remedy) from error
        self._run.define_metric("steps")
        self._run.define_metric("*", step_metric="steps")  # a resumed run may log a step for a second time
        self.run_id: str = self._run.id

    def log(self, steps: int, metrics: Mapping[str, float | int]) -> None:
        """See :class:`rayvec.training.loggers.Tracker`."""
        self._run.log({"steps": steps, **metrics})

    def close(self, state: str) -> None:
        """See :class:`rayvec.training.loggers.Tracker`."""
        self._run.finish(exit_code={"finished": 0, "interrupted": 130, "failed": 1}[state])


class MLflowTracker:
    """A run of MLflow, in the experiment ``MLFLOW_EXPERIMENT_NAME`` or else "rayvec".

    It goes to ``MLFLOW_TRACKING_URI``, or else to the files ``mlruns`` beside the run's directory.

    Args:
        config: Settings of the run.
        run_dir: Its directory.
        run_id: Of the run to continue; None begins one.
    """

    def __init__(self, config: TrainConfig, run_dir: Path, run_id: str | None) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else MLflow insists on a database
            uri = (run_dir.parent.absolute() / "mlruns").as_uri()
        mlflow = importlib.import_module("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        try:
            if uri.startswith("http"):  # MLflow itself would try for minutes
                with (
                    contextlib.suppress(urllib.error.HTTPError),
                    urllib.request.urlopen(_without_secrets(uri), timeout=_ANSWER_S),
                ):
                    pass
            self._client = mlflow.MlflowClient(tracking_uri=uri)
            self.run_id: str = self._begin(config, run_dir, run_id)
        except (mlflow.exceptions.MlflowException, OSError) as error:
            remedy = "Start the server, or correct MLFLOW_TRACKING_URI; unset, runs are kept in files"
            shown = _without_secrets(uri)
            raise _unreachable(f"mlflow at {shown}", str(error), remedy) from (error if shown == uri else None)

    def _begin(self, config: TrainConfig, run_dir: Path, run_id: str | None) -> str:
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        run = self._client.create_run(experiment_id, run_name=run_dir.name)
        settings = config.to_plain().items()
        params = [self._entities.Param(key, str(value)) for key, value in settings if str(value)]
        self._client.log_batch(run.info.run_id, params=params)
        return str(run.info.run_id)

    def log(self, steps: int, metrics: Mapping[str, float | int]) -> None:
        """See :class:`rayvec.training.loggers.Tracker`."""
        now_ms = time.time_ns() // 1_000_000
        names = {name: "/".join(name.replace("/", ".").split(".", 1)) for name in metrics}  # files can't be folders too
        values = [self._entities.Metric(names[name], float(value), now_ms, steps) for name, value in metrics.items()]
        self._client.log_batch(self.run_id, metrics=values)

    def close(self, state: str) -> None:
        """See :class:`rayvec.training.loggers.Tracker`."""
        self._client.set_terminated(self.run_id, "KILLED" if state == "interrupted" else state.upper())


TRACKERS: dict[str, Callable[[TrainConfig, Path, str | None], WandbTracker | MLflowTracker]] = {
    "wandb": WandbTracker,
    "mlflow": MLflowTracker,
}
"""Trackers by the name that the setting `track` has for them, which is that of their package."""


class _Forgiving(contextlib.AbstractContextManager["_Forgiving"]):
    """A tracker whose first error ends tracking with a warning; a context that closes it."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker: Tracker | None = tracker

    def log(self, steps: int, metrics: Mapping[str, float | int]) -> None:
        self._try(lambda tracker: tracker.log(steps, metrics))

    def close(self, state: str) -> None:
        self._try(lambda tracker: tracker.close(state))

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(end_state(error))

    def _try(self, action: Callable[[Tracker], None]) -> None:
        if self._tracker is not None:
            try:
                action(self._tracker)
            except Exception as error:
                logger.warning("tracking ends, training continues: %s: %s", type(error).__name__, _clean(str(error)))
                self._tracker = None


def check_tracker(config: TrainConfig) -> None:
    """Checks that the tracker of a run is installed.

    Raises:
        ConfigError: It is not.
    """
    if config.track is not None:
        try:
            importlib.import_module(config.track)
        except ImportError as error:
            raise ConfigError(
                "track names a tracker that is installed.",
                expected=f"the package {config.track}",
                got=str(error),
                remedy=f"Install rayvec[{config.track}], or leave track out.",
            ) from error


@contextlib.contextmanager
def open_tracker(config: TrainConfig, run_dir: Path, run_id: str | None) -> Iterator[tuple[Tracker | None, str | None]]:
    """Yields the tracker of a run, and the name of its run there; None if there is none.

    Args:
        config: Settings of the run.
        run_dir: Its directory, which need not exist.
        run_id: What this function yielded before, for a run that is resumed.

    Raises:
        ConfigError: The tracker can't be reached.
    """
    if config.track is None:
        yield None, run_id
        return
    kind, _, known = (run_id or "").partition("/")
    opened = TRACKERS[config.track](config, run_dir, known if kind == config.track else None)
    with _Forgiving(opened) as tracker:
        yield tracker, f"{config.track}/{opened.run_id}"


def _without_secrets(uri: str) -> str:
    """Returns a URI without user, password, query and fragment.

    >>> _without_secrets("https://ann:secret@host:5000/path?token=x")
    'https://host:5000/path'
    """
    scheme, location, path, *_ = urllib.parse.urlsplit(uri)
    return urllib.parse.urlunsplit((scheme, location.rpartition("@")[2], path, "", ""))


def _clean(text: str) -> str:
    """Returns a text without users, passwords and queries of the addresses in it.

    >>> _clean("POST http://ann:secret@host:5000/x?token=1 failed (url: /x?token=1)")
    'POST http://host:5000/x failed (url: /x)'
    """
    text = re.sub(r"://[^\s/@]+@", "://", text)
    return re.sub(r"(/[^\s?]*)\?[^\s)\"']*", r"\1", text)


def _unreachable(name: str, reason: str, remedy: str) -> ConfigError:
    return ConfigError(
        "A tracker is reached before a run begins.",
        expected=f"an answer of {name}",
        got=" ".join(_clean(reason).split())[:300],
        remedy=f"{remedy}, or leave track out.",
    )
