"""A node whose versions differ is refused at the start."""

from __future__ import annotations

import pytest

import rayvec
from rayvec.cluster.node_facts import check_versions, own_versions
from rayvec.errors import ConfigError


def test_own_versions_are_accepted() -> None:
    assert own_versions()["rayvec"] == rayvec.__version__
    check_versions(own_versions(), "10.0.0.2")


@pytest.mark.parametrize(("package", "version"), [("rayvec", "0.0.9"), ("python", "3.9.1"), ("numpy", "1.26.4")])
def test_another_version_is_named_beside_that_of_the_driver(package: str, version: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_versions({**own_versions(), package: version}, "10.0.0.2")
    for word in (f"{package} {version}", f"{package} {own_versions()[package]}", "10.0.0.2"):
        assert word in str(caught.value)
    assert str(caught.value).count(version) == 1
