"""The reference trainer: plain torch over training samples, on CPU or one GPU. Serves RL.

It is the embedded default and the yardstick for other trainers: float32 master weights, compute in bfloat16,
gradients accumulated in float32 over packs of rows, one token mean over the whole batch. TRL's GRPO takes one row a
trajectory only; this takes any number.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rollout.errors import ConfigError
from rollout.types import TrainingSample
from training.checkpoint import export_model
from training.config import TrainerConfig
from training.loss import TokenSums, TokenTargets, policy_loss, score_tokens
from training.packing import PackedRows, micro_batches, pack_rows
from training.trainer.base import StepStats
from training.trainer.master import MasterAdamW

STATE_FILE = "trainer.pt"
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def load_full(path: Path) -> Any:
    """A causal language model in float32 with the attention that takes our masks."""
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )


@dataclass
class _Totals:
    """Weighted sums over the tokens of one batch."""

    weight: float = 0.0
    loss: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    mismatch: float = 0.0
    computed: int = 0
    grad_norm: float = 0.0
    lr: float = 0.0

    def add(self, sums: TokenSums, computed: int) -> None:
        self.loss += sums.loss.item()
        self.clipped += sums.clipped
        self.kl += sums.kl
        self.entropy += sums.entropy
        self.mismatch += sums.mismatch
        self.computed += computed

    def metrics(self, updates: int) -> dict[str, float]:
        means = {name: getattr(self, name) / self.weight for name in ("clipped", "kl", "entropy", "mismatch")}
        return {**means, "grad_norm": self.grad_norm / updates, "lr": self.lr / updates}


class ReferenceTrainer:
    """Trains the Hugging Face folder `path`; `path` must stay in place while the trainer lives."""

    def __init__(self, path: Path, config: TrainerConfig, *, temperature: float = 1.0) -> None:
        """`temperature` is the sampling's, at which the engine's log-probabilities are."""
        self.config = config
        self.temperature = temperature
        self.version = 0
        self._path = path
        self._model = load_full(path).eval()
        self._optimizer = MasterAdamW(self._model, config.optimizer, DTYPES[config.compute])
        self._updates = 0
        self._reference: Any = None
        if config.loss.kl > 0:
            self._reference = load_full(path).eval().to(DTYPES[config.compute])

    # -- training

    def step(self, samples: Sequence[TrainingSample]) -> StepStats:
        """Updates the policy on one batch, `optimizer_steps` times. Raises ValueError for an empty one."""
        if not samples:
            raise ValueError("a batch without samples cannot be trained")
        began = time.monotonic()
        parts = cut_batch(samples, self.config.optimizer_steps)
        old = [self.logprobs(part) if len(parts) > 1 else None for part in parts]
        totals = _Totals()
        for part, before in zip(parts, old, strict=True):
            self._update(part, before, totals)
        self.version += 1
        return StepStats(
            version=self.version,
            loss=totals.loss / totals.weight,
            tokens=sum(sum(s.mask) for s in samples),
            computed=totals.computed,
            seconds=time.monotonic() - began,
            metrics=totals.metrics(updates=len(parts)),
        )

    def _update(self, samples: Sequence[TrainingSample], old: list[list[float]] | None, totals: _Totals) -> None:
        """One optimizer step, whose weighted sums are added to `totals`."""
        weight = sum(w for s in samples for w, trained in zip(s.weight, s.mask, strict=True) if trained)
        totals.weight += weight
        for pack in self._packs(samples):
            rows = [samples[i] for i in pack]
            packed = pack_rows(rows)
            targets = self._targets(rows, packed, [old[i] for i in pack] if old is not None else None)
            scores = score_tokens(
                self._model, packed, temperature=self.temperature, entropy=self.config.loss.entropy > 0
            )
            sums = policy_loss(scores, targets, self.config.loss)
            (sums.loss / weight).backward()  # type: ignore[no-untyped-call]
            self._optimizer.collect()
            totals.add(sums, packed.input_ids.numel())
        norm = torch.nn.utils.clip_grad_norm_(self._optimizer.masters, self.config.optimizer.clip)
        totals.grad_norm += float(norm)
        totals.lr += self._set_rate()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._updates += 1

    def _targets(
        self, rows: Sequence[TrainingSample], packed: PackedRows, old: list[list[float]] | None
    ) -> TokenTargets:
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference = score_tokens(self._reference, packed, temperature=self.temperature).logprobs
        return TokenTargets(
            recorded=_of_trained(rows, [s.logprobs for s in rows]),
            advantage=_of_trained(rows, [[s.advantage] * len(s.mask) for s in rows]),
            weight=_of_trained(rows, [s.weight for s in rows]),
            old=torch.tensor([p for row in old for p in row]) if old is not None else None,
            reference=reference,
        )

    def _set_rate(self) -> float:
        config = self.config.optimizer
        lr = config.lr * min(1.0, (self._updates + 1) / (config.warmup_steps + 1))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _packs(self, samples: Sequence[TrainingSample]) -> list[list[int]]:
        return micro_batches(samples, self.config.pack_tokens, share=self.config.share_prefix)

    @torch.no_grad()
    def logprobs(self, samples: Sequence[TrainingSample]) -> list[list[float]]:
        """Log-probability of each trained token of each sample under the current weights."""
        out: list[list[float]] = [[] for _ in samples]
        for pack in self._packs(samples):
            packed = pack_rows([samples[i] for i in pack])
            found = score_tokens(self._model, packed, temperature=self.temperature).logprobs.tolist()
            for i in pack:
                count = sum(samples[i].mask)
                out[i], found = found[:count], found[count:]
        return out

    # -- state

    def save(self, folder: Path) -> None:
        """Writes optimizer, master weights, random state and version to `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "version": self.version,
            "updates": self._updates,
            "optimizer": self._optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }
        torch.save(state, folder / STATE_FILE)

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote. Raises ConfigError when the file is missing or of another model."""
        file = folder / STATE_FILE
        if not file.exists():
            raise ConfigError(f"{file} is missing: {folder} is no saved trainer; remove the folder to start anew")
        state = torch.load(file, weights_only=True)
        try:
            self._optimizer.load_state_dict(state["optimizer"])
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"{file} was saved from another model than {self._path}: {error}") from error
        torch.set_rng_state(state["random"])
        self.version, self._updates = int(state["version"]), int(state["updates"])

    def export(self, folder: Path) -> None:
        """Writes a Hugging Face folder of the weights in the compute type, as an engine serves them."""
        export_model(self._model, folder, companions=self._path)


def cut_batch(samples: Sequence[TrainingSample], parts: int) -> list[list[TrainingSample]]:
    """At most `parts` pieces of about equal numbers of trajectories, never cutting inside a trajectory."""
    ids = list(dict.fromkeys(s.rollout_id for s in samples))
    place = {rid: at * parts // len(ids) for at, rid in enumerate(ids)}
    pieces = [[s for s in samples if place[s.rollout_id] == part] for part in range(parts)]
    return [piece for piece in pieces if piece]


def _of_trained(rows: Sequence[TrainingSample], values: Sequence[Sequence[float]]) -> torch.Tensor:
    """The values at trained positions, rows in order."""
    return torch.tensor(
        [v for row, of_row in zip(rows, values, strict=True) for v, on in zip(of_row, row.mask, strict=True) if on]
    )
