"""The batcher against transformers itself: the same log-probabilities whatever shares the step, the slots or the cache.

Small random f32 models with sharp answers, so that one wrong key, mask or position shows; tolerance 2e-4 nats.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.errors import ConfigError
from training.engine.batcher import Batcher, Event, Request
from training.engine.model import context_limit
from training.models import ModelEntry

TOLERANCE = 2e-4


@functools.cache
def plain_model(folder: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def reference(folder: Path | str, ids: Sequence[int], prompt: int, dtype: torch.dtype = torch.float32) -> list[float]:
    """Log-probability of each id from `prompt` on, by one plain forward pass."""
    with torch.no_grad():
        logits = plain_model(str(folder), dtype)(torch.tensor([list(ids)])).logits[0].float()
    rows = torch.log_softmax(logits[prompt - 1 : -1], -1)
    return rows.gather(1, torch.tensor(ids[prompt:])[:, None])[:, 0].tolist()


def drain(batcher: Batcher, limit: int = 2000) -> dict[str, list[Event]]:
    got: dict[str, list[Event]] = {}
    for _ in range(limit):
        if batcher.idle:
            return got
        for event in batcher.step():
            got.setdefault(event.request, []).append(event)
    raise AssertionError(f"still busy after {limit} steps")


def check(folder: Path, prompt: Sequence[int], events: Sequence[Event]) -> None:
    wanted = reference(folder, [*prompt, *(e.token for e in events)], len(prompt))
    assert [e.logprob for e in events] == pytest.approx(wanted, abs=TOLERANCE)


def ids(n: int, seed: int) -> list[int]:
    return [random.Random(seed * 1000 + k).randrange(298) for k in range(n)]


def make(folder: Path, slots: int = 8, max_len: int = 512) -> Batcher:
    return Batcher(folder, slots=slots, max_len=max_len, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_rows_of_all_lengths_match_a_plain_forward(sharp_models: dict[str, Path], kind: str) -> None:
    """Different prompts, one longer than a step's budget, arriving while others decode, more than there are slots."""
    batcher = make(sharp_models[kind], slots=4)
    prompts = {str(k): ids(n, k) for k, n in enumerate([1, 2, 50, 7, 400, 33, 150])}
    got: dict[str, list[Event]] = {}
    for name, prompt in prompts.items():
        batcher.submit(Request(name, tuple(prompt), 12, seed=int(name)))
        for event in batcher.step():
            got.setdefault(event.request, []).append(event)
    assert batcher.queued > 0
    for name, events in drain(batcher).items():
        got.setdefault(name, []).extend(events)
    assert {name: len(events) for name, events in got.items()} == dict.fromkeys(prompts, 12)
    for name, events in got.items():
        check(sharp_models[kind], prompts[name], events)


def test_shared_beginnings_are_read_once_and_change_nothing(sharp_models: dict[str, Path]) -> None:
    """Two tasks of a common system turn, four rollouts each, all at once: the wave of an RL step."""
    batcher = make(sharp_models["qwen3"])
    system, tasks = ids(200, 1), [ids(60, 2), ids(90, 3)]
    prompts = {f"{t}-{k}": system + tasks[t] + ids(k, 10 + k) for t in range(2) for k in range(1, 5)}
    for name, prompt in prompts.items():
        batcher.submit(Request(name, tuple(prompt), 20, seed=7))
    got = drain(batcher)
    for name, events in got.items():
        check(sharp_models["qwen3"], prompts[name], events)
    counters = batcher.counters
    read = counters.prompt_tokens - counters.reused_tokens
    assert read < 200 + 60 + 90 + 100, "each common beginning is read once"


def test_next_call_of_a_rollout_reads_only_what_is_new(sharp_models: dict[str, Path]) -> None:
    batcher = make(sharp_models["qwen3"], slots=3)
    prompts = {str(k): ids(100, k) for k in range(3)}
    for turn in range(3):
        before = batcher.counters.prompt_tokens - batcher.counters.reused_tokens
        for name, prompt in prompts.items():
            batcher.submit(Request(name, tuple(prompt), 10, seed=turn))
        for name, events in drain(batcher).items():
            check(sharp_models["qwen3"], prompts[name], events)
            prompts[name] += [*(e.token for e in events), *ids(15, turn)]
        read = batcher.counters.prompt_tokens - batcher.counters.reused_tokens - before
        assert read == (300 if turn == 0 else 3 * 16), "the last sampled id and the 15 new ones"


def test_a_seed_gives_the_same_answer_in_any_company(sharp_models: dict[str, Path]) -> None:
    batcher = make(sharp_models["qwen3"])
    wanted = Request("x", tuple(ids(40, 1)), 15, temperature=0.9, top_p=0.95, seed=11)
    batcher.submit(wanted)
    alone = [e.token for e in drain(batcher)["x"]]
    for k in range(5):
        batcher.submit(Request(f"other-{k}", tuple(ids(40 + k, 1 + k)), 20, seed=k))
    batcher.submit(wanted)
    batcher.submit(Request("y", wanted.prompt, 15, temperature=0.9, top_p=0.95, seed=12))
    together = drain(batcher)
    assert [e.token for e in together["x"]] == alone
    assert [e.token for e in together["y"]] != alone


def test_an_update_under_load_serves_the_new_weights_for_every_token_after_it(sharp_models: dict[str, Path]) -> None:
    """design.md: after an update under load the log-probabilities of an old prefix equal a fresh engine's."""
    old, new = sharp_models["qwen3"], sharp_models["qwen3-next"]
    batcher = make(old)
    prompts = {str(k): ids(80, 1) + ids(20, k) for k in range(6)}
    for name, prompt in prompts.items():
        batcher.submit(Request(name, tuple(prompt), 30, seed=int(name)))
    got: dict[str, list[Event]] = {name: [] for name in prompts}
    for _ in range(14):
        for event in batcher.step():
            got[event.request].append(event)
    batcher.update(new, 5)
    for name, events in drain(batcher).items():
        got[name].extend(events)
    for name, events in got.items():
        cut = sum(e.version == 0 for e in events)
        assert 0 < cut < 30 == len(events)
        assert [e.version for e in events] == [0] * cut + [5] * (30 - cut)
        whole = [*prompts[name], *(e.token for e in events)]
        assert [e.logprob for e in events[:cut]] == pytest.approx(
            reference(old, whole[: 100 + cut], 100), abs=TOLERANCE
        )
        assert [e.logprob for e in events[cut:]] == pytest.approx(reference(new, whole, 100 + cut), abs=TOLERANCE)
    again = Request("again", tuple(prompts["3"]), 10, seed=3)
    fresh = make(new)
    for engine in (batcher, fresh):
        engine.submit(again)
    mine, theirs = drain(batcher)["again"], drain(fresh)["again"]
    assert [e.token for e in mine] == [e.token for e in theirs]
    assert [e.logprob for e in mine] == pytest.approx([e.logprob for e in theirs], abs=TOLERANCE)


def test_weights_that_do_not_fit_change_nothing(sharp_models: dict[str, Path], tmp_path: Path) -> None:
    batcher = make(sharp_models["qwen3"])
    prompt = ids(30, 1)
    batcher.submit(Request("a", tuple(prompt), 10, seed=1))
    first = batcher.step()
    with pytest.raises(ConfigError, match="other names or shapes"):
        batcher.update(sharp_models["llama"], 1)
    with pytest.raises(ConfigError, match="other names or shapes"):
        batcher.update(tmp_path, 1)
    half = (sharp_models["qwen3-next"] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(half[: len(half) // 2])
    with pytest.raises(ConfigError, match="not a complete safetensors"):
        batcher.update(tmp_path, 1)
    assert batcher.version == 0
    events = [*first, *drain(batcher)["a"]]
    assert len(events) == 10
    check(sharp_models["qwen3"], prompt, events)


def test_cancelling_frees_the_slot_and_the_queue_moves_on(sharp_models: dict[str, Path]) -> None:
    batcher = make(sharp_models["qwen3"], slots=1)
    for name in ("running", "queued", "last"):
        batcher.submit(Request(name, tuple(ids(20, len(name))), 60, seed=1))
    batcher.step()
    assert (batcher.running, batcher.queued) == (1, 2)
    batcher.cancel("queued")
    batcher.cancel("running")
    batcher.cancel("nobody")
    assert (batcher.running, batcher.queued, batcher.counters.cancelled) == (0, 1, 2)
    assert set(drain(batcher)) == {"last"}


def test_a_prompt_that_was_cancelled_half_read_is_not_taken_for_cached(sharp_models: dict[str, Path]) -> None:
    batcher = make(sharp_models["qwen3"])
    prompt = ids(450, 1)
    batcher.submit(Request("decodes", (1, 2), 60, seed=1))
    batcher.step()
    batcher.submit(Request("half", tuple(prompt), 5, seed=1))
    batcher.step()
    batcher.cancel("half")
    batcher.submit(Request("whole", tuple(prompt), 5, seed=1))
    check(sharp_models["qwen3"], prompt, drain(batcher)["whole"])


def test_an_answer_ends_by_stop_id_by_length_or_by_the_context(sharp_models: dict[str, Path]) -> None:
    batcher = make(sharp_models["qwen3"], max_len=64)
    prompt = tuple(ids(40, 1))
    batcher.submit(Request("free", prompt, 10, seed=1))
    free = [e.token for e in drain(batcher)["free"]]
    batcher.submit(Request("stopped", prompt, 10, seed=1, stop_ids=frozenset({free[4]})))
    batcher.submit(Request("full", prompt, 500, seed=1))
    got = drain(batcher)
    stopped = got["stopped"]
    assert [e.token for e in stopped] == free[: free.index(free[4]) + 1]
    assert [e.finish for e in stopped] == [""] * (len(stopped) - 1) + ["stop"]
    assert len(got["full"]) == 64 - 40
    assert got["full"][-1].finish == "length"
    with pytest.raises(ConfigError, match=r"64 tokens.*--max-len"):
        batcher.submit(Request("long", tuple(ids(64, 1)), 1))
    with pytest.raises(ConfigError, match=r"0\.\.299"):
        batcher.submit(Request("odd", (5, 300), 1))


def test_a_random_mix_of_calls_updates_and_cancellations_stays_exact(sharp_models: dict[str, Path]) -> None:
    """Two hundred steps of everything at once over few slots; every answer is checked against plain forwards."""
    rng = random.Random(5)
    folders = [sharp_models["qwen3"], sharp_models["qwen3-next"]]
    batcher, version = make(folders[0], slots=5, max_len=300), 0
    systems = [ids(70, 1), ids(70, 1)[:50] + ids(40, 2)]
    prompts: dict[str, list[int]] = {}
    got: dict[str, list[Event]] = {}
    for step in range(200):
        if rng.random() < 0.15:
            name = f"r{len(prompts)}"
            base = rng.choice(systems) + ids(rng.randrange(1, 90), step)
            if got and rng.random() < 0.5:
                known = rng.choice(sorted(got))
                base = prompts[known] + [e.token for e in got[known]] + ids(5, step)
            prompts[name] = base[:280]
            batcher.submit(Request(name, tuple(prompts[name]), rng.randrange(1, 25), seed=step))
        if rng.random() < 0.02 and got:
            batcher.cancel(rng.choice(sorted(got)))
        if rng.random() < 0.03:
            version += 1
            batcher.update(folders[version % 2], version)
        for event in batcher.step():
            got.setdefault(event.request, []).append(event)
    for name, events in drain(batcher).items():
        got.setdefault(name, []).extend(events)
    assert version >= 2
    assert len(got) >= 15
    for name, events in got.items():
        whole = [*prompts[name], *(e.token for e in events)]
        wanted = [reference(folder, whole, len(prompts[name])) for folder in folders]
        assert [e.logprob for e in events] == pytest.approx(
            [wanted[e.version % 2][k] for k, e in enumerate(events)], abs=TOLERANCE
        )


def test_a_sliding_window_bounds_the_context(tmp_path: Path) -> None:
    from transformers import Qwen3Config

    Qwen3Config(max_position_embeddings=512).save_pretrained(tmp_path / "full")
    Qwen3Config(
        max_position_embeddings=512, use_sliding_window=True, sliding_window=128, max_window_layers=0
    ).save_pretrained(tmp_path / "slides")
    assert context_limit(tmp_path / "full") == 512
    assert context_limit(tmp_path / "slides") == 128


def test_bf16_keeps_the_recorded_logprobs_within_its_tolerance(tiny_model: ModelEntry) -> None:
    """The stated bf16 tolerance: mean 0.02, largest 0.2 nats against a bf16 forward pass of transformers."""
    batcher = Batcher(tiny_model.path, slots=4, max_len=256)
    prompts = {str(k): [random.Random(k).randrange(49000) for _ in range(60)] for k in range(4)}
    for name, prompt in prompts.items():
        batcher.submit(Request(name, tuple(prompt), 20, seed=1))
    off = []
    for name, events in drain(batcher).items():
        wanted = reference(tiny_model.path, [*prompts[name], *(e.token for e in events)], 60, batcher.model.dtype)
        off += [abs(e.logprob - w) for e, w in zip(events, wanted, strict=True)]
    assert sum(off) / len(off) < 0.02
    assert max(off) < 0.2


def test_packed_bf16_weights_are_replaced_too(sharp_models: dict[str, Path]) -> None:
    """Tied embeddings and packed layers: after an update the engine gives exactly what a fresh one gives."""
    asked = Request("a", tuple(ids(30, 1)), 12, seed=1)
    updated = Batcher(sharp_models["qwen3"], slots=2, max_len=64)
    updated.update(sharp_models["qwen3-next"], 1)
    fresh = Batcher(sharp_models["qwen3-next"], slots=2, max_len=64)
    for batcher in (updated, fresh):
        batcher.submit(asked)
    mine, theirs = drain(updated)["a"], drain(fresh)["a"]
    assert [(e.token, e.logprob) for e in mine] == [(e.token, e.logprob) for e in theirs]


@pytest.mark.model
def test_the_real_model_agrees_with_transformers_in_bf16(smollm2_model: ModelEntry) -> None:
    """facts: sampler against trainer, both bf16: mean .001-.004 nats a token, largest .44-.56."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_model.path)
    batcher = Batcher(smollm2_model.path, slots=4, max_len=512)
    questions = ["What is the capital of France?", "Name a colour.", "Count to ten.", "Who wrote Hamlet?"]
    system = "You are a helpful assistant that answers in one short sentence. " * 4
    prompts = {}
    for question in questions:
        talk = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
        prompts[question] = tokenizer.encode(text, add_special_tokens=False)
        batcher.submit(Request(question, tuple(prompts[question]), 24, temperature=0.0, stop_ids=batcher.model.eos))
    off = []
    answers = drain(batcher)
    for question, events in answers.items():
        ids_ = [*prompts[question], *(e.token for e in events)]
        wanted = reference(smollm2_model.path, ids_, len(prompts[question]), batcher.model.dtype)
        off += [abs(e.logprob - w) for e, w in zip(events, wanted, strict=True)]
    assert sum(off) / len(off) < 0.04
    assert max(off) < 0.6
    assert "Paris" in tokenizer.decode([e.token for e in answers[questions[0]]])
