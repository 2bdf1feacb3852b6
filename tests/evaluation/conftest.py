"""A small store with typed records as the stages write them, made without running anything: what reports read."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from evaluation_fakes import APART, FAMILIES, Sampler, save_tokenizer

from rollout.config import Home, open_home
from rollout.store import Store, open_store
from rollout.types import (
    HistoryMode,
    ModelRef,
    Purpose,
    ResultRecord,
    Rollout,
    Sampling,
    StageRecord,
    StepRecord,
    TaskSpec,
)

SKILL = {
    "base": dict.fromkeys((*FAMILIES, APART), 0.03),
    "sft": {"address-changed": 0.55, "meeting-moved": 0.62, "note-as-asked": 0.86, "ticket-merged": 0.58, APART: 0.35},
    "rl": {"address-changed": 0.9, "meeting-moved": 0.94, "note-as-asked": 0.93, "ticket-merged": 0.9, APART: 0.7},
}


def fill(store: Store, home: Home, per_family: int) -> None:
    """A whole run named `demo`: results, stages, steps, rollouts and calls."""
    tokenizer = save_tokenizer(home.models / "smollm2")
    for name in ("demo-sft", "demo-rl"):
        save_tokenizer(home.checkpoints / name)
    sampler = Sampler(store, tokenizer)
    names = {"base": "smollm2", "sft": str(home.checkpoints / "demo-sft"), "rl": str(home.checkpoints / "demo-rl")}
    tasks = [sampler.task(f, i) for f in FAMILIES for i in range(per_family)]
    tasks += [sampler.task(APART, i) for i in range(max(2, per_family // 2))]
    for label, name in names.items():
        _evaluation(sampler, label, ModelRef(name=name, digest=label * 4), tasks)
    oracle = ModelRef(name="scripted:oracle?student=smollm2&lazy=0.8")
    taught = [sampler.rollout(t, "demo", oracle, i, 0.6, Purpose.TEACHER) for t in tasks[:20] for i in range(2)]
    sampler.save(taught)
    for stage in stage_records():
        store.records.put(stage, run="demo", key=stage.stage)
    steps = step_records()
    trained = train_rollouts(sampler, [s for s in steps if s.kind == "rl"])
    store.rollouts.enqueue(trained)
    for rollout in trained:
        store.rollouts.note_call(rollout.id, 40, rollout.weight_version)
    for step in steps:
        rewards = [r.verdict.reward for r in trained if r.verdict and r.weight_version == step.weight_version]
        mean = {"reward_mean": sum(rewards) / len(rewards)} if step.kind == "rl" else {}
        store.records.put(step.model_copy(update=mean), run="demo", key=f"{step.kind}-{step.step:05d}")


def _evaluation(sampler: Sampler, label: str, model: ModelRef, tasks: Sequence[TaskSpec]) -> None:
    run = f"demo-eval-{label}"
    hard = {t.id: sampler.rng.uniform(-0.25, 0.25) for t in tasks}
    grouped = {
        t.id: [
            sampler.rollout(
                t, run, model, i, SKILL[label][t.provenance.family] + hard[t.id] * (label != "base"), Purpose.EVAL
            )
            for i in range(3)
        ]
        for t in tasks
    }
    rollouts = [r for rs in grouped.values() for r in rs]
    sampler.save(rollouts)
    lost = sum(r.verdict is None for r in rollouts)
    result = ResultRecord(
        run="demo",
        label=label,
        model=model,
        harness="react",
        history=HistoryMode.TEMPLATE,
        sampling=Sampling(max_tokens=40),
        trials={t: [r.verdict.reward if r.verdict else 0.0 for r in rs] for t, rs in grouped.items()},
        families={t.id: t.provenance.family for t in tasks},
        rollouts={t: [r.id for r in rs] for t, rs in grouped.items()},
        apart=(APART,),
        dropped={"timeout": lost} if lost else {},
        metrics={"pass_reward": 1.0},
        seconds=41.0,
    )
    sampler.store.records.put(result, run="demo", key=label)


def stage_records() -> list[StageRecord]:
    def stage(
        name: str, kept: int, dropped: dict[str, int], seconds: float, tokens: int = 0, rollouts: int = 0
    ) -> StageRecord:
        return StageRecord(
            run="demo", stage=name, kept=kept, dropped=dropped, seconds=seconds, tokens=tokens, rollouts=rollouts
        )

    return [
        stage("propose", 420, {"same identity": 36}, 1.4),
        stage("prune", 372, {"family over its share": 31, "fixture too close": 17}, 2.2),
        stage("build", 372, {}, 6.8),
        stage("trial", 361, {"harness failure": 2, "verifier failure": 9}, 58.0, 21840, 372),
        stage(
            "refine",
            336,
            {"oracle below 1": 6, "a wrong solution passed": 14, "instruction hides a graded fact": 5},
            74.5,
            0,
            1480,
        ),
        stage("distill", 256, {"reward below 1": 148, "more than 5 equal actions": 3, "timeout": 2}, 66.0, 11920, 409),
        stage("sft", 64, {}, 118.0, 75210),
        stage("rl", 10, {"groups without a mix": 34}, 221.0, 48730, 640),
        stage("eval-base", 168, {}, 44.0, 9810, 168),
        stage("eval-sft", 167, {"timeout": 1}, 39.0, 13420, 168),
        stage("eval-rl", 166, {"timeout": 2}, 37.0, 14105, 168),
    ]


def step_records() -> list[StepRecord]:
    rng = random.Random(3)
    sft = [
        StepRecord(
            run="demo",
            kind="sft",
            step=i,
            loss=2.6 * 0.9**i + 0.03 + 0.05 * abs(rng.gauss(0, 1)),
            tokens=1180,
            seconds=1.8,
        )
        for i in range(1, 65)
    ]
    return [*sft, *[_rl_step(i, rng) for i in range(10)], *[_validation(i) for i in range(0, 11, 2)]]


def _rl_step(i: int, rng: random.Random) -> StepRecord:
    return StepRecord(
        run="demo",
        kind="rl",
        step=i,
        weight_version=i,
        started=64,
        finished=64,
        group_sizes=(8,) * 8,
        mixed_groups=max(1, 7 - i // 2),
        samples=160,
        tokens=4870,
        reward_mean=min(0.98, 0.6 + 0.036 * i + rng.gauss(0, 0.04)),
        metrics={"malformed_share": round(64 * abs(rng.gauss(0.012, 0.01))) / 64},
        seconds=21.0,
    )


def _validation(i: int) -> StepRecord:
    p = min(0.95, 0.63 + 0.03 * i)
    bounds = {"ci_low": p - 0.07, "ci_high": min(1.0, p + 0.06)}
    return StepRecord(run="demo", kind="validation", step=i, finished=72, reward_mean=p, metrics=bounds)


def train_rollouts(sampler: Sampler, steps: Sequence[StepRecord]) -> list[Rollout]:
    """Rollouts, without their calls, of each RL step, with about the mean reward that the step has."""
    tasks = [sampler.task(FAMILIES[g % 4], 500 + g) for g in range(8)]
    model = ModelRef(name="smollm2")
    made = [
        sampler.rollout(task, f"demo-s{s.step:04d}", model, i, s.reward_mean or 0, Purpose.TRAIN).model_copy(
            update={"run": "demo", "weight_version": s.weight_version}
        )
        for s in steps
        for task in tasks
        for i in range(8)
    ]
    sampler.calls = []
    return made


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(open_home(tmp_path / "home", min_free_mb=1))
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def sample_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A run of 4 tasks a family and 2 apart; read only."""
    home = open_home(tmp_path_factory.mktemp("report") / "home", min_free_mb=1)
    opened = open_store(home)
    fill(opened, home, 4)
    yield opened
    opened.close()
