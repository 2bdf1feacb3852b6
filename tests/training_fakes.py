"""For tests of training: a tiny random policy as a model folder, and a client whose rollouts a function plays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rollout.errors import PhaseTimeout
from rollout.store import Store
from rollout.types import ModelCall, Rollout, RolloutState, Trajectory
from training.models import write_entry

torch.set_num_threads(1)  # a model this small is slower with more
EOT = 2
MARKS = "<tool_call> <tool_response> <|im_start|> <think>"


def save_policy(folder: Path, *, layers: int = 2, vocab: int = 64) -> Path:
    """A complete model folder of some ten thousand random parameters, sharp enough for gradients to matter."""
    torch.manual_seed(layers)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        eos_token_id=EOT,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0)
    model.save_pretrained(folder)
    words = {f"w{k}": k for k in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"w{EOT}", pad_token="w0")
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}" + "{# " + MARKS + " #}"
    fast.save_pretrained(folder)
    write_entry(folder, name="tiny", renderer="default", source="test")
    return folder


@dataclass(frozen=True)
class Played:
    """How a rollout ended, and what the proxy recorded of it."""

    rollout: Rollout
    calls: tuple[ModelCall, ...] = ()


Play = Callable[[Rollout], Played | None]
"""None: the rollout never ends."""


class PlayedClient:
    """Implements `RolloutSource`: what is submitted is played when it is waited for, each id once."""

    def __init__(self, store: Store, play: Play) -> None:
        self._store, self.play = store, play
        self._asked: dict[str, Rollout] = {}
        self._ended: dict[str, Played] = {}
        self.plays: Counter[str] = Counter()

    def submit(self, rollouts: Sequence[Rollout]) -> list[str]:
        self._store.rollouts.enqueue(rollouts)
        self._asked |= {r.id: r for r in rollouts}
        return [r.id for r in rollouts]

    def done(self, ids: Sequence[str]) -> set[str]:
        return {rid for rid in ids if rid in self._ended}

    def wait(
        self, ids: Sequence[str], deadline_s: float, progress: Callable[[int, int], None] | None = None
    ) -> list[Rollout]:
        for rid in ids:
            if rid not in self._ended:
                self.plays[rid] += 1
                played = self.play(self._asked[rid])
                if played is not None:
                    self._ended[rid] = played
            if progress:
                progress(len(self.done(ids)), len(ids))
        missing = [rid for rid in ids if rid not in self._ended]
        if missing:
            raise PhaseTimeout(f"missing: {', '.join(missing)}")
        return [self._ended[rid].rollout for rid in ids]

    def trajectories(self, rollouts: Sequence[Rollout]) -> list[Trajectory]:
        return [Trajectory(rollout=r, calls=self._ended[r.retry_of or r.id].calls) for r in rollouts]


def succeeded(rollout: Rollout, **changes: object) -> Rollout:
    return rollout.model_copy(update={"state": RolloutState.SUCCEEDED, **changes})
