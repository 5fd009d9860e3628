"""pytest plugin: hardware markers. What this machine cannot run is skipped with its reason, or fails on request."""

from __future__ import annotations

import pytest

from .hardware import MARKERS, why_not


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--require-hardware``: for a hardware runner, where a skip would hide that nothing was tested."""
    group = parser.getgroup("replay-parity")
    group.addoption(
        "--require-hardware",
        action="store_true",
        help="a test whose hardware or engine is missing fails instead of being skipped",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    for line in MARKERS.values():
        config.addinivalue_line("markers", line)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip or fail an item whose markers ask for what is not there."""
    for marker in item.iter_markers():
        if marker.name not in MARKERS:
            continue
        try:
            missing = why_not(marker.name, *marker.args)
        except ValueError as error:
            pytest.fail(str(error), pytrace=False)
        if missing is None:
            continue
        if item.config.getoption("--require-hardware"):
            pytest.fail(f"--require-hardware: {missing}", pytrace=False)
        pytest.skip(missing)
