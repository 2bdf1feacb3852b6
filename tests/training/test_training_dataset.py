"""The SFT dataset: recorded ids, loss on exactly the sampled ones, and nothing untrainable gets in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollout.errors import ConfigError
from rollout.types import ModelCall, ModelRef, Provenance, Purpose, Rollout, RolloutState, TaskSpec, Trajectory, Verdict
from training.config import SftConfig
from training.dataset import (
    MANIFEST,
    ROWS,
    Origin,
    RowLimits,
    SftRow,
    check_rows,
    make_rows,
    read_manifest,
    read_rows,
    write_dataset,
)
from training.sft import plan_rows

EOT = 2


def trajectory(*calls: tuple[Sequence[int], Sequence[int]], family: str = "f") -> Trajectory:
    task = TaskSpec(id="t", instruction="do it", bundle="/b", digest="d", provenance=Provenance(family=family))
    rollout = Rollout(
        id="r",
        run="run",
        task_id="t",
        group_id="g",
        model=ModelRef(name="scripted:oracle"),
        purpose=Purpose.TEACHER,
        task=task,
        state=RolloutState.SUCCEEDED,
        verdict=Verdict(reward=1.0, passed=True),
    )
    recorded = tuple(
        ModelCall(rollout_id="r", index=k, prompt_ids=tuple(p), completion_ids=tuple(a), delivered=True)
        for k, (p, a) in enumerate(calls)
    )
    return Trajectory(rollout=rollout, calls=recorded)


TWO_CALLS = trajectory(([5, 6, 7], [8, EOT]), ([5, 6, 7, 8, EOT, 9, 9], [10, 11, EOT]))
LIMITS = RowLimits(max_length=64, end_ids=frozenset({EOT}))


def labels(row: SftRow) -> list[int | None]:
    return [token if on else None for token, on in zip(row.token_ids, row.mask, strict=True)]


def test_loss_falls_on_exactly_the_sampled_ids() -> None:
    [row] = make_rows([TWO_CALLS], LIMITS).rows
    assert labels(row) == [None, None, None, 8, EOT, None, None, 10, 11, EOT]
    assert (row.rollout_id, row.task_id, row.family) == ("r", "t", "f")
    assert len(make_rows([TWO_CALLS], RowLimits(64, frozenset({EOT}), merge=False)).rows) == 2


def test_bug_80_the_first_response_token_is_a_label() -> None:
    [row] = make_rows([trajectory(([5, 6], [8, EOT]))], LIMITS).rows
    assert labels(row)[len([5, 6])] == 8


def test_bug_70_the_last_label_of_each_turn_is_the_end_of_turn() -> None:
    [row] = make_rows([TWO_CALLS], LIMITS).rows
    ends = [t for t, on in enumerate(row.mask) if on and (t + 1 == len(row.mask) or not row.mask[t + 1])]
    assert [row.token_ids[t] for t in ends] == [EOT, EOT]
    unended = make_rows([trajectory(([5], [8, 9]))], LIMITS)
    assert (unended.rows, unended.dropped) == ((), {"no_end_of_turn": 1})


def test_bug_72_ids_come_from_the_capture_and_are_never_joined_as_text() -> None:
    """An answer that begins with a space: as text its first token would merge with the end of the prompt."""
    tokenizer = pytest.importorskip("tokenizers")
    bpe = tokenizer.Tokenizer(
        tokenizer.models.BPE({"a": 0, " ": 1, "b": 2, "a ": 3, "a b": 4}, [("a", " "), ("a ", "b")])
    )
    prompt, answer = [0], [1, 2]
    assert bpe.encode("a" + " b").ids == [4]
    [row] = make_rows([trajectory((prompt, answer))], RowLimits(64)).rows
    assert row.token_ids == (0, 1, 2)
    assert labels(row) == [None, 1, 2]


def test_bug_68_a_row_past_the_limit_is_dropped_and_counted_never_cut() -> None:
    long = trajectory((list(range(5, 60)), [8, EOT]))
    found = make_rows([long, TWO_CALLS], RowLimits(max_length=20, end_ids=frozenset({EOT})))
    assert [row.token_ids[-1] for row in found.rows] == [EOT]
    assert found.dropped == {"too_long": 1}
    assert len(make_rows([long], RowLimits(max_length=57)).rows) == 1


def row(mask: Sequence[bool], ids: Sequence[int] = (5, 6, 7), family: str = "f", rollout: str = "r") -> SftRow:
    return SftRow(token_ids=tuple(ids), mask=tuple(mask), rollout_id=rollout, task_id="t", family=family)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no rows"),
        ([row([False, True, True]), row([False] * 3)], "row 1 .*all zero"),
        ([row([True, True, True])], "first token"),
        ([row([False, True])], "3 ids but 2 mask"),
    ],
)
def test_bug_69_untrainable_rows_are_an_error_at_the_start(rows: list[SftRow], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_rows(rows)


def test_what_is_written_is_read_back_and_summed_up(tmp_path: Path) -> None:
    rows = [row([False, True, True], rollout="a"), row([False, False, True], family="h", rollout="b")]
    folder = tmp_path / "data"
    written = write_dataset(folder, rows, Origin("run", ModelRef(name="m", digest="x"), Counter(too_long=3)))
    assert read_rows(folder) == rows
    assert read_manifest(folder) == written
    assert (written.rows, written.trajectories, written.tokens, written.trained_tokens) == (2, 2, 6, 3)
    assert (written.families, written.dropped, written.longest) == ({"f": 1, "h": 1}, {"too_long": 3}, 3)


def test_a_damaged_or_missing_dataset_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="openforge distill"):
        read_rows(tmp_path / "nothing")
    folder = tmp_path / "data"
    write_dataset(folder, [row([False, True, True])], Origin("run", ModelRef(name="m"), Counter()))
    (folder / ROWS).write_text("")
    with pytest.raises(ConfigError, match="does not match"):
        read_rows(folder)
    (folder / MANIFEST).write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        read_manifest(folder)


def test_grouped_batches_hold_one_kind_in_turn_and_every_row_once() -> None:
    rows = [row([False, True, True], (1, 2, k), family=f"f{k % 3}") for k in range(26)]
    planned = plan_rows(rows, SftConfig(batch=4))
    assert sorted(r.token_ids for r in planned) == sorted(r.token_ids for r in rows)
    batches = [planned[at : at + 4] for at in range(0, 24, 4)]
    assert sum(len({r.family for r in batch}) == 1 for batch in batches) == 6
    kinds = [b[0].family for b in batches]
    assert len(set(kinds[:3])) == len(set(kinds[3:])) == 3
    assert plan_rows(rows, SftConfig(batch=4)) == planned
    assert plan_rows(rows, SftConfig(batch=4, seed=1)) != planned


def test_rows_of_a_family_that_begin_otherwise_are_another_kind() -> None:
    rows = [row([False, True, True], (k % 2, 2, k)) for k in range(8)]
    planned = plan_rows(rows, SftConfig(batch=4))
    assert [{r.token_ids[0] for r in planned[at : at + 4]} in ({0}, {1}) for at in (0, 4)] == [True, True]


def test_epochs_and_steps_bound_the_plan() -> None:
    rows = [row([False, True, True], (k, k, k)) for k in range(10)]
    twice = plan_rows(rows, SftConfig(epochs=2.0, batching="mixed"))
    assert sorted(r.token_ids for r in twice[:10]) == sorted(r.token_ids for r in twice[10:])
    assert twice[:10] != twice[10:]
    assert len(plan_rows(rows, SftConfig(epochs=0.5))) == 5
    assert len(plan_rows(rows, SftConfig(epochs=3.0, batch=2, max_steps=4))) == 8
