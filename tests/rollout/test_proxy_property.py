"""Random conversations through the proxy: each prompt begins with the recorded ids, or the report says why not."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proxy_clients import PATHS, Talk
from proxy_fakes import Reply, Stage, call_text, staged

from rollout.config import open_home
from rollout.proxy.forks import kind_of
from rollout.proxy.mergeability import rows_of, session_report
from rollout.types import HistoryMode, Limits, ModelCall

KINDS = {"non-canonical text", "reasoning stripped"}
"""What can break a history that the client sends back word for word."""
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_VALUE = _TEXT | st.integers(-99, 99) | st.booleans() | st.none() | st.lists(_TEXT, max_size=2)
_ARGUMENTS = st.dictionaries(_TEXT, _VALUE, max_size=2)


@st.composite
def spoken(draw: st.DrawFn) -> str:
    """What a model writes: perhaps a thought, a text, up to three calls, spelt as the template does or otherwise."""
    thought = draw(st.just("") | _TEXT.map(lambda text: f"<think>\n{text}\n</think>\n\n"))
    calls = [call_text("get_ticket", given) for given in draw(st.lists(_ARGUMENTS, max_size=3))]
    if draw(st.booleans()):
        calls = [call.replace('", "arguments": ', '","arguments":') for call in calls]
    return thought + "\n".join([draw(_TEXT), *calls])


@st.composite
def sessions(draw: st.DrawFn) -> list[tuple[str, int, str]]:
    """(what the model says, ids per event, what the user says next)."""
    return draw(st.lists(st.tuples(spoken(), st.integers(1, 7), _TEXT), min_size=2, max_size=4))


async def play(stage: Stage, dialect: str, said: list[tuple[str, int, str]], mode: HistoryMode, name: str) -> Talk:
    stage.add(name, history=mode, limits=Limits(calls=9, tokens=8192, context=8192))
    talk = Talk(stage, name, dialect).user("begin")
    for text, step, following in said:
        ids = tuple(stage.codec.encode(text + "<|im_end|>"))
        stage.engine.script = lambda asked, ids=ids, step=step: Reply(ids, step=step)
        await talk.turn()
        kind = talk.rows[-1].get("role"), talk.rows[-1].get("type")
        if kind in (("assistant", None), ("assistant", "message"), (None, "reasoning")):
            talk.user(following or "go on")
    return talk


def check(stage: Stage, calls: list[ModelCall], mode: HistoryMode) -> None:
    for before, now in pairwise(calls):
        whole = before.prompt_ids + before.completion_ids
        extends = now.prompt_ids[: len(whole)] == whole
        assert extends is (now.fork_reason == "")
        if not extends:
            assert kind_of(now.fork_reason) in KINDS
            assert mode is HistoryMode.TEMPLATE
    rollout = stage.store.rollouts.get(calls[0].rollout_id)
    assert rollout
    report = session_report(rollout, calls, {}, stage.codec.decode)
    assert report.rows == len(rows_of(calls)) == 1 + sum(1 for call in calls if call.fork_reason)
    assert [fork.reason for fork in report.forks] == [call.fork_reason for call in calls if call.fork_reason]
    assert all(fork.recorded != fork.rendered for fork in report.forks)


@pytest.mark.parametrize("mode", list(HistoryMode))
@pytest.mark.parametrize("dialect", list(PATHS))
def test_any_conversation_extends_or_is_explained(
    tmp_path: Path, proxy_folder: Path, dialect: str, mode: HistoryMode
) -> None:
    async def main(loop: asyncio.Runner) -> tuple[Stage, Any]:
        context = staged(open_home(tmp_path / "home"), proxy_folder)
        return await context.__aenter__(), context

    count = 0
    with asyncio.Runner() as runner:
        stage, context = runner.run(main(runner))

        @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(said=sessions())
        def compare(said: list[tuple[str, int, str]]) -> None:
            nonlocal count
            count += 1
            name = f"r{count}"
            runner.run(play(stage, dialect, said, mode, name))
            check(stage, stage.store.calls.of(name), mode)

        try:
            compare()
        finally:
            runner.run(context.__aexit__(None, None, None))
