"""The model under the batcher: any causal language model of transformers whose attention goes through its interface.

bf16 where the processor has bf16 units, else f32.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from rollout.errors import ConfigError
from training.engine.attention import Batch, SlotCache
from training.engine.weights import Weights

_names = itertools.count()
"""Attention interfaces are registered process-wide by name; each model needs its own."""


def serving_dtype() -> torch.dtype:
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


class SlotModel:
    """Weights + slot cache. Not thread-safe: belongs to whoever steps the batcher."""

    def __init__(self, path: str | Path, cache: SlotCache, dtype: torch.dtype | None = None) -> None:
        self.cache = cache
        attention = f"openforge_slots_{next(_names)}"
        AttentionInterface.register(attention, cache.attend)
        self.dtype = dtype or serving_dtype()
        self._model = read_model(path, self.dtype, attention)
        self._weights = Weights(self._model, pack=self.dtype == torch.bfloat16)
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
        self._weights.replace(Path(path))


def read_model(path: str | Path, dtype: torch.dtype, attention: str) -> nn.Module:
    transformers_logging.disable_progress_bar()
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=dtype, attn_implementation=attention, local_files_only=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise ConfigError(f"{path} does not load as a causal language model: {error}") from error
    return model.eval()


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
