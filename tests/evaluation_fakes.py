"""Rollouts and calls of invented trials, as lifecycle and proxy leave them in the store; nothing is run."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollout.errors import FailureClass
from rollout.store import Store
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
BABBLE = "I'm happy to help! Here is a simple way to do that. First, open the naïve settings page 🙂 and then"
EVIL = "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\"><!--\u2028{{7*7}}"
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

        with ThreadPoolExecutor(1) as thread:  # a browser test's own thread has a running loop
            thread.submit(lambda: asyncio.run(append())).result(timeout=60)
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
            return [Scene(text=BABBLE)]
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
            ids = tuple(self.tokenizer.encode(scene.raw(), add_special_tokens=False))
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


def put_result(
    store: Store,
    label: str,
    trials: dict[str, list[float]],
    *,
    run: str = "demo",
    families: dict[str, str] | None = None,
    rollouts: dict[str, list[str]] | None = None,
) -> None:
    record = ResultRecord(
        run=run,
        label=label,
        model=ModelRef(name="smollm2"),
        harness="react",
        history=HistoryMode.TEMPLATE,
        sampling=Sampling(),
        trials=trials,
        families=families or dict.fromkeys(trials, "f"),
        rollouts=rollouts or {},
    )
    store.records.put(record, run=run, key=label)


def hostile_run(store: Store) -> None:
    """A run in which everything that a model, a task author or an error may write is hostile."""
    sampler = Sampler(store, save_tokenizer(store.home.models / "smollm2"))
    plain = sampler.task("ticket-merged", 1)
    made = sampler.rollout(plain, "demo-eval-rl", ModelRef(name="smollm2"), 0, 1.0, Purpose.EVAL)
    provenance = plain.provenance.model_copy(update={"family": EVIL})
    task = plain.model_copy(update={"instruction": EVIL, "provenance": provenance})
    verdict = Verdict(reward=1.0, passed=True, explanation=EVIL, criteria={EVIL: 1.0})
    sampler.calls = [
        c.model_copy(update={"messages": tuple({**m, "content": EVIL} for m in c.messages), "fork_reason": EVIL})
        for c in sampler.calls
    ]
    rollout = made.model_copy(
        update={"task": task, "verdict": verdict, "state": RolloutState.SUCCEEDED, "end_reason": EVIL, "failure": None}
    )
    sampler.save([rollout])
    put_result(store, "rl", {task.id: [1.0]}, families={task.id: EVIL}, rollouts={task.id: [rollout.id]})
    put_result(store, EVIL, {task.id: [1.0]}, families={task.id: EVIL})
    record = StageRecord(run="demo", stage="refine", kept=1, dropped={EVIL: 2})
    store.records.put(record, run="demo", key="refine")
