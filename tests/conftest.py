"""Which tests share a worker process: those of one file, and the files of `flows/` that share one `openforge up`.

The long ones are started first, so that no worker is left alone with them at the end. (xdist's own groups do not work
with pytest 9.2: it marks them in a node's private name.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

LONGEST = ("flows", "tests/rollout/test_harness_real.py")


def group(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    return "flows" if file.startswith("tests/flows/") else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(group(item.nodeid), len(order)))  # stable


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    config.option.loadscopereorder = False
    return ByGroup(config, log)
