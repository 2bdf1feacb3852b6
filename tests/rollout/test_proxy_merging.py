"""How calls of whole sessions merge: both history modes, each dialect, checked by a script that knows only the wire."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from proxy_clients import Talk
from proxy_fakes import FakeEngine, Reply, Stage, register, save_codec, until
from wire_rows import rows_from_the_wire

from rollout.proxy.forks import kind_of
from rollout.proxy.mergeability import by_harness, rows_of, session_report
from rollout.types import CallTag, HistoryMode, Limits, ModelCall, ModelRef, RolloutState, Trajectory
from training.samples import SampleRules, merged_samples, split_calls, trained_tokens

DIALECTS = ["chat", "responses", "messages"]
THINK = "<think>\nTicket {n} comes first.\n</think>\n\n"
CLEAN = '<tool_call>\n{{"name": "get_ticket", "arguments": {{"id": {n}}}}}\n</tool_call>'
TIGHT = '<tool_call>\n{{"name":"get_ticket","arguments":{{"id":{n}}}}}\n</tool_call>'
WILD = [THINK + TIGHT] * 7 + [THINK + "Done."]
MIXED = [CLEAN, CLEAN, TIGHT, CLEAN, THINK + CLEAN, CLEAN, CLEAN, "Done."]


def scripted(stage: Stage, texts: list[str]) -> None:
    ids = [stage.codec.encode(text.format(n=n) + "<|im_end|>") for n, text in enumerate(texts)]
    stage.engine.queue = [Reply(tuple(row)) for row in ids]


# -- sessions --------------------------------------------------------------------------------------------


async def session(stage: Stage, dialect: str, texts: list[str], **changes: Any) -> Talk:
    stage.add("r", limits=Limits(calls=20, tokens=8192, context=8192), **changes)
    scripted(stage, texts)
    talk = Talk(stage, "r", dialect).user("Close ticket 7")
    for _ in texts:
        await talk.turn()
    await until(lambda: all(call.delivered for call in stage.store.calls.of("r")))
    return talk


def trajectory(stage: Stage) -> Trajectory:
    rollout = stage.store.rollouts.get("r")
    assert rollout
    return Trajectory(
        rollout=rollout.model_copy(update={"state": RolloutState.SUCCEEDED}), calls=tuple(stage.store.calls.of("r"))
    )


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("texts", [WILD, MIXED], ids=["wild", "mixed"])
@pytest.mark.parametrize("mode", list(HistoryMode))
def test_rows_of_a_session_of_eight_calls(proxy_stage: Any, dialect: str, texts: list[str], mode: HistoryMode) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            talk = await session(stage, dialect, texts, history=mode)
            whole = trajectory(stage)
            samples = merged_samples(whole)
            sampled = [text.format(n=n) for n, text in enumerate(texts)]
            wanted = 1 if mode is HistoryMode.RETAIN else rows_from_the_wire(dialect, talk.sent, sampled)
            assert len(samples) == wanted
            assert trained_tokens(samples) == sum(len(call.completion_ids) for call in whole.calls)
            kept = split_calls(whole, SampleRules()).kept
            report = session_report(whole.rollout, kept, {}, stage.codec.decode)
            assert (report.rows, report.calls, len(report.forks)) == (wanted, 8, wanted - 1)
            assert sum(len(row) for row in rows_of(kept)) == 8

    asyncio.run(main())


def test_the_report_counts_reasons_and_shows_both_texts(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            await session(stage, "responses", MIXED)
            whole = trajectory(stage)
            report = session_report(whole.rollout, whole.calls, {}, stage.codec.decode)
            assert [(f.index, f.earlier, f.reason) for f in report.forks] == [
                (3, 2, "non-canonical text"),
                (5, 4, "non-canonical text"),
            ]
            tight = report.forks[0]
            assert '{"name":"get_ticket"' in tight.recorded
            assert '{"name": "get_ticket"' in tight.rendered
            (harness,) = by_harness([report])
            assert (harness.harness, harness.sessions, harness.calls, harness.rows) == ("react", 1, 8, 3)
            assert harness.reasons == {"non-canonical text": 2}

    asyncio.run(main())


STRIPPING = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}{% for c in m['tool_calls'] or [] %}<tool_call>
{"name": "{{ c['function']['name'] }}", "arguments": {{ c['function']['arguments'] | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.bugs
@pytest.mark.parametrize("mode", list(HistoryMode))
def test_bug_31_stripped_thinking_is_named_and_kept_where_it_shall_be(
    proxy_stage: Any, tmp_path: Path, mode: HistoryMode
) -> None:
    """A template that drops all thoughts breaks the context at each turn: told in mode `template`, one row else."""
    folder = save_codec(tmp_path / "stripping", renderer="default")
    (folder / "chat_template.jinja").write_text(STRIPPING)

    async def main() -> None:
        async with proxy_stage() as stage:
            register(stage.store, str(folder), stage.store.engines.all()[0].url, id="e2")
            thoughtful = [THINK + CLEAN] * 7 + [THINK + "Done."]
            await session(stage, "chat", thoughtful, history=mode, model=ModelRef(name=str(folder)))
            whole = trajectory(stage)
            report = session_report(whole.rollout, whole.calls, {}, stage.codec.decode)
            reasons = [fork.reason for fork in report.forks]
            if mode is HistoryMode.RETAIN:
                assert (report.rows, reasons) == (1, [])
            else:
                assert (report.rows, reasons) == (8, ["reasoning stripped"] * 7)
            assert report.trained_tokens == sum(len(call.completion_ids) for call in whole.calls)

    asyncio.run(main())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_a_client_changes_is_told_by_kind_and_place(proxy_stage: Any, dialect: str) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            scripted(stage, ["One.", "Two.", "Three.", "Four.", "Five."])
            talk = Talk(stage, "r", dialect).user("a")
            await talk.turn()
            await talk.user("b").turn()
            talk.system = "Be long."
            await talk.user("c").turn()
            talk.tools = []
            await talk.user("d").turn()
            talk.rows[0]["content"] = "A"
            await talk.user("e").turn()
            calls = stage.store.calls.of("r")
            assert [kind_of(call.fork_reason) for call in calls] == [
                "",
                "",
                "system changed",
                "tool list changed",
                "client edit",
            ]
            before = calls[3].prompt_ids + calls[3].completion_ids
            at = int(calls[4].fork_reason.rpartition(" ")[2])
            assert stage.codec.decode(before[at:]).startswith("a<|im_end|>")

    asyncio.run(main())


def test_retain_goes_on_where_a_client_drops_reasoning(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r", history=HistoryMode.RETAIN)
            scripted(stage, [THINK + TIGHT, THINK + "Done.", "Bye."])
            talk = Talk(stage, "r", "chat").user("a")
            for _ in range(3):
                await talk.turn()
                for row in talk.rows:
                    row.pop("reasoning_content", None)
                if talk.rows[-1]["role"] == "assistant":
                    talk.user("more")
            calls = stage.store.calls.of("r")
            assert [call.fork_reason for call in calls] == ["", "", ""]
            assert len(rows_of(calls)) == 1
            assert "Ticket 0 comes first" in stage.codec.decode(calls[2].prompt_ids)

    asyncio.run(main())


def call(index: int, prompt: str, answer: str, **changes: Any) -> ModelCall:
    ids = tuple(prompt.encode()), tuple(answer.encode())
    return ModelCall(rollout_id="r", index=index, prompt_ids=ids[0], completion_ids=ids[1], **changes)


def test_a_call_whose_row_went_on_elsewhere_opens_one() -> None:
    calls = [call(0, "a", "b"), call(1, "abc", "d"), call(2, "abe", "f", fork_reason="branch")]
    assert [[c.index for c in row] for row in rows_of(calls)] == [[0, 1], [2]]


def test_calls_join_the_longest_row() -> None:
    calls = [call(0, "a", "b"), call(1, "x", "b", thread="s", tag=CallTag.SUBAGENT), call(2, "abq", "c")]
    assert [[c.index for c in row] for row in rows_of(calls)] == [[0, 2], [1]]


def test_engine_fake_is_real_enough(proxy_stage: Any) -> None:
    """The engine gets exactly the recorded prompt."""

    async def main() -> None:
        async with proxy_stage(FakeEngine()) as stage:
            await session(stage, "messages", MIXED)
            calls = stage.store.calls.of("r")
            assert [tuple(body["prompt"]) for body in stage.engine.asked] == [c.prompt_ids for c in calls]

    asyncio.run(main())
