"""What training reads is what happened: recorded prompts are the template's text, recorded logprobs the model's own.

Real rollouts of the ReAct harness in its sandbox, through a real `serve` and a real engine, read back from the store.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from rollout.bundle import BundleSpec, write_bundle
from rollout.client import Plan, RolloutClient, make_rollouts
from rollout.config import open_home
from rollout.inference.launch import EngineOptions, ensure_engine, stop_engine
from rollout.processes import find_serve
from rollout.store import Store, open_store
from rollout.types import Limits, ModelCall, ModelRef, Purpose, RolloutState, Sampling, TaskSpec
from training.models import ModelEntry

pytestmark = [pytest.mark.model, pytest.mark.sandbox, pytest.mark.timeout(300)]

TEMPERATURE = 0.8
MEAN_GAP = 0.02
MAX_GAP = 0.6
"""Nats between two bf16 passes of different batch and cache shapes; a token of low probability is the farthest off."""

SEED = {"contacts": {"people": [{"id": 47, "name": "Zoë", "replaced_by": 52}, {"id": 52, "name": "Zoë Müller"}]}}
PLAN = {
    "oracle": [
        {"tool": "get_contact", "arguments": {"id": 47}},
        {"tool": "pin_contact", "arguments": {"id": {"$result": 0, "path": "now"}}},
        {"final": "done – 完了"},
    ]
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(open_home(tmp_path / "home"))
    yield opened
    for engine in opened.engines.all():
        stop_engine(opened, engine.id)
    facts = find_serve(opened.home)
    if facts:
        os.kill(facts["pid"], signal.SIGTERM)
        end = time.monotonic() + 20
        while find_serve(opened.home) is not None:
            assert time.monotonic() < end
            time.sleep(0.05)
    opened.close()


@pytest.fixture(params=["tiny_model", "smollm2_model"])
def entry(request: pytest.FixtureRequest) -> ModelEntry:
    found: ModelEntry = request.getfixturevalue(request.param)
    return found


def a_task(store: Store) -> TaskSpec:
    spec = BundleSpec(
        id="pin",
        instruction="Merke Kontakt 47 vor (oder den, der ihn ersetzt). Sag done. 完了",
        test="mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
        services=SEED,
        plan=PLAN,
    )
    return write_bundle(spec, store.home.tasks / "t" / "pin")


def played(store: Store, model: str, n: int) -> list[ModelCall]:
    """All calls of `n` rollouts of the task by `model`, each of which ran to its verdict."""
    plan = Plan(
        run=f"run-{'oracle' if model.startswith('scripted') else 'model'}",
        purpose=Purpose.RUN,
        model=ModelRef(name=model),
        sampling=Sampling(temperature=TEMPERATURE, max_tokens=48),
        limits=Limits(calls=4, context=1024),
    )
    client = RolloutClient(store)
    client.ensure_serve()
    ended = client.wait(client.submit(make_rollouts([a_task(store)], plan, n)), 120)
    assert {r.state for r in ended} == {RolloutState.SUCCEEDED}, [r.failure for r in ended]
    return [call for trajectory in client.trajectories(ended) for call in trajectory.calls]


def test_records_are_the_templates_text_and_the_models_logprobs(store: Store, entry: ModelEntry) -> None:
    ensure_engine(store, entry.path, entry.path, options=EngineOptions(slots=4, max_len=1024))
    sampled = played(store, entry.path, 4)
    scripted = played(store, f"scripted:oracle?student={entry.path}", 1)
    assert len(scripted) == 3, "a history with two tool calls and their results"
    assert len(sampled) >= 4
    check_text(entry, [*sampled, *scripted])
    gaps = logprob_gaps(entry, sampled)
    assert len(gaps) == sum(len(c.completion_ids) for c in sampled) >= 4
    print(f"{len(gaps)} tokens of {entry.name}: mean {fmean(gaps):.4f}, max {max(gaps):.4f} nats")
    assert fmean(gaps) < MEAN_GAP
    assert max(gaps) < MAX_GAP


def check_text(entry: ModelEntry, calls: list[ModelCall]) -> None:
    """Each prompt reads as what the folder's own chat template writes for the recorded messages and tools."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(entry.path)
    for call in calls:
        assert call.tools
        text = tokenizer.apply_chat_template(
            list(call.messages[:-1]), tools=list(call.tools), add_generation_prompt=True, tokenize=False
        )
        assert tokenizer.decode(call.prompt_ids, clean_up_tokenization_spaces=False) == text
        assert call.completion_ids


def logprob_gaps(entry: ModelEntry, calls: list[ModelCall]) -> list[float]:
    """|recorded - own| in nats of each sampled token; own: one plain forward pass in the engine's arithmetic."""
    import torch
    from transformers import AutoModelForCausalLM

    from training.engine.model import serving_dtype

    model: Any = AutoModelForCausalLM.from_pretrained(entry.path, dtype=serving_dtype())
    gaps: list[float] = []
    for call in calls:
        assert call.logprobs is not None
        assert len(call.logprobs) == len(call.completion_ids)
        ids = torch.tensor([[*call.prompt_ids, *call.completion_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(call.prompt_ids) - 1 : -1].float() / TEMPERATURE
        own = logits.log_softmax(-1).gather(1, torch.tensor(call.completion_ids)[:, None])[:, 0]
        gaps += (own - torch.tensor(call.logprobs)).abs().tolist()
    return gaps
