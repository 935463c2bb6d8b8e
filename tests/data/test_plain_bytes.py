"""Bytes of values: what they can't return as it was is refused, and so is what would execute something."""

from __future__ import annotations

import json
import struct
from collections import OrderedDict

import pytest

from rayvec.data.plain_bytes import from_bytes, to_bytes


def test_a_class_that_would_be_lost_is_refused() -> None:
    with pytest.raises(TypeError, match="OrderedDict"):
        to_bytes({"a": [OrderedDict()]})


@pytest.mark.parametrize("tag", ["array", "scalar"])
def test_addresses_of_objects_are_refused(tag: str) -> None:
    form = json.dumps([tag, "|O", [1]]).encode()
    with pytest.raises(ValueError, match="array of objects"):
        from_bytes(struct.pack("!IQ", len(form), 8) + form + bytes(8))
