"""The report as a file: what it says, that it is self-contained, and that nothing a model wrote can break out of it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
from evaluation_fakes import APART, EVIL, FAMILIES, Scene, hostile_run, put_result
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from evaluation.report import write_report
from evaluation.report.collect import Batch, Spread, collect
from evaluation.report.curves import charts, ticks
from evaluation.report.ledger import costs, duration, stage_rows
from evaluation.report.page import inert_json
from evaluation.report.tables import headline, matrix, model_rows, signed
from evaluation.report.tokens import Tokenizers, load_tokenizer, pieces, writer_of
from evaluation.report.trajectories import MAX_TEXT, compress, message, view
from evaluation.run import summary
from rollout.errors import ConfigError
from rollout.store import Store
from rollout.types import (
    ModelCall,
    ModelRef,
    Purpose,
    ResultRecord,
    StageRecord,
    StepRecord,
)


@pytest.fixture(scope="session")
def page(sample_store: Store, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = write_report(sample_store, runs=["demo"], out=tmp_path_factory.mktemp("out") / "deep" / "report.html")
    return out.read_text(encoding="utf-8")


def index_of(html: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="index">(.*?)</script>', html, re.S)
    assert found
    return list(json.loads(found[1]))


def views_of(html: str) -> dict[str, dict[str, Any]]:
    chunks = re.findall(r'<script type="application/octet-stream" class="chunk">(.*?)</script>', html, re.S)
    return {v["id"]: v for c in chunks for v in json.loads(zlib.decompress(base64.b64decode(c)))}


# -- what it says


def test_table_shows_each_model_with_interval_and_paired_difference(page: str, sample_store: Store) -> None:
    text = re.sub(r"<[^>]+>", " ", page)
    for label in ("base", "sft", "rl"):
        result = sample_store.records.get(ResultRecord, run="demo", key=label)
        assert result
        s = summary(result)
        assert s.n_tasks == 16
        assert f"{100 * s.pass_at_1:.1f}" in text
        assert f"[{100 * s.ci_low:.1f}, {100 * s.ci_high:.1f}]" in text
    rows = model_rows(collect(sample_store, ["demo"]).results)
    assert [r.title for r in rows] == ["Base", "SFT", "SFT + RL"]
    found = rows[2].step and rows[2].step.difference
    assert found
    assert signed(found.mean) in text
    assert found.mean == pytest.approx(rows[2].summary.pass_at_1 - rows[1].summary.pass_at_1)


def test_stages_charts_and_costs_are_there(page: str) -> None:
    for words in (
        "a wrong solution passed",
        "near duplicates and weak ideas go",
        "SFT loss",
        "RL reward and validation",
    ):
        assert words in page
    assert "Malformed tool calls" in page
    assert page.count("<svg") == 4
    assert "1 min 58 s" in page


def test_family_apart_is_reported_apart(page: str, sample_store: Store) -> None:
    assert "Left out of training" in page
    rows = model_rows(collect(sample_store, ["demo"]).results, apart=True)
    assert {r.summary.n_tasks for r in rows} == {2}
    blocks = {b.family: b.apart for b in matrix(collect(sample_store, ["demo"]).results)}
    assert blocks == {**dict.fromkeys(FAMILIES, False), APART: True}


def test_every_trial_is_in_the_index_with_its_verdict(page: str, sample_store: Store) -> None:
    rows = index_of(page)
    assert len([r for r in rows if r["label"] != "teacher"]) == 3 * 18 * 3
    assert len([r for r in rows if r["label"] == "teacher"]) == 36
    for row in rows:
        stored = sample_store.rollouts.get(row["id"])
        assert stored
        expected = "dropped" if not stored.verdict else "passed" if stored.verdict.passed else "failed"
        assert (row["outcome"], row["task"], row["trial"]) == (expected, stored.task_id, stored.start_index + 1)
        assert row["tokens"] == stored.tokens > 0


def test_trajectory_holds_messages_and_the_very_tokens(page: str, sample_store: Store) -> None:
    found = views_of(page)
    row = next(r for r in index_of(page) if r["label"] == "rl" and r["calls"] == 3)
    calls = sample_store.calls.of(row["id"])
    shown = found[row["id"]]
    assert [len(t["tokens"]) for t in shown["turns"]] == [len(c.completion_ids) for c in calls]
    for turn, call in zip(shown["turns"], calls, strict=True):
        assert [t[2] for t in turn["tokens"]] == list(call.completion_ids)
        assert [t[1] for t in turn["tokens"]] == pytest.approx(list(call.logprobs or ()), abs=1e-4)
    first = "".join(t[0] for t in shown["turns"][0]["tokens"])
    assert first.startswith("<tool_call>\n{")
    assert first.endswith("<|im_end|>")
    assert [m["role"] for m in shown["turns"][0]["messages"]] == ["system", "user"]
    assert [m["role"] for m in shown["turns"][1]["messages"]] == ["tool"]
    assert shown["turns"][0]["answer"]["calls"][0]["name"].startswith("get_")


def test_cap_embeds_whole_tasks_the_same_for_each_model_and_says_so(sample_store: Store, tmp_path: Path) -> None:
    html = write_report(sample_store, runs=["demo"], out=tmp_path / "r.html", cap=16).read_text()
    rows = [r for r in index_of(html) if r["label"] != "teacher"]
    tasks = {label: {r["task"] for r in rows if r["label"] == label} for label in ("base", "sft", "rl")}
    assert tasks["base"] == tasks["sft"] == tasks["rl"]
    assert len(tasks["base"]) == 5
    assert len({t.rsplit("-", 1)[0] for t in tasks["base"]}) == 5
    assert "Base: 15 of 54" in html
    assert len(html) < 250_000


def test_headline_claims_only_what_the_interval_carries(sample_store: Store) -> None:
    rows = model_rows(collect(sample_store, ["demo"]).results)
    assert headline(rows).title.startswith("RL lifts pass@1 from")
    same = model_rows([e for e in collect(sample_store, ["demo"]).results if e.label == "sft"])
    assert headline(same).title.startswith("SFT passes")
    assert headline(()).title == "A run without results yet"


def test_no_gain_is_not_called_a_gain(store: Store) -> None:
    for label in ("sft", "rl"):
        put_result(store, label, {f"t{i}": [float(i % 2), float(label == "rl" and i == 3), 0.0] for i in range(8)})
    title = headline(model_rows(collect(store, ["demo"]).results)).title
    assert title == "SFT + RL and SFT are not told apart on 8 held-out tasks"


def test_results_on_other_tasks_are_not_subtracted(store: Store, tmp_path: Path) -> None:
    put_result(store, "sft", {"a": [1.0]})
    put_result(store, "rl", {"b": [1.0]})
    assert "other tasks" in write_report(store, runs=["demo"], out=tmp_path / "r.html").read_text()


def test_a_label_of_two_runs_stays_apart(store: Store) -> None:
    put_result(store, "sft", {"a": [1.0]})
    put_result(store, "sft", {"a": [0.0]}, run="second")
    assert [e.label for e in collect(store, ["demo", "second"]).results] == ["sft", "second/sft"]


@pytest.mark.parametrize("kind", ["stages", "steps", "results"])
def test_a_run_that_is_not_finished_has_a_report(store: Store, tmp_path: Path, kind: str) -> None:
    if kind == "stages":
        store.records.put(StageRecord(run="demo", stage="propose", kept=0), run="demo", key="propose")
    elif kind == "steps":
        store.records.put(StepRecord(run="demo", kind="rl", step=0, reward_mean=0.0), run="demo", key="rl-0")
    else:
        put_result(store, "base", {"a": [0.0]})
    html = write_report(store, runs=["demo"], out=tmp_path / "r.html").read_text()
    assert ("What each stage kept" in html, "<svg" in html, "Every task" in html) == (
        kind == "stages",
        kind == "steps",
        kind == "results",
    )


def test_an_unknown_run_names_those_that_exist(sample_store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="of dmeo; runs with records: demo"):
        write_report(sample_store, runs=["dmeo"], out=tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


# -- self-contained and safe


def test_nothing_is_loaded_from_outside(page: str) -> None:
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#|data:,)""", page)
    assert not re.search(r"url\(|@import|https?://|fetch\(|XMLHttpRequest|innerHTML|document\.write|eval\(", page)
    assert page.count("<script>") == 1


def test_policy_allows_exactly_the_one_script(page: str) -> None:
    script = re.search(r"<script>(.*?)</script>", page, re.S)
    assert script
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy
    assert "default-src 'none'" in policy[1]
    assert f"script-src 'sha256-{digest}'" in policy[1]


def test_hostile_content_cannot_end_an_element(store: Store, tmp_path: Path) -> None:
    hostile_run(store)
    html = write_report(store, runs=["demo"], out=tmp_path / "r.html").read_text()
    assert "<script>document.title" not in html
    assert "<img" not in html
    assert len(re.findall(r"</script", html)) == len(re.findall(r"<script", html)) == 3
    assert "&lt;/script&gt;" in html
    assert "<!--" not in html
    (shown,) = views_of(html).values()
    assert shown["explanation"] == EVIL
    assert shown["turns"][0]["messages"][0]["text"] == EVIL
    assert index_of(html)[0]["family"] == EVIL


@given(st.recursive(st.text() | st.integers() | st.none(), lambda inner: st.lists(inner, max_size=3), max_leaves=6))
def test_inert_json_round_trips_without_markup(value: Any) -> None:
    text = str(inert_json(value))
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == value


@given(st.lists(st.text(st.characters(codec=None), max_size=20), max_size=4))
def test_chunks_round_trip_any_text_even_lone_surrogates(texts: list[str]) -> None:
    assert json.loads(zlib.decompress(base64.b64decode(compress(texts)))) == texts


# -- tokens


def encode(store: Store, text: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(store.home.models / "smollm2" / "tokenizer.json"))
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def test_a_broken_tokenizer_is_a_model_without_one(sample_store: Store, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"half": ')
    found = Tokenizers(sample_store.home)
    assert found.pieces(ModelRef(name=str(tmp_path)), [5]) == ["[5]"]
    assert found.missing == {str(tmp_path)}


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=30))
def test_pieces_join_to_the_decoded_text(sample_store: Store, text: str) -> None:
    decoder = load_tokenizer(sample_store.home.models / "smollm2")
    ids = encode(sample_store, text)
    found = pieces(decoder, ids)
    assert len(found) == len(ids)
    assert "".join(found) == decoder.decode(ids)


def test_a_character_of_several_tokens_is_shown_once_whole(sample_store: Store) -> None:
    decoder = load_tokenizer(sample_store.home.models / "smollm2")
    ids = encode(sample_store, "a🙂b")
    assert [p for p in pieces(decoder, ids) if p] == ["a", "🙂", "b"]
    assert "\N{REPLACEMENT CHARACTER}" in "".join(pieces(decoder, ids[:2]))


def test_a_model_whose_folder_is_gone_shows_ids(sample_store: Store) -> None:
    found = Tokenizers(sample_store.home)
    assert found.pieces(ModelRef(name="/gone/checkpoint"), [5, 6]) == ["[5]", "[6]"]
    assert found.missing == {"/gone/checkpoint"}
    assert writer_of(ModelRef(name="scripted:oracle?student=smollm2&lazy=0.8")) == "smollm2"


# -- trajectories of odd shape


def odd_call(messages: tuple[dict[str, Any], ...], **changes: Any) -> ModelCall:
    return ModelCall(rollout_id="r", index=0, messages=messages, **changes)


def test_messages_of_any_shape_are_shown() -> None:
    assert message({"role": "user", "content": None}).text == ""
    assert (
        message({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}).text
        == 'a\n{"type": "image"}'
    )
    assert message({"content": {"a": 1}}).text == '{"a": 1}'
    call = message({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"é": 1}}}, "x"]}).calls
    assert [(c.name, c.arguments) for c in call] == [("f", '{"é": 1}'), ('"x"', "")]
    assert message({"role": "assistant", "content": "b", "reasoning_content": "a"}).text == "<think>a</think>\nb"


def test_a_huge_message_is_cut_with_a_count() -> None:
    found = message({"role": "user", "content": "x" * 1_000_000})
    assert (len(found.text), found.cut) == (MAX_TEXT, 1_000_000 - MAX_TEXT)


def test_turns_show_only_what_is_new_and_mark_a_fork(sample_store: Store) -> None:
    rollout = sample_store.rollouts.query(run="demo-eval-rl", limit=1)[0]
    user, answer = {"role": "user", "content": "u"}, Scene(text="a").answer()
    restated = {**answer, "content": [{"type": "text", "text": "a"}]}
    calls = [
        odd_call((user, answer)),
        odd_call((user, restated, {"role": "tool", "content": "t"}, answer)),
        odd_call(({"role": "user", "content": "summary"},), fork_reason="client edit", malformed=True, delivered=True),
    ]
    turns = view(rollout, calls, lambda _, ids: [""] * len(ids)).turns
    assert [[m.role for m in t.messages] for t in turns] == [["user"], ["tool"], ["user"]]
    assert turns[2].notes == ("does not extend the last call: client edit", "a tool call did not parse")
    assert turns[2].answer is None


# -- charts


def test_reward_interval_is_a_bootstrap_over_groups_when_the_rollouts_are_there() -> None:
    step = StepRecord(run="d", kind="rl", step=0, finished=8, group_sizes=(4, 4), reward_mean=0.5)
    alone, _ = charts([step], {})
    spread = {Batch("d", Purpose.TRAIN, 0): Spread((0.5, 0.5), 8)}
    known, _ = charts([step], spread)
    assert known.hits[0].tip.endswith("50.0 % [50.0 %, 50.0 %]")
    low, high = map(float, re.findall(r"([\d.]+) %", alone.hits[0].tip)[1:])
    assert (low, high) == (pytest.approx(9.5, abs=0.1), pytest.approx(90.5, abs=0.1))
    other, _ = charts([step.model_copy(update={"finished": 7})], spread)
    assert other.hits[0].tip == alone.hits[0].tip


def test_spreads_are_those_of_the_steps_own_rollouts(sample_store: Store) -> None:
    data = collect(sample_store, ["demo"])
    step = next(s for s in data.steps if s.kind == "rl" and s.step == 3)
    spread = data.spreads[Batch("demo", Purpose.TRAIN, 3)]
    assert (len(spread.means), spread.rollouts) == (8, 64)
    assert sum(spread.means) / 8 == pytest.approx(step.reward_mean)


def test_no_loss_that_is_not_a_number_is_drawn() -> None:
    steps = [StepRecord(run="d", kind="sft", step=i, loss=v) for i, v in enumerate((1.0, 0.5))]
    (chart,) = charts([*steps, StepRecord(run="d", kind="sft", step=2, loss=None)], {})
    assert "NaN" not in chart.series[0].line
    assert charts([], {}) == ()


@given(st.floats(1e-6, 1e6))
def test_ticks_are_few_round_and_cover_the_top(top: float) -> None:
    found = ticks(top)
    assert found[0] == 0
    assert found[-1] >= top * 0.999
    assert 3 <= len(found) <= 6


def test_one_step_alone_is_drawn_in_the_middle() -> None:
    (chart,) = charts([StepRecord(run="d", kind="sft", step=5, loss=0.0)], {})
    assert chart.series[0].dots[0][0] == pytest.approx(294.0)


# -- stages


def test_stage_rows_keep_every_reason_and_the_order_of_the_path(sample_store: Store) -> None:
    rows = stage_rows(collect(sample_store, ["demo"]).stages)
    assert [r.name for r in rows] == ["propose", "prune", "build", "trial", "refine", "distill"]
    refine = rows[4]
    assert [s.count for s in refine.dropped] == [14, 6, 5]
    assert refine.kept_width + sum(s.width for s in refine.dropped) == pytest.approx(100 * 361 / 456)
    assert costs(collect(sample_store, ["demo"]).stages).rollouts == 3405


def test_costs_of_nothing_divide_by_nothing() -> None:
    found = costs([StageRecord(run="d", stage="propose")])
    assert (found.rows[0].width, found.rows[0].share) == (0, 0)
    assert stage_rows([StageRecord(run="d", stage="prune", dropped={"x": 0})])[0].dropped == ()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (9.96, "10.0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (4350, "1 h 12 min")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text
