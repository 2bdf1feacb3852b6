"""Keys and values of all slots, and the attention that reads them: the only part of a model that is replaced.

A step feeds one flat row of tokens that belong to many slots. Everything but attention is indifferent to that, so
the model's own code runs unchanged; its attention interface (transformers' `AttentionInterface`) is `SlotCache.attend`,
which writes the step's keys and values into the slots and attends each token to its own slot.

Decoding rows are attended by neighbourhood (`Run`: slots that lie side by side become one call on a slice) and what
many rows share at their beginning (`Shared`: system turn, tools, a group's prompt) is read once for all of them; the
two parts are joined by their log-sum-exp, which is exact. Query heads that share a key head are folded into one block.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from rollout.errors import ConfigError

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class Run:
    """Decoding tokens `first..last` of the step, in slots `low..high`, over positions `start..stop`."""

    first: int
    last: int
    low: int
    high: int
    start: int
    stop: int
    mask: torch.Tensor
    """[high - low, 1, 1, stop - start], additive."""
    offsets: torch.Tensor | None
    """Slot - low of each token; None when the tokens fill the slots without a gap."""


@dataclass(frozen=True)
class Shared:
    """Decoding tokens `tokens` whose slots begin with the same `length` ids as slot `leader`."""

    tokens: torch.Tensor
    leader: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """Prompt tokens `first..last` of the step, at positions `start..` of slot `slot`."""

    first: int
    last: int
    slot: int
    start: int


@dataclass(frozen=True)
class Batch:
    """One step: the decoding tokens first (in slot order), then the chunks of prompts."""

    ids: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    """[T] each."""
    runs: Sequence[Run]
    shared: Sequence[Shared]
    chunks: Sequence[Chunk]
    heads: torch.Tensor
    """Indices of the tokens whose next token is sampled."""


class _Layer:
    """Keys and values of one layer: [slots, length, heads, size]. Pages are committed only when they are written."""

    def __init__(self, slots: int, length: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if key.shape[-1] != value.shape[-1]:
            raise ConfigError(
                f"the embedded engine needs keys and values of one size, this model has {key.shape[-1]} and "
                f"{value.shape[-1]}; serve it with vLLM"
            )
        self.keys, self.values = (self._reserve((slots, length, t.shape[1], t.shape[3]), t.dtype) for t in (key, value))

    @staticmethod
    def _reserve(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)

    def write(self, where: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        for store, new in ((self.keys, key), (self.values, value)):
            store.view(-1, *store.shape[2:]).index_copy_(0, where, new[0].transpose(0, 1))

    def read(self, low: int, high: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[high - low, heads, stop - start, size] of keys and of values, as views."""
        return tuple(t[low:high, start:stop].transpose(1, 2) for t in (self.keys, self.values))  # type: ignore[return-value]


class SlotCache:
    """Keys and values of `slots` slots of at most `length` tokens, whatever the model's layers look like."""

    def __init__(self, slots: int, length: int) -> None:
        self.slots = slots
        self.length = length
        self._layers: dict[int, _Layer] = {}
        self._batch: Batch | None = None
        self._where = torch.empty(0, dtype=torch.long)
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def begin(self, batch: Batch) -> None:
        """`attend` belongs to this step until the next call."""
        self._batch = batch
        self._where = batch.slots * self.length + batch.positions
        self._masks.clear()

    def copy_prefix(self, source: int, target: int, count: int) -> None:
        for layer in self._layers.values():
            for store in (layer.keys, layer.values):
                store[target, :count].copy_(store[source, :count])

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """transformers' attention interface: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]."""
        for name in ("softcap", "s_aux"):
            if options.get(name) is not None:
                raise ConfigError(f"the embedded engine has no attention with {name}; serve this model with vLLM")
        batch = self._batch
        assert batch is not None
        layer = self._layers.get(module.layer_idx)
        if layer is None:
            layer = self._layers[module.layer_idx] = _Layer(self.slots, self.length, key, value)
        layer.write(self._where, key, value)
        kv_heads, tokens, size = key.shape[1:]
        folded = query[0].view(kv_heads, -1, tokens, size).permute(2, 0, 1, 3)
        out = query.new_empty(tokens, kv_heads, query.shape[1] // kv_heads, size)
        scale = options.get("scaling")
        if batch.runs:
            self._decode(layer, batch, folded, out, scale)
        for chunk in batch.chunks:
            self._prefill(layer, chunk, folded, out, scale)
        return out.view(1, tokens, -1, size), None

    @staticmethod
    def _decode(layer: _Layer, batch: Batch, query: torch.Tensor, out: torch.Tensor, scale: float | None) -> None:
        """Own part of each row by runs, shared part by groups, joined with weights from the log-sum-exps."""
        count = batch.runs[-1].last
        own_lse = torch.empty(out.shape[:3], dtype=torch.float32)[:count]
        for run in batch.runs:
            rows = query[run.first : run.last]
            if run.offsets is not None:
                spread = rows.new_zeros(run.high - run.low, *rows.shape[1:])
                rows = spread.index_copy_(0, run.offsets, rows)
            keys, values = layer.read(run.low, run.high, run.start, run.stop)
            got, lse = _flash(rows, keys, values, attn_mask=run.mask, scale=scale)
            if run.offsets is not None:
                got, lse = got[run.offsets], lse[run.offsets]
            out[run.first : run.last] = got
            own_lse[run.first : run.last] = lse
        for group in batch.shared:
            rows = query[group.tokens].transpose(0, 1)
            kv_heads, members, per_head, size = rows.shape
            keys, values = layer.read(group.leader, group.leader + 1, 0, group.length)
            got, lse = _flash(rows.reshape(1, kv_heads, -1, size), keys, values, scale=scale)
            got = got.view(kv_heads, members, per_head, size).transpose(0, 1).float()
            lse = lse.reshape(kv_heads, members, per_head).transpose(0, 1)
            weight = torch.sigmoid(own_lse[group.tokens] - lse).unsqueeze(-1)
            out[group.tokens] = torch.lerp(got, out[group.tokens].float(), weight).to(out.dtype)

    def _prefill(
        self, layer: _Layer, chunk: Chunk, query: torch.Tensor, out: torch.Tensor, scale: float | None
    ) -> None:
        rows = query[chunk.first : chunk.last].transpose(0, 1)
        kv_heads, count, per_head, size = rows.shape
        keys, values = layer.read(chunk.slot, chunk.slot + 1, 0, chunk.start + count)
        mask = self._masks.get((chunk.first, per_head))
        if mask is None:
            mask = self._masks[chunk.first, per_head] = causal(chunk.start, count, per_head, query.dtype)
        got = F.scaled_dot_product_attention(
            rows.reshape(1, kv_heads, -1, size), keys, values, attn_mask=mask, scale=scale
        )
        out[chunk.first : chunk.last] = got.view(kv_heads, count, per_head, size).transpose(0, 1)


def causal(start: int, count: int, repeats: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [1, 1, count * repeats, start + count]: query i (each `repeats` times) sees keys <= start + i."""
    hidden = torch.arange(start + count) > torch.arange(start, start + count)[:, None]
    mask = torch.zeros(count, start + count, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return mask.repeat_interleave(repeats, 0)[None, None]
