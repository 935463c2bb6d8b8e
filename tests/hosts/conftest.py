"""What the tests on hosts share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.hosts import Record


@pytest.fixture
def record(record_property: Callable[[str, Any], None]) -> Record:
    """Keeps a figure, by default in seconds, in the test report and among what is printed (``-rP``)."""

    def keep(what: str, seconds: float) -> None:
        record_property(what, round(seconds, 1))
        print(f"{what}: {seconds:.1f}")

    return keep
