"""A plan is made only for environments that there are, each once: a stream may ask for anything."""

from __future__ import annotations

import numpy as np
import pytest

from rayvec.pools.ids_by_owner import Plans


@pytest.mark.parametrize("ids", [[1, 1], [-1], [0, 4]])
def test_ids_of_no_environment_or_given_twice_are_refused(ids: list[int]) -> None:
    plans = Plans(np.array([0, 2]), 4)
    assert [part.rows.tolist() for part in plans.of(np.array([3, 0])).parts] == [[0], [1]]
    with pytest.raises(ValueError, match="of 4"):
        plans.of(np.array(ids))
