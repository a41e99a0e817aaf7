"""Tests that need a GPU: without one none of them is collected, by name of what is missing."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    if Path("/dev/nvidiactl").exists():
        return
    missing = pytest.mark.skip(reason="there is no GPU on this machine")
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(missing)
