"""The example of "bring your own harness" runs as it stands, and every adapter has its page."""

from __future__ import annotations

import asyncio
import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from harness_stage import play
from harness_stub import Asked, Step

from rollout.config import open_home
from rollout.errors import HarnessError, PolicyEnd
from rollout.harness import ADAPTERS, make_harness, stop_style, tagger_of
from rollout.types import CallTag

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides" / "harnesses"
NAME = "my_harness:MyHarness"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The page's one block of Python, importable; returns its text."""
    (text,) = re.findall(r"```python\n(.*?)```", (GUIDES / "bring-your-own.md").read_text(), flags=re.S)
    (tmp_path / "my_harness.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield text
    sys.modules.pop("my_harness", None)


@pytest.mark.sandbox
def test_the_example_is_short_and_runs(example: str, tmp_path: Path) -> None:
    assert len(example.splitlines()) < 60
    harness = make_harness(NAME)
    home = open_home(tmp_path / "home", min_free_mb=1)
    played = asyncio.run(play(home, harness, [Step(text="42 ✓")], look=("/workspace/answer.txt",)))
    harness.check(played.completed, "")
    assert played.files["/workspace/answer.txt"] == "42 ✓".encode()
    assert [call.user for call in played.stub.calls] == ["Schließe Ticket 7 ✓"]
    with pytest.raises(PolicyEnd, match="call_cap"):
        harness.check(played.completed, "call_cap")
    with pytest.raises(HarnessError):
        harness.check(replace(played.completed, returncode=1), "")


def test_the_examples_calls_are_tagged(example: str) -> None:
    call = Asked("/rollouts/r1/v1/chat/completions", {}, {"messages": []})
    assert tagger_of(NAME)(call) == (CallTag.MAIN, "main")
    tools = replace(call, body={"tools": [{"type": "function", "function": {"name": "x"}}]})
    assert tagger_of(NAME)(tools) == (CallTag.UNATTRIBUTED, "main")
    assert stop_style(NAME) == "refuse"


@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_every_harness_has_a_page(name: str) -> None:
    page = (GUIDES / f"{name}.md").read_text()
    assert [
        part for part in ("Install", "What is sent", "What is trained", "Limits") if f"**{part}.**" not in page
    ] == []
    recipe = ADAPTERS[name].recipe
    assert recipe is None or recipe.version in page
    assert f"({name}.md)" in (GUIDES / "README.md").read_text()
