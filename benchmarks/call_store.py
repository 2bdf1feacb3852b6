"""Size of a recorded session: `python benchmarks/call_store.py [--model DIR] [--calls 50] [--tokens 32768]`.

A harness-like client talks to the real proxy over HTTP, streamed: a long system prompt with tools, then a tool call
and a piece of a source file as its result in each call, until the last call has `--tokens` ids. Printed: the bytes of
`calls.db` (and pictures) over what the session holds once: 4 bytes an id, 4 bytes a log-probability, and its text in
UTF-8. Ends 1 above the bar of 1.3. `--model` is a model folder with a tokenizer (only that is read); without one a
small byte-level tokenizer is made, whose ids are shorter than a real one's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import sqlalchemy as sa

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from proxy_fakes import a_rollout, save_codec, serving  # noqa: E402

from rollout.config import open_home  # noqa: E402
from rollout.inference.base import CallContext, Chunk  # noqa: E402
from rollout.proxy.app import ProxyContext, create_proxy  # noqa: E402
from rollout.services import ServiceHost  # noqa: E402
from rollout.store import Store, open_store  # noqa: E402
from rollout.types import Limits, ModelCall, Sampling  # noqa: E402

BAR = 1.3
FIRST = 4000
"""Tokens of the first prompt, about."""
NAMES = ("read_file", "list_folder", "run_command", "write_file", "search_text", "fetch_page", "ask_user", "finish")


@dataclass(frozen=True)
class Size:
    """Bytes: of the store, and of what the session holds once."""

    stored: int
    ids: int
    logprobs: int
    text: int
    calls: int
    longest: int
    """Ids of the last call's prompt and completion."""
    plain: int
    """Every call whole: ids, log-probabilities, request and response, nothing compressed."""

    @property
    def ratio(self) -> float:
        return self.stored / (self.ids + self.logprobs + self.text)


@dataclass
class Speaker:
    """An `Engine` and its source: samples a sentence and a tool call, each id with a float32 log-probability."""

    words: Iterator[str]
    structured_outputs: bool = False
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def engine_for(self, rollout: Any, codec: Any) -> Speaker:
        self.codec = codec
        return self

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], context: CallContext
    ) -> AsyncIterator[Chunk]:
        said = " ".join(next(self.words) for _ in range(40))
        arguments = {"path": f"src/module_{context.call_index}.py", "first": context.call_index * 40, "last": 200}
        ids = self.codec.answer_ids(said, (NAMES[context.call_index % len(NAMES)], arguments))
        for at, token in enumerate(ids):
            logprob = struct.unpack("<f", struct.pack("<f", -self.rng.expovariate(2.0)))[0]
            yield Chunk((token,), (logprob,), 0, "stop" if at == len(ids) - 1 else "")


def material() -> Iterator[str]:
    """Words of this project's sources, again from the start when they end."""
    files = sorted((ROOT / "rollout").rglob("*.py"))
    while True:
        for path in files:
            yield from path.read_text().split(" ")


def tools() -> list[dict[str, Any]]:
    prose = (ROOT / "AGENTS.md").read_text().split()
    out = []
    for at, name in enumerate(NAMES):
        text = " ".join(prose[at * 25 : at * 25 + 25])
        properties = {key: {"type": kind, "description": f"{key}: {text[:60]}"} for key, kind in _FIELDS}
        schema = {"type": "object", "properties": properties, "required": ["path"]}
        out.append({"type": "function", "function": {"name": name, "description": text, "parameters": schema}})
    return out


_FIELDS = (("path", "string"), ("first", "integer"), ("last", "integer"))


async def converse(store: Store, folder: Path, calls: int, tokens: int) -> float:
    """Records the session; returns the seconds of its slowest call."""
    words = material()
    limits = Limits(calls=calls, tokens=10 * tokens, context=10 * tokens)
    rollout = a_rollout("session", folder, limits=limits, sampling=Sampling(max_tokens=4096))
    store.rollouts.enqueue([rollout])
    key = store.rollouts.issue_key("session", "agent")
    speaker = Speaker(words)
    app = create_proxy(ProxyContext(store=store, services=ServiceHost(), engines=speaker))
    rows: list[dict[str, Any]] = []
    slowest = 0.0
    async with serving(app) as url, aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:
        for at in range(calls):
            body = {"model": "policy", "messages": rows, "tools": tools(), "stream": True, "temperature": 1.0}
            began = time.perf_counter()
            if at == 0:
                await app.state.sessions.session("session")
                rows += [_row("system", _piece(speaker, words, FIRST // 2)), _row("user", _piece(speaker, words, 100))]
            async with http.post(f"{url}/rollouts/session/v1/chat/completions", json=body) as response:
                answer = _message(await response.read())
            slowest = max(slowest, time.perf_counter() - began)
            used = len(store.calls.of("session")[-1].prompt_ids)
            room = (tokens - used) // max(1, calls - at) - 150
            rows.append(answer)
            result = _piece(speaker, words, max(20, room))
            rows.append({"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": result})
    return slowest


def measure(store: Store) -> Size:
    """Of the session that `converse` recorded; closes nothing, but moves the journal into the database."""
    calls = store.calls.of("session")
    store.databases[1].read(lambda c: c.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").all())
    pages = store.databases[1].read(
        lambda c: [c.execute(sa.text(f"PRAGMA {name}")).scalar() for name in ("page_count", "page_size")]
    )
    blobs = sum(path.stat().st_size for path in store.home.blobs.rglob("*") if path.is_file())
    sent = sum(len(store.blobs.get(digest)) for call in calls for digest in (call.request, call.response))
    sampled = sum(len(call.completion_ids) for call in calls)
    whole = sum(len(call.prompt_ids + call.completion_ids) for call in calls)
    return Size(
        stored=pages[0] * pages[1] + blobs,
        ids=4 * _unique_ids(calls),
        logprobs=4 * sampled,
        text=_unique_text(calls),
        calls=len(calls),
        longest=len(calls[-1].prompt_ids + calls[-1].completion_ids),
        plain=4 * (whole + sampled) + sent,
    )


def _row(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _piece(speaker: Speaker, words: Iterator[str], tokens: int) -> str:
    """Text of about so many tokens."""
    out: list[str] = []
    left = tokens
    while left > 0:
        some = [next(words) for _ in range(max(1, left // 4))]
        out += some
        left -= len(speaker.codec.encode(" ".join(some)))
    return " ".join(out)


def _message(raw: bytes) -> dict[str, Any]:
    """What a client assembles from the stream."""
    content, calls = "", list[dict[str, Any]]()
    for line in raw.decode().split("\n"):
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            content += choice["delta"].get("content") or ""
            calls += [{k: v for k, v in c.items() if k != "index"} for c in choice["delta"].get("tool_calls", ())]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _unique_ids(calls: Sequence[ModelCall]) -> int:
    """Ids that stand behind no earlier call's beginning."""
    seen: set[tuple[int, ...]] = set()
    count = 0
    for call in calls:
        whole = call.prompt_ids + call.completion_ids
        shared = max((_common(whole, other) for other in seen), default=0)
        count += len(whole) - shared
        seen.add(whole)
    return count


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _unique_text(calls: Sequence[ModelCall]) -> int:
    """Each distinct message's words once, and the tools."""
    texts = {json.dumps(call.tools, ensure_ascii=False) for call in calls}
    for message in (message for call in calls for message in call.messages):
        called = [call["function"] for call in message.get("tool_calls", ())]
        texts.add(message["content"] + "".join(c["name"] + json.dumps(c["arguments"]) for c in called))
    return sum(len(text.encode()) for text in texts)


def run(folder: Path, calls: int, tokens: int) -> tuple[Size, float]:
    with tempfile.TemporaryDirectory() as home:
        store = open_store(open_home(Path(home)))
        try:
            slowest = asyncio.run(converse(store, folder, calls, tokens))
            return measure(store), slowest
        finally:
            store.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=32768)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = args.model or save_codec(Path(made) / "student")
        size, slowest = run(folder, args.calls, args.tokens)
    print(f"{size.calls} calls, {size.longest} ids in the last one, slowest call {slowest * 1000:.0f} ms")
    print(f"holds once: {size.ids} bytes of ids, {size.logprobs} of log-probabilities, {size.text} of text")
    print(f"stored: {size.stored} bytes; plain: {size.plain} bytes, {size.plain / size.stored:.0f} times as much")
    print(f"ratio {size.ratio:.2f} (bar {BAR})")
    return 0 if size.ratio <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
