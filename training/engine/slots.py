"""Which ids each slot holds, where a new prompt goes, and how a step reads the slots. No tensors of the model here.

A slot keeps its ids after its request ended: the next call of the same rollout extends them, and any other prompt
that begins alike copies the shared beginning. A prompt that shares more with a slot that is still reading its own
prompt waits for that one, so that 64 rollouts of one task read their common beginning once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from training.engine.attention import Run, Shared

WORTH_WAITING = 16
"""Tokens that another slot is about to have cached, above which a prompt waits for it."""
WORTH_SHARING = 32
"""Shortest common beginning, and fewest tokens saved, that pay for a second attention call."""
GAP = 2
"""Idle slots that may lie inside a run: attending to one costs less than another call."""

Array = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True)
class Placement:
    """Prompt goes to `slot`; its first `reuse` ids are cached in slot `source` (the same one, or to be copied)."""

    slot: int
    source: int
    reuse: int


class SlotTable:
    """ids, how many are known (`length`), how many are cached (`filled`) and whether a request holds the slot."""

    def __init__(self, slots: int, max_len: int) -> None:
        self.max_len = max_len
        self.ids = np.zeros((slots, max_len), dtype=np.int64)
        self.length = np.zeros(slots, dtype=np.int64)
        self.filled = np.zeros(slots, dtype=np.int64)
        self.busy = np.zeros(slots, dtype=bool)
        self._used = np.zeros(slots, dtype=np.int64)
        self._clock = 0

    def common(self, ids: Array) -> Array:
        """Length of the common beginning of `ids` and each slot's known ids."""
        width = len(ids)
        equal = self.ids[:, :width] == ids
        first = np.where(equal.all(axis=1), width, equal.argmin(axis=1))
        return np.minimum(first, np.where(self.busy, self.length, self.filled))

    def place(self, ids: Array) -> Placement | None:
        """Where a prompt goes, or None when no slot is free or waiting for another slot's prompt is cheaper."""
        if self.busy.all():
            return None
        common = self.common(ids)
        cached = np.minimum(np.minimum(common, self.filled), len(ids) - 1)
        source = int(cached.argmax())
        if common.max() - cached[source] > WORTH_WAITING and bool(self.busy[common.argmax()]):
            return None
        reuse = int(cached[source])
        extends = not self.busy[source] and self.filled[source] - reuse <= WORTH_WAITING
        slot = source if reuse and extends else self._evict(source if reuse else 0)
        return Placement(slot, source, reuse)

    def _evict(self, near: int) -> int:
        """An empty slot near `near`, else the idle slot that was used least recently."""
        idle = np.flatnonzero(~self.busy)
        empty = idle[self.filled[idle] == 0]
        if len(empty):
            return int(empty[np.abs(empty - near).argmin()])
        return int(idle[self._used[idle].argmin()])

    def take(self, place: Placement, ids: Array) -> None:
        slot = place.slot
        self.ids[slot, : len(ids)] = ids
        self.length[slot] = len(ids)
        self.filled[slot] = place.reuse
        self.busy[slot] = True

    def append(self, slot: int, token: int) -> None:
        self.ids[slot, self.length[slot]] = token
        self.length[slot] += 1

    def release(self, slot: int) -> None:
        self._clock += 1
        self._used[slot] = self._clock
        self.busy[slot] = False
        self.length[slot] = self.filled[slot]

    def clear(self) -> None:
        """Forgets every cached id (the weights changed)."""
        self.busy[:] = False
        self.length[:] = 0
        self.filled[:] = 0


@dataclass(frozen=True)
class Group:
    """Slots that begin with the same `length` cached ids."""

    members: tuple[int, ...]
    length: int


@dataclass(frozen=True)
class Layout:
    """How decoding slots are read: groups by content, runs by neighbourhood. Holds until the set of slots changes."""

    slots: tuple[int, ...]
    groups: tuple[Group, ...]
    runs: tuple[tuple[int, int], ...]
    """Index ranges into `slots`."""

    def begins(self) -> Array:
        """First position of each slot that its own part of the attention reads."""
        begin = dict.fromkeys(self.slots, 0)
        for group in self.groups:
            begin.update(dict.fromkeys(group.members, group.length))
        return np.array([begin[s] for s in self.slots], dtype=np.int64)


def lay_out(table: SlotTable, slots: Sequence[int]) -> Layout:
    groups = tuple(_groups(table, slots))
    plain = Layout(tuple(slots), groups, ())
    return Layout(tuple(slots), groups, tuple(_runs(slots, plain.begins(), table.length[list(slots)])))


def _groups(table: SlotTable, slots: Sequence[int]) -> list[Group]:
    found: list[tuple[list[int], int]] = []
    for slot in slots:
        cached = int(table.filled[slot])
        row = table.ids[slot, :cached]
        for k, (members, length) in enumerate(found):
            width = min(length, cached)
            equal = table.ids[members[0], :width] == row[:width]
            shared = width if equal.all() else int(equal.argmin())
            if shared >= WORTH_SHARING and 2 * shared >= length:
                found[k] = ([*members, slot], shared)
                break
        else:
            found.append(([slot], cached))
    return [Group(tuple(m), n) for m, n in found if len(m) > 2 and n >= WORTH_SHARING]


def _runs(slots: Sequence[int], begins: Array, lengths: Array) -> list[tuple[int, int]]:
    """Cuts where the gap is wide, or where one call would read twice what its rows need."""
    runs: list[tuple[int, int]] = []
    first = 0
    for k in range(1, len(slots) + 1):
        if k < len(slots) and slots[k] - slots[k - 1] <= GAP + 1:
            spans = lengths[first : k + 1] - begins[first : k + 1]
            whole = lengths[first : k + 1].max() - begins[first : k + 1].min()
            if whole <= 2 * max(int(spans.min()), 2 * WORTH_SHARING):
                continue
        runs.append((first, k))
        first = k
    return runs


def read_runs(table: SlotTable, layout: Layout, dtype: torch.dtype) -> list[Run]:
    """The runs of this step; each slot's newest id sits at position `length - 1`."""
    begins = layout.begins()
    runs = []
    for first, last in layout.runs:
        slots = np.array(layout.slots[first:last])
        low, high = int(slots[0]), int(slots[-1]) + 1
        ends = table.length[slots]
        start, stop = int(begins[first:last].min()), int(ends.max())
        position = np.arange(start, stop)
        hidden = np.zeros((high - low, stop - start), dtype=bool)
        hidden[slots - low] = (position < begins[first:last, None]) | (position >= ends[:, None])
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
        offsets = None if high - low == last - first else torch.from_numpy(slots - low)
        runs.append(Run(first, last, low, high, start, stop, mask[:, None, None], offsets))
    return runs


def read_shared(layout: Layout) -> list[Shared]:
    index = {slot: k for k, slot in enumerate(layout.slots)}
    return [
        Shared(torch.tensor([index[s] for s in g.members]), leader=g.members[0], length=g.length) for g in layout.groups
    ]
