"""The model under the batcher: any causal language model of transformers, its linear layers packed for this CPU.

bf16 where the processor has bf16 units, else f32. oneDNN reorders a plain bf16 weight on every call; packed once, a
step of 8 rows takes about three quarters of the time, and the output layer half.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from rollout.errors import ConfigError
from training.engine.attention import Batch, SlotCache

_names = itertools.count()
"""Attention interfaces are registered process-wide by name; each model needs its own."""


def serving_dtype() -> torch.dtype:
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


class PackedLinear(nn.Module):
    """A bf16 `nn.Linear` with its weight in oneDNN's blocked layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.data, None)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


class SlotModel:
    """Weights + slot cache. Not thread-safe: belongs to whoever steps the batcher."""

    def __init__(self, path: str | Path, cache: SlotCache, dtype: torch.dtype | None = None) -> None:
        self.cache = cache
        self._attention = f"openforge_slots_{next(_names)}"
        AttentionInterface.register(self._attention, cache.attend)
        self.dtype = dtype or serving_dtype()
        self._model, self._shapes = self._load(path)
        config = AutoConfig.from_pretrained(str(path), local_files_only=True).get_text_config()
        self.vocabulary = int(config.vocab_size)
        self.eos = eos_ids(path, config)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [len(batch.heads), V] of the tokens that `batch.heads` names."""
        self.cache.begin(batch)
        out = self._model(
            input_ids=batch.ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.heads,
        )
        logits: torch.Tensor = out.logits[0]
        return logits

    def load(self, path: str | Path) -> None:
        """Serves the weights of folder `path`. Raises ConfigError, keeping the present ones, if they do not fit."""
        model, shapes = self._load(path)
        if shapes != self._shapes:
            odd = sorted(n for n in shapes.keys() | self._shapes.keys() if shapes.get(n) != self._shapes.get(n))
            raise ConfigError(f"weights in {path} have another shape than the served ones: {', '.join(odd[:5])}")
        self._model = model

    def _load(self, path: str | Path) -> tuple[nn.Module, dict[str, torch.Size]]:
        transformers_logging.disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(
                str(path), dtype=self.dtype, attn_implementation=self._attention, local_files_only=True
            ).eval()
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ConfigError(f"{path} does not load as a causal language model: {error}") from error
        shapes = {name: p.shape for name, p in model.named_parameters()}
        if self.dtype == torch.bfloat16:
            pack(model)
        return model, shapes


def pack(model: nn.Module) -> None:
    """Replaces each plain linear layer by a packed one, freeing the plain weight unless it is tied."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))


def eos_ids(path: str | Path, config: object) -> frozenset[int]:
    """End ids of the model folder: generation_config.json first, config.json second."""
    found = getattr(config, "eos_token_id", None)
    if (Path(path) / "generation_config.json").exists():
        found = GenerationConfig.from_pretrained(str(path)).eos_token_id or found
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])


def context_limit(path: str | Path) -> int:
    """Longest context in tokens that full attention serves exactly: the model's own, or its sliding window."""
    config = AutoConfig.from_pretrained(str(path), local_files_only=True).get_text_config()
    limit = int(getattr(config, "max_position_embeddings", 0) or 8192)
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    return min(limit, int(window)) if window and (slides or not hasattr(config, "layer_types")) else limit
