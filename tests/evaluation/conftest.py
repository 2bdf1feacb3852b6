"""A small store with typed records as the stages write them, made without running anything: what reports read."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollout.config import Home, open_home
from rollout.errors import FailureClass
from rollout.store import Store, open_store
from rollout.types import (
    Failure,
    HistoryMode,
    ModelCall,
    ModelRef,
    Provenance,
    Purpose,
    ResultRecord,
    Rollout,
    RolloutState,
    Sampling,
    Split,
    StageRecord,
    StepRecord,
    TaskSpec,
    Verdict,
    VersionSpan,
)

FAMILIES = ("address-changed", "meeting-moved", "note-as-asked", "ticket-merged")
APART = "invoice-replaced"
SYSTEM = "You are an assistant with tools. Use them when needed, then answer in one sentence."
TOOLS = {
    "get_ticket": "Look a ticket up; shows the id that is in force now.",
    "close_ticket": "Close a ticket.",
    "get_contact": "Look a person up; shows the address that is in force now.",
    "send_mail": "Send a mail.",
    "get_event": "Look a meeting up; shows its time now.",
    "book_room": "Book a room at a time.",
    "add_note": "Add a note to a ticket.",
    "get_invoice": "Look an invoice up; shows the one that replaced it.",
    "pay_invoice": "Pay an invoice.",
}
STORIES = {
    "ticket-merged": (
        "Close ticket {a} and tell me when it is done.",
        "get_ticket",
        "close_ticket",
        "Ticket {b} is closed.",
    ),
    "address-changed": (
        "Mail person {a} that the order has shipped.",
        "get_contact",
        "send_mail",
        "The mail to {b} is sent.",
    ),
    "meeting-moved": ("Book a room for meeting {a}.", "get_event", "book_room", "The room is booked for {b}."),
    "note-as-asked": (
        "Add the note 'call back' to ticket {a}.",
        "get_ticket",
        "add_note",
        "The note is on ticket {a}.",
    ),
    APART: ("Pay invoice {a}.", "get_invoice", "pay_invoice", "Invoice {b} is paid."),
}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]


@dataclass(frozen=True)
class Scene:
    """One answer of the model: plain text, or a tool call and its result."""

    text: str = ""
    tool: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    result: str = ""

    def raw(self) -> str:
        if not self.tool:
            return f"{self.text}<|im_end|>"
        body = json.dumps({"name": self.tool, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call><|im_end|>"

    def answer(self) -> dict[str, Any]:
        if not self.tool:
            return {"role": "assistant", "content": self.text}
        function = {"name": self.tool, "arguments": json.dumps(self.arguments)}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        }


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE with Qwen3's control tokens, learnt from a few lines."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s"), "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    lines = [
        story[0] + story[3] + json.dumps({"name": name, "arguments": {"id": 1}})
        for story in STORIES.values()
        for name in TOOLS
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(lines, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", additional_special_tokens=SPECIAL)
    fast.save_pretrained(folder)
    return fast


class Sampler:
    """Builds rollouts and their calls. Its randomness comes from one seed."""

    def __init__(self, store: Store, tokenizer: PreTrainedTokenizerFast, seed: int = 7) -> None:
        self.store = store
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)
        self.calls: list[ModelCall] = []

    def task(self, family: str, number: int) -> TaskSpec:
        return TaskSpec(
            id=f"{family}-{number:03d}",
            split=Split.HELDOUT,
            instruction=STORIES[family][0].format(a=4100 + number),
            bundle=f"/tasks/{family}-{number:03d}",
            digest="0" * 64,
            provenance=Provenance(author="procedural", family=family),
        )

    def rollout(self, task: TaskSpec, run: str, model: ModelRef, trial: int, skill: float, purpose: Purpose) -> Rollout:
        """A finished rollout: `skill` is its chance to pass. About 1 % end without a verdict."""
        passed = self.rng.random() < skill
        scenes = self._scenes(task, model, passed)
        dropped = purpose is Purpose.EVAL and self.rng.random() < 0.008
        started = 1_764_500_000.0 + trial * 3
        rollout = Rollout(
            id=f"{run}-{task.id}-{trial}",
            run=run,
            task_id=task.id,
            group_id=f"{run}-{task.id}",
            start_index=trial,
            model=model,
            purpose=purpose,
            task=task,
            state=RolloutState.TIMED_OUT if dropped else RolloutState.SUCCEEDED,
            failure=Failure(kind=FailureClass.TIMEOUT, phase="agent", message="still running after 90 s")
            if dropped
            else None,
            verdict=None if dropped else self._verdict(passed),
            created=started,
            started=started,
            ended=started + 1.2 * len(scenes) + self.rng.random(),
            end_reason="token_cap" if model.name == "smollm2" and not passed and trial == 1 else "",
        )
        self.calls += self._calls(rollout, scenes)
        return rollout

    def save(self, rollouts: Sequence[Rollout]) -> None:
        self.store.rollouts.enqueue(rollouts)

        async def append() -> None:
            await asyncio.gather(*(self.store.calls.append(c) for c in self.calls))

        asyncio.run(append())
        for call in self.calls:
            self.store.rollouts.note_call(call.rollout_id, len(call.completion_ids), 0)
        self.calls = []
        self.store.rollouts.cancel(ids=["nothing"])  # waits for the queued notes

    def _verdict(self, passed: bool) -> Verdict:
        says = "the state is as asked" if passed else "the action went to an id that is not in force any more"
        return Verdict(
            reward=float(passed),
            passed=passed,
            explanation=says,
            criteria={"end state": float(passed), "final text": 1.0},
        )

    def _scenes(self, task: TaskSpec, model: ModelRef, passed: bool) -> list[Scene]:
        _, look, act, final = STORIES[task.provenance.family]
        a = 4100 + int(task.id[-3:])
        b = a + 37
        if model.name == "smollm2" and not passed:
            return [
                Scene(
                    text="I'm happy to help! Here's a simple way to do that. First, open your account and look for the naïve settings page 🙂"
                )
            ]
        needless = task.provenance.family == "note-as-asked"
        target = a if needless == passed else b
        scenes = [
            Scene(tool=act, arguments={"id": target}, result='{"ok": true}'),
            Scene(text=final.format(a=a, b=target)),
        ]
        if passed != needless:
            scenes.insert(
                0, Scene(tool=look, arguments={"id": a}, result=json.dumps({"id": a, "now": b, "state": "merged"}))
            )
        return scenes

    def _calls(self, rollout: Rollout, scenes: list[Scene]) -> list[ModelCall]:
        history: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": rollout.task.instruction},
        ]
        specs = tuple({"type": "function", "function": {"name": n, "description": d}} for n, d in TOOLS.items())
        out = []
        for index, scene in enumerate(scenes):
            scripted = rollout.model.name.startswith("scripted")
            ids = () if scripted else tuple(self.tokenizer.encode(scene.raw(), add_special_tokens=False))
            out.append(
                ModelCall(
                    rollout_id=rollout.id,
                    index=index,
                    messages=(*history, scene.answer()),
                    tools=specs,
                    prompt_ids=(1, 2, 3),
                    completion_ids=ids,
                    logprobs=None if scripted else tuple(self._logprob(rollout) for _ in ids),
                    finish_reason="tool_calls" if scene.tool else "stop",
                    versions=(VersionSpan(version=0, tokens=len(ids)),) if ids else (),
                    delivered=True,
                    latency=0.4 + self.rng.random(),
                )
            )
            history.append(scene.answer())
            if scene.tool:
                history.append({"role": "tool", "tool_call_id": "c", "content": scene.result})
        return out

    def _logprob(self, rollout: Rollout) -> float:
        wild = 0.9 if rollout.model.name == "smollm2" else 0.12
        return -abs(self.rng.gauss(0, 1.2)) if self.rng.random() < wild else -abs(self.rng.gauss(0, 0.02))


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
    oracle = ModelRef(name="scripted:oracle")
    taught = [sampler.rollout(t, "demo-distill", oracle, i, 0.6, Purpose.TEACHER) for t in tasks[:20] for i in range(2)]
    sampler.save(taught)
    for stage in stage_records():
        store.records.put(stage, run="demo", key=stage.stage)
    for step in step_records():
        store.records.put(step, run="demo", key=f"{step.kind}-{step.step:05d}")


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
    rl = []
    checks = []
    for i in range(1, 11):
        reward = min(0.98, 0.6 + 0.036 * i + rng.gauss(0, 0.05))
        malformed = {"malformed": abs(rng.gauss(0.012, 0.01)), "mixed": float(max(1, 7 - i // 2))}
        rl.append(
            StepRecord(
                run="demo", kind="rl", step=i, weight_version=i, started=64, finished=64, group_sizes=(8,) * 8,
                mixed_groups=max(1, 7 - i // 2), samples=160, tokens=4870, reward_mean=reward, metrics=malformed, seconds=21.0,
            )
        )  # fmt: skip
        if i % 2 == 0:
            p = min(0.95, 0.63 + 0.03 * i)
            bounds = {"pass_at_1": p, "ci_low": p - 0.07, "ci_high": min(1.0, p + 0.06)}
            checks.append(StepRecord(run="demo", kind="validation", step=i, metrics=bounds))
    return [*sft, *rl, *checks]


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
