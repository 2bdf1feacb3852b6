"""The SFT dataset: rows of recorded token ids, written once beside a manifest. Serves distillation and SFT.

Nothing is tokenised here. A row's ids are those that the proxy recorded, and the loss falls on exactly the sampled
ones, the end of turn included: joining and re-tokenising text would move token borders at the seam between prompt
and answer. A folder holds `rows.jsonl` (one `SftRow` a line) and `manifest.json`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field, ValidationError

from rollout.errors import ConfigError
from rollout.types import ModelRef, Record, TrainingSample, Trajectory
from training.checkpoint import whole_folder
from training.samples import SampleRules, make_samples, split_calls

ROWS, MANIFEST = "rows.jsonl", "manifest.json"
SFT_RULES = SampleRules(logprobs=False)


class SftRow(Record):
    """One training row: the tokens, and True where a token is trained (predicted from those before it)."""

    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    rollout_id: str
    task_id: str
    family: str = ""


class Manifest(Record):
    """What the dataset holds and where it came from."""

    run: str
    student: ModelRef
    """Whose tokenizer and template made the ids."""
    rows: int
    trajectories: int
    tokens: int
    trained_tokens: int
    longest: int
    families: dict[str, int] = Field(default_factory=dict)
    """Family -> rows."""
    dropped: dict[str, int] = Field(default_factory=dict)
    """Rule -> trajectories, rows or calls left out."""
    digest: str = ""
    """sha256 of `rows.jsonl`."""


@dataclass(frozen=True)
class RowLimits:
    """What a row must satisfy."""

    max_length: int
    end_ids: frozenset[int] = frozenset()
    """Ids that end a turn; a trained answer must end with one. Empty checks nothing."""
    merge: bool = True


@dataclass(frozen=True)
class RowSet:
    rows: tuple[SftRow, ...]
    dropped: Counter[str] = field(default_factory=Counter)


def make_rows(trajectories: Sequence[Trajectory], limits: RowLimits) -> RowSet:
    """Rows of all trajectories. A row past `max_length` is dropped whole and counted, never cut."""
    rows: list[SftRow] = []
    dropped: Counter[str] = Counter()
    for trajectory in trajectories:
        split = split_calls(trajectory, SFT_RULES)
        dropped.update({f"call_{reason}": count for reason, count in split.dropped.items()})
        if limits.end_ids and any(call.completion_ids[-1] not in limits.end_ids for call in split.kept):
            dropped["no_end_of_turn"] += 1
            continue
        for sample in make_samples(trajectory, SFT_RULES, merge=limits.merge):
            if len(sample.token_ids) > limits.max_length:
                dropped["too_long"] += 1
            else:
                rows.append(_row(sample, trajectory))
    return RowSet(tuple(rows), +dropped)


def _row(sample: TrainingSample, trajectory: Trajectory) -> SftRow:
    return SftRow(
        token_ids=sample.token_ids,
        mask=sample.mask,
        rollout_id=trajectory.rollout.id,
        task_id=trajectory.rollout.task_id,
        family=trajectory.rollout.task.provenance.family,
    )


@dataclass(frozen=True)
class Origin:
    """Where the rows of a dataset came from."""

    run: str
    student: ModelRef
    dropped: Counter[str]


def write_dataset(folder: Path, rows: Sequence[SftRow], origin: Origin) -> Manifest:
    """Writes rows and manifest at once; replaces what stood there."""
    body = "".join(row.model_dump_json() + "\n" for row in rows).encode()
    manifest = Manifest(
        run=origin.run,
        student=origin.student,
        rows=len(rows),
        trajectories=len({row.rollout_id for row in rows}),
        tokens=sum(len(row.token_ids) for row in rows),
        trained_tokens=sum(sum(row.mask) for row in rows),
        longest=max((len(row.token_ids) for row in rows), default=0),
        families=dict(sorted(Counter(row.family for row in rows).items())),
        dropped=dict(sorted(origin.dropped.items())),
        digest=hashlib.sha256(body).hexdigest(),
    )
    with whole_folder(folder) as part:
        (part / ROWS).write_bytes(body)
        (part / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n")
    return manifest


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest, or None when the folder holds no dataset. Raises ConfigError for a damaged one."""
    try:
        return Manifest.model_validate_json((folder / MANIFEST).read_text())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ConfigError(f"{folder / MANIFEST} is damaged ({error}); remove the folder and distil again") from error


def read_rows(folder: Path) -> list[SftRow]:
    """The checked rows of a dataset. Raises ConfigError for a missing, damaged or untrainable one."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise ConfigError(f"{folder} holds no dataset ({MANIFEST} is missing); run `openforge distill` first")
    body = (folder / ROWS).read_bytes()
    if hashlib.sha256(body).hexdigest() != manifest.digest:
        raise ConfigError(f"{folder / ROWS} does not match its manifest; remove the folder and distil again")
    rows = [SftRow.model_validate_json(line) for line in body.splitlines()]
    check_rows(rows)
    return rows


def check_rows(rows: Collection[SftRow]) -> None:
    """Raises ConfigError for an empty set, and for the first row that could not be trained."""
    if not rows:
        raise ConfigError("the dataset has no rows: no teacher trajectory passed; see `dropped` in its manifest")
    for problem in _problems(rows):
        raise ConfigError(f"the dataset cannot be trained: {problem}")


def _problems(rows: Collection[SftRow]) -> Iterator[str]:
    for at, row in enumerate(rows):
        where = f"row {at} (rollout {row.rollout_id})"
        if len(row.mask) != len(row.token_ids):
            yield f"{where} has {len(row.token_ids)} ids but {len(row.mask)} mask entries"
        elif not any(row.mask):
            yield f"{where} trains no token: its mask is all zero"
        elif row.mask[0]:
            yield f"{where} trains its first token, which nothing precedes"
