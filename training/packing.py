"""Packs token rows into one sequence in which a shared prefix stands once. Serves the SFT and RL steps.

Rows of one task begin with the same system prompt, tools and instruction, often 80 % of their tokens. A trie of
the rows holds each distinct prefix once; every token attends to its ancestors only and takes its depth as
position, so that logits and gradients are those of the separate rows while the prefix is computed once. Tokens
behind the last trained one are left out. A single row packs to a plain causal sequence without a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class TokenRow(Protocol):
    """What a row needs to be packed: `mask[t]` says that token t is trained, predicted from tokens < t."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def mask(self) -> Sequence[bool]: ...


@dataclass(frozen=True)
class PackedRows:
    """One sequence of T nodes and the N trained tokens read from it, rows in order, positions ascending."""

    input_ids: torch.Tensor
    """(1, T) int64."""
    position_ids: torch.Tensor
    """(1, T) int64: depth in the trie."""
    attention_mask: torch.Tensor | None
    """(1, 1, T, T) bool, True where the row's token may attend; None for a plain causal sequence."""
    sources: torch.Tensor
    """(N,) int64: node whose logits predict the trained token."""
    targets: torch.Tensor
    """(N,) int64: the trained token ids."""


def trained_positions(row: TokenRow) -> list[int]:
    """Indices of the trained tokens. Raises ValueError for a row that trains nothing, or its first token."""
    found = [t for t, trained in enumerate(row.mask) if trained]
    if not found:
        raise ValueError("a row without trained tokens cannot be packed; drop it before")
    if found[0] == 0:
        raise ValueError("the first token of a row has no context to be predicted from; it cannot be trained")
    return found


def pack_rows(rows: Sequence[TokenRow]) -> PackedRows:
    """The trie of `rows` as one sequence."""
    children: dict[tuple[int, int], int] = {}
    tokens: list[int] = []
    parents: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    for row in rows:
        trained = trained_positions(row)
        path = _insert(row.token_ids[: trained[-1]], children, tokens, parents)
        sources += [path[t - 1] for t in trained]
        targets += [row.token_ids[t] for t in trained]
    return PackedRows(
        input_ids=torch.tensor([tokens]),
        position_ids=torch.tensor([_depths(parents)]),
        attention_mask=_ancestor_mask(parents),
        sources=torch.tensor(sources),
        targets=torch.tensor(targets),
    )


def micro_batches(rows: Sequence[TokenRow], budget: int, *, share: bool = True) -> list[list[int]]:
    """Indices of `rows` cut into packs of at most `budget` nodes each (a longer row stands alone).

    Rows are ordered so that those with a long common prefix meet in one pack; `share=False` gives single rows.
    """
    order = sorted(range(len(rows)), key=lambda i: tuple(rows[i].token_ids))
    packs: list[list[int]] = []
    used, previous = 0, -1
    for i in order:
        ids = rows[i].token_ids
        fresh = len(ids) - (_common(rows[previous].token_ids, ids) if previous >= 0 else 0)
        if share and packs and used + fresh <= budget:
            packs[-1].append(i)
            used += fresh
        else:
            packs.append([i])
            used = len(ids)
        previous = i
    return packs


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    shortest = min(len(a), len(b))
    return next((i for i in range(shortest) if a[i] != b[i]), shortest)


def _insert(
    ids: Sequence[int], children: dict[tuple[int, int], int], tokens: list[int], parents: list[int]
) -> list[int]:
    """Walks the trie along `ids`, adding what is missing; returns the nodes of the path."""
    node, path = -1, []
    for token in ids:
        key = (node, token)
        if key not in children:
            children[key] = len(tokens)
            tokens.append(token)
            parents.append(node)
        node = children[key]
        path.append(node)
    return path


def _depths(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def _ancestor_mask(parents: Sequence[int]) -> torch.Tensor | None:
    size = len(parents)
    if all(parent == node - 1 for node, parent in enumerate(parents)):
        return None
    mask = torch.zeros(size, size, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] = mask[parent]
        mask[node, node] = True
    return mask[None, None]
