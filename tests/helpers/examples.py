"""How many examples hypothesis tries: few by default, so that the suite takes minutes; many with ``--all``."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def examples(many: int, **kwargs: Any) -> settings:
    """Settings of a property: `many` examples with ``--all``, else a fifth of them, but at least 5."""
    everything = settings.get_current_profile_name() == "many"
    return settings(max_examples=many if everything else max(5, many // 5), **kwargs)
