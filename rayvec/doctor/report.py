"""Prints the findings of `rayvec doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict

from rayvec.doctor.cluster import examine
from rayvec.errors import counted

__all__ = ["report"]


def report(address: str | None, env_id: str | None, *, as_json: bool = False) -> int:
    """Examines a cluster and prints what it finds; returns the exit code: 1 if a run would fail.

    Args:
        address: Of a Ray cluster; None for ``RAY_ADDRESS`` or a private cluster.
        env_id: An environment to measure on each node; None for none.
        as_json: Whether to print one JSON document, with the level of the worst finding and all findings.
    """
    findings = []
    for finding in examine(address, env_id):
        findings.append(finding)
        if not as_json:
            print(finding, flush=True)
    count = {level: sum(each.level == level for each in findings) for level in ("error", "warning")}
    worst = next((level for level, number in count.items() if number), "ok")
    if as_json:
        print(json.dumps({"level": worst, "findings": [asdict(each) for each in findings]}, indent=1))
    else:
        print(f"{worst}: {counted(count['error'], 'error')}, {counted(count['warning'], 'warning')}")
    return int(worst == "error")
