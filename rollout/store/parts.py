"""A recorded call as parts, each stored once: what `calls.db` holds of ids, messages and wire bytes.

A part is some bytes under their sha256. It is told as the change of an earlier part, its base, with which it shares
its first `head` and last `tail` bytes; so what a call repeats of the calls before it costs next to nothing:

    prompt    ids of the prompt                 <- the nearest earlier sequence of the rollout
    answer    ids of prompt and completion      <- this call's prompt
    messages  canonical messages as JSON        <- the nearest earlier ones
    tools     as JSON                           the same in every call as a rule, and then the same part
    request   bytes as received, pictures cut   <- the nearest earlier request
    response  bytes as sent                     <- an early response, for its form

Pictures (base64 in a request) are cut out and stored as blobs by their own hash. Equal parts of different rollouts
are one part. Everything here is pure; `Leaves` is a hint only: a base that is gone is found out when writing.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.store import packing
from rollout.types import ModelCall

LEAVES = 8
"""Earlier contents of a kind that a new one is compared with: one for each agent thread, as a rule."""
LEAVES_MAX = 64 * 2**20
"""Bytes of the leaves of one kind; the newest is kept whatever its size."""
ENOUGH = 512
"""Bytes of a response that show the form of the others."""
CUT = {"messages", "tools", "prompt_ids", "completion_ids", "logprobs", "request", "response", "delivered"}
"""Fields of a call that have columns of their own."""
_PICTURE = re.compile(rb'(?:;base64,|"data":\s?")([A-Za-z0-9+/]{64,}={0,2})(?=")')


@dataclass(frozen=True)
class Part:
    id: bytes
    data: bytes
    base: bytes | None = None
    head: int = 0
    tail: int = 0
    """Bytes shared with the base, pictures cut."""
    ids: bool = False
    """Packed as token ids."""
    holes: str = ""
    """JSON of `[place, sha256]`: where in the bytes a picture was cut out."""

    def content(self, base: bytes) -> bytes:
        """The bytes, pictures cut. `base`: those of the base, empty when there is none."""
        near = b"" if self.ids or self.base is None else packing.around(base, self.head, self.tail)
        new = packing.expand_ids(self.data) if self.ids else packing.expand(self.data, near)
        return base[: self.head] + new + base[len(base) - self.tail :]


@dataclass(frozen=True)
class Near:
    """Earlier bytes, and how much of their beginning and end new ones share."""

    id: bytes
    content: bytes
    head: int
    tail: int


@dataclass(frozen=True)
class Leaf:
    """Content that later parts may be the change of, and the leaf whose place it takes."""

    kind: str
    id: bytes
    content: bytes
    replaces: bytes | None


@dataclass
class Leaves:
    """Contents by kind, the newest last, that later parts may be the change of."""

    kinds: dict[str, list[tuple[bytes, bytes]]] = field(default_factory=dict)

    def nearest(self, kind: str, content: bytes) -> Near | None:
        """The leaf that shares most."""
        best = None
        for name, leaf in reversed(self.kinds.get(kind, [])):
            head, tail = _shared(kind, leaf, content)
            if best is None or head + tail > best.head + best.tail:
                best = Near(name, leaf, head, tail)
            if head + tail == len(leaf):
                break
        return best

    def add(self, leaf: Leaf) -> None:
        """A leaf that the new one mostly repeats makes room for it."""
        leaves = self.kinds.setdefault(leaf.kind, [])
        if leaf.kind == "response":
            if len(leaf.content) > 2 * max(ENOUGH, *(len(content) for _, content in leaves), 0):
                leaves[:] = [(leaf.id, leaf.content)]
            return
        leaves[:] = [kept for kept in leaves if kept[0] not in (leaf.id, leaf.replaces)]
        leaves.append((leaf.id, leaf.content))
        del leaves[:-LEAVES]
        while len(leaves) > 1 and sum(len(content) for _, content in leaves) > LEAVES_MAX:
            del leaves[0]

    def size(self) -> int:
        return sum(len(content) for leaves in self.kinds.values() for _, content in leaves)


@dataclass
class Entry:
    """What is written for one call. `needs`: parts that must be there already."""

    row: dict[str, Any]
    parts: list[Part] = field(default_factory=list)
    needs: set[bytes] = field(default_factory=set)
    pictures: list[bytes] = field(default_factory=list)
    grown: list[Leaf] = field(default_factory=list)
    """Leaves once it is committed."""


def make_entry(call: ModelCall, wire: Mapping[str, bytes], leaves: Leaves) -> Entry:
    """`wire`: the bytes of `request` and `response`; either may be missing."""
    told = set(CUT)
    entry = Entry(_columns(call))
    prompt, answer = packing.pack_ids(call.prompt_ids), packing.pack_ids(call.completion_ids)
    if prompt is None or answer is None:
        told -= {"prompt_ids", "completion_ids"}
    else:
        near = leaves.nearest("ids", prompt)
        _put(entry, "prompt", prompt, near)
        _put(entry, "answer", prompt + answer, Near(entry.row["prompt"], prompt, len(prompt), 0))
        entry.grown.append(make_leaf("ids", entry.row["answer"], prompt + answer, near))
    for kind, rows in (("messages", call.messages), ("tools", call.tools)):
        text = _json(rows)
        near = leaves.nearest(kind, text)
        _put(entry, kind, text, near)
        entry.grown.append(make_leaf(kind, entry.row[kind], text, near))
    for kind in ("request", "response"):
        if kind in wire:
            _put_wire(entry, kind, wire[kind], leaves)
        else:
            told.discard(kind)
    entry.row["body"] = packing.shrink(call.model_dump_json(exclude=told, exclude_defaults=True).encode())
    return entry


def read_call(row: Mapping[str, Any], contents: Mapping[bytes, bytes]) -> ModelCall:
    """Inverse of `make_entry`; `contents` holds the parts that the row names, requests and responses aside."""
    fields = json.loads(packing.expand(row["body"]))
    if row["prompt"] is not None:
        prompt, answer = contents[row["prompt"]], contents[row["answer"]]
        fields["prompt_ids"] = packing.unpack_ids(prompt)
        fields["completion_ids"] = packing.unpack_ids(answer[len(prompt) :])
    if row["logprobs"] is not None:
        fields["logprobs"] = packing.unpack_floats(row["logprobs"])
    for kind in ("messages", "tools"):
        fields[kind] = json.loads(contents[row[kind]].decode("utf-8", "surrogatepass"))
    for kind in ("request", "response"):
        if row[kind] is not None:
            fields[kind] = row[kind].hex()
    return ModelCall.model_validate({**fields, "delivered": bool(row["delivered"])})


def read_contents(parts: Mapping[bytes, Part]) -> dict[bytes, bytes]:
    """The bytes of each part, pictures cut. `parts` holds the base of every part in it."""
    out: dict[bytes, bytes] = {}
    for name in parts:
        line: list[Part] = []
        at: bytes | None = name
        while at is not None and at not in out:
            line.append(parts[at])
            at = parts[at].base
        for part in reversed(line):
            out[part.id] = part.content(out[part.base] if part.base is not None else b"")
    return out


def with_pictures(content: bytes, holes: str, pictures: Mapping[str, bytes]) -> bytes:
    """The bytes as they came; `pictures` by sha256."""
    out, last = [], 0
    for place, digest in json.loads(holes) if holes else ():
        out += [content[last:place], base64.b64encode(pictures[digest])]
        last = place
    return b"".join([*out, content[last:]])


def pictures_of(holes: Iterable[str]) -> set[str]:
    """sha256 of the pictures that were cut out."""
    return {digest for row in holes if row for _, digest in json.loads(row)}


def _columns(call: ModelCall) -> dict[str, Any]:
    return {
        "rollout_id": call.rollout_id,
        "index": call.index,
        "delivered": call.delivered,
        "failed": call.failure is not None,
        "tokens": len(call.completion_ids),
        "logprobs": None if call.logprobs is None else packing.pack_floats(call.logprobs),
        **dict.fromkeys(("prompt", "answer", "messages", "tools", "request", "response")),
    }


def make_leaf(kind: str, name: bytes, content: bytes, near: Near | None) -> Leaf:
    covered = near is not None and 2 * (near.head + near.tail) >= len(near.content)
    return Leaf(kind, name, content, near.id if near and covered else None)


def _put(entry: Entry, kind: str, content: bytes, near: Near | None) -> None:
    name = hashlib.sha256(content).digest()
    entry.row[kind] = name
    if near and near.id == name:
        entry.needs |= {name} - {part.id for part in entry.parts}
        return
    entry.parts.append(_part(name, content, near, ids=kind in ("prompt", "answer")))
    if near and near.id not in {part.id for part in entry.parts}:
        entry.needs.add(near.id)


def _put_wire(entry: Entry, kind: str, sent: bytes, leaves: Leaves) -> None:
    content, holes = _cut_pictures(sent, entry.pictures) if kind == "request" else (sent, "")
    near = leaves.nearest(kind, content)
    name = hashlib.sha256(sent).digest()
    entry.row[kind] = name
    entry.grown.append(make_leaf(kind, name, content, near))
    if near and near.id == name:
        entry.needs.add(name)
        return
    entry.parts.append(_part(name, content, near, holes=holes))
    if near:
        entry.needs.add(near.id)


def _part(name: bytes, content: bytes, near: Near | None, *, ids: bool = False, holes: str = "") -> Part:
    head, tail = (near.head, near.tail) if near else (0, 0)
    new = content[head : len(content) - tail]
    quoted = packing.around(near.content, head, tail) if near else b""
    data = packing.shrink_ids(new) if ids else packing.shrink(new, quoted)
    return Part(name, data, near.id if near else None, head, tail, ids, holes)


def _shared(kind: str, leaf: bytes, content: bytes) -> tuple[int, int]:
    if kind == "response":
        return 0, 0
    head = packing.common_head(leaf, content)
    if kind == "ids":
        return head - head % packing.WIDTH, 0
    return head, packing.common_tail(leaf, content, min(len(leaf), len(content)) - head)


def _cut_pictures(body: bytes, pictures: list[bytes]) -> tuple[bytes, str]:
    """The body without its pictures, and where each was. Only what base64 writes again the same is cut."""
    out, holes, last, size = [], [], 0, 0
    for found in _PICTURE.finditer(body):
        try:
            picture = base64.b64decode(found[1], validate=True)
        except binascii.Error:
            continue
        if base64.b64encode(picture) != found[1]:
            continue
        out.append(body[last : found.start(1)])
        size += len(out[-1])
        holes.append([size, hashlib.sha256(picture).hexdigest()])
        pictures.append(picture)
        last = found.end(1)
    return b"".join([*out, body[last:]]), json.dumps(holes) if holes else ""


def _json(rows: Sequence[Any]) -> bytes:
    return json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
