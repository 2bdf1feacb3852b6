"""Fixtures of the rollout tests. Those of the proxy and the engine clients begin with `proxy_`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from proxy_fakes import FakeEngine, Stage, save_codec, staged

from rollout.config import Home, open_home
from rollout.proxy.attribution import Adapters
from rollout.proxy.codecs import load_codec
from rollout.proxy.render import Codec

Staged = Callable[..., AbstractAsyncContextManager[Stage]]
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="session")
def proxy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights, of the Qwen3 family."""
    return save_codec(tmp_path_factory.mktemp("proxy") / "student")


@pytest.fixture(scope="session")
def proxy_codec(proxy_folder: Path) -> Codec:
    return load_codec(proxy_folder, "qwen3")


@pytest.fixture
def proxy_stage(tmp_path: Path, proxy_folder: Path) -> Staged:
    """`async with proxy_stage() as stage`: proxy, engine and store of one home; again for a restarted proxy."""

    @asynccontextmanager
    async def make(engine: FakeEngine | None = None, adapters: Adapters | None = None) -> AsyncIterator[Stage]:
        async with staged(open_home(tmp_path / "home"), proxy_folder, engine, adapters) as stage:
            yield stage

    return make


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Home:
    where = os.environ.get("OPENFORGE_TEST_HARNESSES")
    return open_home(where or tmp_path_factory.mktemp("harnesses"), min_free_mb=3000)


@pytest.fixture
def harness_home(tmp_path: Path, installed: Home) -> Home:
    """A home of its own that shares the installed programs."""
    home = open_home(tmp_path / "home", min_free_mb=1)
    installed.harnesses.mkdir(exist_ok=True)
    home.harnesses.symlink_to(installed.harnesses)
    return home
