"""The task families: what the oracle, the shortcut and each wrong solution end in, and which slots a split may use."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.services import catalog, find_tool
from rollout.types import Split
from synthesis import verify_program
from synthesis.checks import place, unnamed_facts
from synthesis.families import FAMILIES, HELDOUT, HELDOUT_FAMILIES, TRAIN, Family, family_named
from synthesis.play import Act, Final, dump_plan, parse_plan, play, script
from synthesis.procedural import Draft, compose, draw, expected_end, lucky

EVERY = (*FAMILIES, *HELDOUT_FAMILIES)
families = st.sampled_from(EVERY)
splits = st.sampled_from(list(Split))
drafts = st.builds(
    lambda family, split, seed, luck: compose(family, draw(family, split, seed, luck)),
    families,
    splits,
    st.integers(0, 2**31),
    st.booleans(),
)


def score(draft: Draft, steps: tuple[Any, ...]) -> float:
    played = play(draft.services, steps)
    return verify_program.grade(played.final, played.answer or "", expected_end(draft))


@settings(max_examples=200, deadline=None)
@given(drafts)
def test_the_oracle_scores_one_and_careless_policies_zero_unless_lucky(draft: Draft) -> None:
    assert score(draft, draft.oracle) == 1.0
    assert score(draft, ()) == 0.0
    assert score(draft, draft.mistake) == 0.0
    for steps in draft.wrong.values():
        assert score(draft, steps) == 0.0
    right_at_once = draft.slots.luck or not draft.family.follow
    assert score(draft, draft.shortcut) == (1.0 if right_at_once else 0.0)


@settings(max_examples=100, deadline=None)
@given(drafts)
def test_exactly_one_write_and_at_most_four_calls(draft: Draft) -> None:
    played = play(draft.services, draft.oracle)
    writes = [entry for entry in played.final["audit"] if entry["label"] == "write"]
    assert [(w["tool"], w["arguments"]) for w in writes] == [
        (draft.family.action, {"id": draft.family.target(draft.slots)})
    ]
    assert all(entry["status"] == 200 for entry in played.final["audit"])
    assert len(draft.oracle) <= 4


@settings(max_examples=100, deadline=None)
@given(drafts)
def test_extra_writes_and_other_services_are_seen(draft: Draft) -> None:
    decoy = Act(draft.slots.decoy, {"id": draft.slots.asked})
    assert score(draft, (*draft.oracle[:-1], decoy, Final("done"))) == 0.0
    look = Act(draft.family.lookup, {"id": draft.slots.asked})
    assert score(draft, (look, look, *draft.oracle[:-1][-1:], Final("Done."))) == 1.0
    assert score(draft, (*draft.oracle[:-1], Final("I have abandoned it"))) == 0.0


@settings(max_examples=200, deadline=None)
@given(drafts)
def test_the_prompt_shows_the_asked_id_alone_and_all_that_is_graded(draft: Draft) -> None:
    assert [int(n) for n in re.findall(r"\d+", draft.instruction)] == [draft.slots.asked]
    assert unnamed_facts(draft.instruction, draft.graded) == []
    assert len(draft.instruction) <= 120
    for fact in draft.graded:
        stripped = draft.instruction
        for word in fact.any_of:
            stripped = re.sub(re.escape(word), "", stripped, flags=re.IGNORECASE)
        assert fact.fact in unnamed_facts(stripped, draft.graded)


@settings(max_examples=100, deadline=None)
@given(drafts)
def test_three_short_tools_of_one_integer_argument_each(draft: Draft) -> None:
    specs = catalog(draft.family.services, draft.tools)
    assert len(set(draft.tools)) == 3
    assert {draft.family.lookup, draft.family.action} < set(draft.tools)
    for spec in specs:
        assert spec.parameters == {"type": "object", "properties": {"id": {"type": "integer"}}}
        assert 2 <= len(spec.description.split()) <= 4


@pytest.mark.parametrize("family", EVERY, ids=lambda f: f.name)
def test_a_family_crosses_two_services_and_varies_its_wording(family: Family) -> None:
    assert len(set(family.services)) >= 2
    assert find_tool(family.lookup).label == "read"
    assert find_tool(family.action).label == "write"
    assert find_tool(family.lookup).service != find_tool(family.action).service
    assert 3 <= len(family.templates) <= 4
    assert family_named(family.name) is family


def test_pools_of_training_and_held_out_tasks_share_nothing() -> None:
    assert not set(TRAIN.numbers) & set(HELDOUT.numbers)
    assert not set(TRAIN.names) & set(HELDOUT.names)


@settings(max_examples=200, deadline=None)
@given(families, splits, st.integers(0, 2**31))
def test_every_number_and_name_of_a_task_is_from_its_splits_pool(family: Family, split: Split, seed: int) -> None:
    draft = compose(family, draw(family, split, seed, bool(seed % 2)))
    mine, other = (HELDOUT, TRAIN) if split is Split.HELDOUT else (TRAIN, HELDOUT)
    text = draft.instruction + json.dumps(draft.services, ensure_ascii=False)
    assert {int(n) for n in re.findall(r"\d+", text)} <= set(mine.numbers)
    assert not any(re.search(rf"\b{name}\b", text, re.IGNORECASE) for name in other.names)


@settings(max_examples=100, deadline=None)
@given(st.floats(0.0, 1.0), st.integers(0, 500), st.integers(1, 80))
def test_luck_comes_at_its_rate_in_any_run_of_numbers(rate: float, start: int, length: int) -> None:
    assert abs(sum(lucky(n, rate) for n in range(start, start + length)) - rate * length) < 1.0 + 1e-6


@settings(max_examples=100, deadline=None)
@given(families, splits, st.integers(0, 2**31))
def test_luck_does_not_show_in_what_the_policy_sees_first(family: Family, split: Split, seed: int) -> None:
    plain, luck = (compose(family, draw(family, split, seed, luck)) for luck in (False, True))
    assert (plain.slots.luck, luck.slots.luck) == (False, True)
    assert (plain.instruction, plain.tools) == (luck.instruction, luck.tools)
    assert plain.shortcut == luck.shortcut
    assert plain.identity != luck.identity


def test_the_same_seed_gives_the_same_task_and_another_seed_another() -> None:
    one, same, other = (compose(EVERY[0], draw(EVERY[0], Split.RL, seed, False)) for seed in (5, 5, 6))
    assert one == same
    assert one.identity == same.identity != other.identity


@settings(max_examples=50, deadline=None)
@given(drafts)
def test_plans_survive_json_and_scripts_name_the_gateway_calls(draft: Draft) -> None:
    for steps in (draft.oracle, draft.shortcut, draft.mistake):
        assert parse_plan(json.loads(json.dumps(dump_plan(steps)))) == steps
    lines = script(draft.services, draft.oracle).splitlines()
    calls = [line for line in lines if "/opt/openforge/tool.py" in line]
    assert len(calls) == len(draft.oracle) - 1
    assert f"{draft.family.action} '{{\"id\": {draft.family.target(draft.slots)}}}'" in calls[-1]
    assert lines[-1] == "printf '%s\\n' done > /workspace/answer.txt"


@pytest.mark.parametrize("answer", [None, "", "done", "DONE!", "Erledigt – done ✓", "undone", "x" * 70000 + " done"])
def test_the_verifier_program_runs_alone_and_reads_any_answer(tmp_path: Path, answer: str | None) -> None:
    draft = compose(EVERY[0], draw(EVERY[0], Split.RL, 1, False))
    played = play(draft.services, draft.oracle)
    place(tmp_path, type(played)(played.final, answer, played.acts))
    reward = run_verifier_alone(tmp_path, draft)
    assert reward == (1.0 if answer in ("done", "DONE!", "Erledigt – done ✓") else 0.0)


def test_the_verifier_program_follows_no_link_and_gives_no_reward_without_a_final_state(tmp_path: Path) -> None:
    draft = compose(EVERY[0], draw(EVERY[0], Split.RL, 1, False))
    place(tmp_path, play(draft.services, draft.oracle))
    (tmp_path / "elsewhere").write_text("done")
    (tmp_path / "workspace" / "answer.txt").unlink()
    (tmp_path / "workspace" / "answer.txt").symlink_to(tmp_path / "elsewhere")
    assert run_verifier_alone(tmp_path, draft) == 0.0
    (tmp_path / "logs" / "artifacts" / "services.json").unlink()
    (tmp_path / "logs" / "verifier" / "reward.txt").unlink()
    with pytest.raises(subprocess.CalledProcessError):
        run_verifier_alone(tmp_path, draft)
    assert not (tmp_path / "logs" / "verifier" / "reward.txt").exists()


def run_verifier_alone(root: Path, draft: Draft) -> float:
    tests = root / "tests"
    tests.mkdir(exist_ok=True)
    (tests / "verify.py").write_bytes(Path(verify_program.__file__).read_bytes())
    (tests / "expected.json").write_text(json.dumps(expected_end(draft)))
    command = [sys.executable, "-I", "-S", str(tests / "verify.py"), str(root)]
    subprocess.run(command, check=True, capture_output=True, timeout=20)
    return float((root / "logs" / "verifier" / "reward.txt").read_text())
