"""Samples: each sampled token of a trainable call is trained exactly once, in paper mode and merged."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import FailureClass
from rollout.types import (
    CallTag,
    Failure,
    ModelCall,
    ModelRef,
    Purpose,
    Rollout,
    RolloutState,
    TaskSpec,
    TrainingSample,
    Trajectory,
    Verdict,
    VersionSpan,
)
from training.samples import SampleRules, merged_samples, paper_samples, split_calls, trained_tokens

TASK = TaskSpec(id="t", instruction="do it", bundle="/b", digest="d")


def call(index: int, prompt: Sequence[int], answer: Sequence[int], **changes: object) -> ModelCall:
    base = ModelCall(
        rollout_id="r",
        index=index,
        prompt_ids=tuple(prompt),
        completion_ids=tuple(answer),
        logprobs=tuple(-0.1 * (k + 1) for k in range(len(answer))),
        delivered=True,
        versions=(VersionSpan(version=3, tokens=len(answer)),),
    )
    return base.model_copy(update=changes)


def trajectory(*calls: ModelCall, **changes: object) -> Trajectory:
    rollout = Rollout(
        id="r",
        run="run",
        task_id="t",
        group_id="g",
        model=ModelRef(name="m"),
        purpose=Purpose.TRAIN,
        task=TASK,
        state=RolloutState.SUCCEEDED,
        verdict=Verdict(reward=1.0, passed=True),
    )
    return Trajectory(rollout=rollout.model_copy(update=changes), calls=calls)


def trained(samples: Sequence[TrainingSample]) -> list[tuple[tuple[int, ...], int, float, float]]:
    """(all tokens before it, token, logprob, weight) of each trained token: what the gradient depends on."""
    return sorted(
        (s.token_ids[:t], s.token_ids[t], s.logprobs[t], s.weight[t])
        for s in samples
        for t, on in enumerate(s.mask)
        if on
    )


def test_calls_that_extend_each_other_become_one_row() -> None:
    first = call(0, [1, 2], [3, 4])
    second = call(1, [1, 2, 3, 4, 5], [6])
    [row] = merged_samples(trajectory(first, second))
    assert row.token_ids == (1, 2, 3, 4, 5, 6)
    assert row.mask == (False, False, True, True, False, True)
    assert row.logprobs == (0.0, 0.0, -0.1, -0.2, 0.0, -0.1)
    assert row.weight == (0.0, 0.0, 1.0, 1.0, 0.0, 1.0)
    assert (row.rollout_id, row.group_id, row.weight_version) == ("r", "g", 3)
    assert len(paper_samples(trajectory(first, second))) == 2


def test_a_fork_becomes_a_row_of_its_own() -> None:
    first = call(0, [1, 2], [3, 4])
    fork = call(1, [1, 2, 3, 9], [6])
    rows = merged_samples(trajectory(first, fork))
    assert [r.token_ids for r in rows] == [(1, 2, 3, 4), (1, 2, 3, 9, 6)]
    assert rows[1].mask == (False, False, False, False, True)


def test_two_answers_to_one_prompt_are_both_trained() -> None:
    rows = merged_samples(trajectory(call(0, [1], [2]), call(1, [1, 2], [3]), call(2, [1, 2], [4])))
    assert [r.token_ids for r in rows] == [(1, 2, 3), (1, 2, 4)]
    assert trained_tokens(rows) == 3
    assert rows[1].mask == (False, False, True)


def test_a_left_out_call_stays_as_context_of_the_next_one() -> None:
    title = call(1, [1, 2, 3], [7, 8], tag=CallTag.TITLE)
    rows = merged_samples(
        trajectory(call(0, [1, 2], [3]), title, call(2, [1, 2, 3, 7, 8], [9])),
        SampleRules(tags=frozenset({CallTag.MAIN})),
    )
    assert [r.mask for r in rows] == [(False, False, True, False, False, True)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"delivered": False}, "undelivered"),
        ({"failure": Failure(kind=FailureClass.INFRASTRUCTURE)}, "failed"),
        ({"tag": CallTag.UNATTRIBUTED}, "unattributed"),
        ({"completion_ids": (), "logprobs": ()}, "no_ids"),
        ({"prompt_ids": ()}, "no_ids"),
        ({"logprobs": None}, "no_logprobs"),
        ({"logprobs": (-0.1,)}, "corrupt"),
        ({"logprobs": (-0.1, float("nan"))}, "corrupt"),
        ({"versions": (VersionSpan(version=1, tokens=1),)}, "corrupt"),
    ],
)
def test_untrainable_calls_are_counted_by_reason(changes: dict[str, object], reason: str) -> None:
    bad = call(0, [1, 2], [3, 4], **changes)
    other = call(1, [8], [9])
    split = split_calls(trajectory(bad, other))
    assert [c.index for c in split.kept] == [1]
    assert split.dropped == {reason: 1}


def test_a_later_prompt_or_a_normal_end_proves_delivery() -> None:
    first = call(0, [1], [2], delivered=False)
    last = call(1, [1, 2, 3], [4], delivered=False)
    assert len(split_calls(trajectory(first, last)).kept) == 2
    assert split_calls(trajectory(first, last, end_reason="call_cap")).dropped == {"undelivered": 1}
    stranger = last.model_copy(update={"thread": "sub"})
    assert split_calls(trajectory(first, stranger)).dropped == {"undelivered": 1}


def test_a_malformed_answer_is_trained_whole() -> None:
    bad = call(0, [1], [2, 3], malformed=True)
    assert paper_samples(trajectory(bad, end_reason="malformed"))[0].mask == (False, True, True)


@pytest.mark.bugs
def test_bug_32_a_row_without_trained_tokens_is_never_made() -> None:
    drifted = call(0, [1, 2], [3], delivered=False)
    later = call(1, [1, 7, 3], [4])
    rows = merged_samples(trajectory(drifted, later))
    assert split_calls(trajectory(drifted, later)).dropped == {"undelivered": 1}
    assert all(any(r.mask) for r in rows)
    assert (
        merged_samples(
            trajectory(drifted, later.model_copy(update={"delivered": False, "failure": None}), end_reason="x")
        )
        == []
    )


@st.composite
def histories(draw: st.DrawFn) -> Trajectory:
    """Calls that extend, fork from, or have nothing to do with earlier ones; some of them untrainable."""
    tokens = st.integers(0, 3)
    calls: list[ModelCall] = []
    for index in range(draw(st.integers(1, 7))):
        base: tuple[int, ...] = ()
        if calls and draw(st.booleans()):
            parent = draw(st.sampled_from(calls))
            whole = parent.prompt_ids + parent.completion_ids
            base = whole[: draw(st.integers(0, len(whole)))] if draw(st.booleans()) else whole
        prompt = base + tuple(draw(st.lists(tokens, min_size=0 if base else 1, max_size=4)))
        answer = draw(st.lists(tokens, min_size=1, max_size=4))
        calls.append(call(index, prompt, answer, delivered=draw(st.booleans())))
    return trajectory(*calls, end_reason="call_cap")


@settings(max_examples=200, deadline=None)
@given(histories(), st.sampled_from(["token", "call"]))
def test_both_modes_train_each_sampled_token_exactly_once(history: Trajectory, weighting: str) -> None:
    rules = SampleRules(weighting=weighting)  # type: ignore[arg-type]
    kept = split_calls(history, rules).kept
    expected = sorted(
        (
            c.prompt_ids + c.completion_ids[:k],
            c.completion_ids[k],
            c.logprobs[k],
            1.0 if weighting == "token" else 1 / len(c.completion_ids),
        )
        for c in kept
        for k in range(len(c.completion_ids))
        if c.logprobs is not None
    )
    assert trained(paper_samples(history, rules)) == expected
    assert trained(merged_samples(history, rules)) == expected
    assert all(any(row.mask) and not row.mask[0] for row in merged_samples(history, rules))
