"""A long session takes no more room than what it holds once, and a third."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rollout.config import CODE_ROOT


@pytest.fixture
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("call_store", CODE_ROOT / "benchmarks" / "call_store.py")
    assert spec
    assert spec.loader
    module = sys.modules["call_store"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fifty_calls_and_32k_tokens_take_1_3_times_what_is_unique_in_them(
    benchmark: ModuleType, proxy_folder: Path
) -> None:
    """The whole of calls.db counts, compressed streams included; of the tokens only sampled ones have a logprob."""
    size, _ = benchmark.run(proxy_folder, 50, 32768)
    assert size.calls == 50
    assert size.longest >= 32000
    assert size.ratio <= 1.3
    assert size.plain > 20 * size.stored
