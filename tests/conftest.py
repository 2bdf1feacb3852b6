"""Which tests share a worker process: those of one file, and the files of `flows/` that share one `openforge up`."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(ROOT)
        shared = path.parts[0] == "flows" and path.name != "test_flows_kill.py"
        item.add_marker(pytest.mark.xdist_group("flows" if shared else str(path)))
