"""The scripted teacher: names, draws, steps, and a whole play through the proxy in the student's own tokens."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from proxy_fakes import TOOLS, Stage

from rollout.errors import ConfigError, EngineError
from rollout.inference.base import CallContext
from rollout.inference.scripted import OracleEngine, Scripted, is_scripted, next_step, read_plan, read_scripted
from rollout.proxy.render import Codec
from rollout.types import ModelRef, Sampling, TaskSpec

PLAN = {
    "oracle": [
        {"tool": "get_ticket", "arguments": {"id": 7}},
        {"tool": "close_ticket", "arguments": {"id": {"$result": 0, "path": "now"}}},
        {"final": "Done – 9."},
    ],
    "shortcut": [{"tool": "close_ticket", "arguments": {"id": 7}}, {"final": "Done."}],
}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    (tmp_path / "bundle" / "solution").mkdir(parents=True)
    (tmp_path / "bundle" / "solution" / "plan.json").write_text(json.dumps(PLAN))
    return tmp_path / "bundle"


def test_names_are_read() -> None:
    assert is_scripted("scripted:oracle")
    assert not is_scripted("scripted:oracles")
    assert read_scripted("scripted:oracle?student=smollm2&lazy=0.86&wrong=0.05") == Scripted("smollm2", 0.86, 0.05)
    assert read_scripted("scripted:oracle?student=/a/b") == Scripted("/a/b")


@pytest.mark.parametrize("tail", ["", "?student=x&lasy=1", "?student=x&lazy=a", "?student=x&lazy=0.9&wrong=0.2"])
def test_bad_names_say_what_to_write(tail: str) -> None:
    with pytest.raises(ConfigError, match=r"student|lazy"):
        read_scripted(f"scripted:oracle{tail}")


def test_shares_are_drawn_by_the_seed() -> None:
    script = Scripted("s", lazy=0.6, wrong=0.1)
    drawn = [script.choose(seed) for seed in range(4000)]
    assert drawn == [script.choose(seed) for seed in range(4000)]
    assert abs(drawn.count("shortcut") / 4000 - 0.6) < 0.04
    assert abs(drawn.count("mistake") / 4000 - 0.1) < 0.03
    assert {Scripted("s").choose(seed) for seed in range(50)} == {"oracle"}


def test_steps_take_what_earlier_results_say() -> None:
    plan = PLAN["oracle"]
    assert next_step(plan, []) == ("", ("get_ticket", {"id": 7}))
    assert next_step(plan, ['{"id": 7, "now": 9}']) == ("", ("close_ticket", {"id": 9}))
    assert next_step(plan, ['{"result": {"id": 7, "now": 9}}']) == ("", ("close_ticket", {"id": 9}))
    assert next_step(plan, ["{}", "{}"]) == ("Done – 9.", None)
    assert next_step(plan, ["{}"] * 5)[1] is None
    nested = [{"tool": "x", "arguments": {"a": {"$result": 0, "path": "rows.1.id"}}}]
    assert next_step([{}, *nested], ['{"rows": [{"id": 1}, {"id": 2}]}']) == ("", ("x", {"a": 2}))


@pytest.mark.parametrize("result", ["not json", '{"error": {"code": "unavailable"}}', "[]", "7"])
def test_a_result_that_did_not_come_ends_the_play(result: str) -> None:
    text, call = next_step(PLAN["oracle"], [result])
    assert call is None
    assert text


def test_a_bundle_without_a_plan_is_an_engine_error(tmp_path: Path, bundle: Path) -> None:
    with pytest.raises(EngineError, match=r"plan\.json"):
        read_plan(tmp_path, "oracle")
    assert read_plan(bundle, "mistake") == PLAN["oracle"]
    with pytest.raises(EngineError, match="no step"):
        next_step([{"tol": 1}], [])


def test_the_ids_are_what_the_template_writes(proxy_codec: Codec, bundle: Path) -> None:
    engine = OracleEngine(Scripted("s"), proxy_codec)
    prompt = tuple(proxy_codec.encode("<|im_start|>user\nx<|im_end|>\n"))

    async def main(most: int) -> list[Any]:
        context = CallContext("r", str(bundle), 0, 1)
        return [c async for c in engine.generate(prompt, Sampling(max_tokens=most), proxy_codec.stop_ids, context)]

    (chunk,) = asyncio.run(main(500))
    assert proxy_codec.decode(chunk.ids) == (
        '<tool_call>\n{"name": "get_ticket", "arguments": {"id": 7}}\n</tool_call><|im_end|>'
    )
    assert (chunk.finish_reason, chunk.logprobs, chunk.version) == ("stop", None, 0)
    (short,) = asyncio.run(main(4))
    assert (short.ids, short.finish_reason) == (chunk.ids[:4], "length")


def test_a_whole_play_through_the_proxy_extends_token_by_token(proxy_stage: Any, bundle: Path) -> None:
    async def play(stage: Stage, name: str) -> list[str]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Close ticket 7"}]
        used: list[str] = []
        while True:
            status, answer = await stage.ask(name, {"messages": messages, "tools": TOOLS})
            assert status == 200
            message = answer["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return [*used, message["content"]]
            (call,) = message["tool_calls"]
            used.append(call["function"]["name"] + call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": '{"id":7,"now":9}'})

    async def main() -> None:
        async with proxy_stage() as stage:
            task = TaskSpec(id="t", instruction="x", bundle=str(bundle), digest="d")
            for lazy, name in ((0, "careful"), (1, "lazy")):
                model = ModelRef(name=f"scripted:oracle?student={stage.folder}&lazy={lazy}")
                stage.add(name, model=model, task=task)
            assert await play(stage, "careful") == ['get_ticket{"id": 7}', 'close_ticket{"id": 9}', "Done – 9."]
            assert await play(stage, "lazy") == ['close_ticket{"id": 7}', "Done."]
            calls = stage.store.calls.of("careful")
            for one, two in itertools.pairwise(calls):
                assert two.prompt_ids[: len(one.prompt_ids + one.completion_ids)] == one.prompt_ids + one.completion_ids
            assert {c.fork_reason for c in calls} == {""}
            assert {c.logprobs for c in calls} == {None}
            assert stage.engine.asked == []

    asyncio.run(main())
