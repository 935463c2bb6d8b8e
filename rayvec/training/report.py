"""A run as one page of HTML that needs no other file: settings, curves, time, evaluation, versions."""

from __future__ import annotations

import base64
import html
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rayvec.config.schema import describe
from rayvec.errors import ConfigError
from rayvec.training.atomic_files import written_whole
from rayvec.training.learning_curve import learning_curve_figure, metric_points, without_damaged_lines
from rayvec.training.loggers import read_metrics
from rayvec.training.matplotlib_figures import BLUE, ORANGE, curves_figure
from rayvec.training.run_dir import load_config, load_result
from rayvec.training.versions import installed_versions

__all__ = ["write_report"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.facts { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; }
.fact { border: 1px solid #ddd; border-radius: .5rem; padding: .5rem .9rem; }
.fact b { display: block; font-size: 1.25rem; } .fact span, p.note { color: #666; font-size: .85rem; }
img { max-width: 100%; } table { border-collapse: collapse; font-size: .88rem; }
td, th { text-align: left; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #eee; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; } tr.changed td { font-weight: 600; }
.bar { background: #4477aa; height: .8rem; border-radius: .2rem; }
"""


def write_report(run_dir: Path | str, path: Path | str | None = None) -> Path:
    """Writes the page of a run, finished or not; returns its path.

    Args:
        run_dir: Directory of the run.
        path: The file; by default ``report.html`` in that directory.

    Raises:
        ConfigError: `run_dir` is not the directory of a run, or it has not yet written metrics.
    """
    run_dir = Path(run_dir)
    config = load_config(run_dir)
    metrics = run_dir / "metrics.jsonl"
    lines = list(without_damaged_lines(read_metrics(metrics)))
    if not lines:
        raise ConfigError(
            "A report shows the metrics of a run.",
            expected=f"lines in {metrics}",
            got="none",
            remedy="Wait until the run has logged its first line.",
        )
    result = load_result(run_dir)
    parts = [
        f"<h1>{html.escape(config.title)}</h1><p class=note>{html.escape(str(run_dir))}</p>",
        _facts(lines, result),
        "<h2>Learning curve</h2>" + _learning_curve(lines, result, config.title),
        _evaluation(result),
        "<h2>Where the time went</h2>" + _times(lines),
        "<h2>Metrics of the learner</h2>" + _learner(lines),
        "<h2>Settings</h2><p class=note>Bold: not the default that --help shows.</p>" + _settings(config),
        "<h2>Versions</h2>" + _table(list((result.get("versions") or installed_versions()).items())),
    ]
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(config.title)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
    path = run_dir / "report.html" if path is None else Path(path)
    with written_whole(path) as file:
        file.write(page.encode())
    return path


def _facts(lines: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> str:
    last = lines[-1]
    train_s = _whole_s(_times_s(lines))
    evaluations = [line["eval/return_mean"] for line in lines if line.get("eval/return_mean") is not None]
    facts = [("environment steps", f"{last['steps']:,}")]
    if train_s > 0:
        facts.append(("steps/s", f"{last['steps'] / train_s:,.0f}"))
    if last.get("return_mean") is not None:
        facts.append(("mean return of the last 100 episodes", f"{last['return_mean']:.1f}"))
    if evaluations:
        facts.append(("best evaluation during training", f"{max(evaluations):.1f}"))
    if result.get("eval_return_mean") is not None:
        spread = float(np.std(result["eval_returns"]))
        facts.append(
            (f"greedy, {len(result['eval_returns'])} episodes", f"{result['eval_return_mean']:.1f} ± {spread:.1f}")
        )
    facts.append(("wall time", f"{result['wall_s']:,.0f} s") if result else ("state", "not finished"))
    if result.get("stop_reason"):
        facts.append(("ended early", result["stop_reason"]))
    boxes = [
        f"<div class=fact><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>" for name, value in facts
    ]
    return f"<div class=facts>{''.join(boxes)}</div>"


def _learning_curve(lines: Sequence[Mapping[str, Any]], result: Mapping[str, Any], title: str) -> str:
    final = result.get("eval_return_mean")
    greedy = None if final is None else (result["total_steps"], final)
    return _saved(learning_curve_figure(lines, title, greedy), "return over environment steps")


def _evaluation(result: Mapping[str, Any]) -> str:
    returns = np.array(result.get("eval_returns", []))
    if not len(returns):
        return ""
    from matplotlib.ticker import MaxNLocator

    figure, (axes,) = curves_figure(height=2.6)
    axes.hist(returns, bins=min(20, max(5, len(returns) // 3)), color=ORANGE, alpha=0.85)
    axes.set(xlabel="return of an episode", ylabel="episodes")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    quarters = np.percentile(returns, [0, 25, 50, 75, 100])
    names = ("smallest", "lower quartile", "median", "upper quartile", "largest")
    rows = [(name, f"{value:.1f}") for name, value in zip(names, quarters, strict=True)]
    return "<h2>Greedy evaluation after training</h2>" + _saved(figure, "returns of the evaluation") + _table(rows)


def _times_s(lines: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Returns the wall time by activity, in seconds; a part of an activity has a slash in its name."""
    totals: Counter[str] = Counter()
    for line in lines:
        times_s = {name.removeprefix("time_s/"): value for name, value in line.items() if name.startswith("time_s/")}
        totals.update({name: value for name, value in times_s.items() if value is not None})
    return totals


def _whole_s(times_s: Mapping[str, float]) -> float:
    return sum(value for name, value in times_s.items() if "/" not in name)


def _times(lines: Sequence[Mapping[str, Any]]) -> str:
    totals, rows = _times_s(lines), []
    whole_s = _whole_s(totals) or 1.0
    for name in sorted(totals, key=lambda name: (-totals[name.split("/")[0]], name)):
        share = totals[name] / whole_s
        indent = "&emsp;" * name.count("/")
        rows.append(
            f"<tr><td>{indent}{html.escape(name.split('/')[-1])}</td><td class=number>{totals[name]:,.1f} s</td>"
            f"<td class=number>{share:.0%}</td>"
            f'<td style="width:20rem"><div class=bar style="width:{max(0.0, min(1.0, share)):.1%}"></div></td></tr>'
        )
    return f"<table>{''.join(rows)}</table>"


def _learner(lines: Sequence[Mapping[str, Any]]) -> str:
    names = [name for name in dict.fromkeys(name for line in lines for name in line) if name.startswith("learner/")]
    curves = {name: points for name in names if (points := metric_points(lines, name)).size}
    if not curves:
        return "<p>None.</p>"
    figure, axes = curves_figure(len(curves), columns=3, height=2.0)
    for each, (name, points) in zip(axes, curves.items(), strict=True):
        each.plot(*points, color=BLUE, linewidth=1)
        each.set_title(name.removeprefix("learner/"), fontsize=8)
        each.tick_params(labelsize=7)
    return _saved(figure, "metrics of the learner")


def _settings(config: Any) -> str:
    rows = []
    for row in describe(type(config)):
        value = getattr(config, row.name)
        shown = "unset" if value is None else str(value)
        changed = " class=changed" if shown != row.default else ""
        rows.append(f"<tr{changed}><td>{row.name}</td><td>{html.escape(shown)}</td></tr>")
    return f"<table>{''.join(rows)}</table>"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = [f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(value))}</td></tr>" for name, value in rows]
    return f"<table>{''.join(cells)}</table>"


def _saved(figure: Any, description: str) -> str:
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    data = base64.b64encode(stream.getvalue()).decode()
    return f'<img alt="{html.escape(description)}" src="data:image/png;base64,{data}">'
