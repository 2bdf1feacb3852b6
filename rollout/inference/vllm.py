"""Engine client for vLLM's `POST /v1/completions` and for the embedded engine, which speaks the same subset.

Ids in, ids and log-probabilities out, always streamed: closing the iterator closes the connection, which aborts the
generation. A wrong or missing piece of the stream is an EngineError, never a guess.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from rollout.errors import EngineError
from rollout.inference.base import CallContext, Chunk
from rollout.types import Sampling

WAIT_S = 60.0
CONNECT_S = 10.0
UPDATE_S = 600.0
LINE_MAX = 8 * 2**20
_BUSY = (502, 503)
"""Statuses of an engine that starts, stops or is behind a proxy that waits for it."""


@dataclass(frozen=True)
class EngineAddress:
    url: str
    version: int = 0
    """Version of the weights where the engine itself does not stamp its chunks."""
    key: str = ""
    """Bearer key of /update_weights."""


class Locate(Protocol):
    """Where a rollout's engine is now; None while there is none.

    `fresh` forbids a cached answer; the URLs in `avoid` were just tried in vain.
    """

    def __call__(
        self, rollout_id: str = "", *, fresh: bool = False, avoid: Collection[str] = ()
    ) -> EngineAddress | None: ...


class _Unreachable(Exception):
    """Nothing of the answer has come yet: the call may be sent again, to another replica if there is one."""

    def __init__(self, message: str, url: str = "") -> None:
        super().__init__(message)
        self.url = url


class VllmEngine:
    """One engine, wherever `locate` says that it is. Implements `Engine`."""

    def __init__(self, locate: Locate, *, wait_s: float = WAIT_S, structured_outputs: bool = False) -> None:
        """`structured_outputs` is for vLLM itself; the embedded engine has none."""
        self.structured_outputs = structured_outputs
        self._locate = locate
        self._wait_s = wait_s
        self._http: aiohttp.ClientSession | None = None

    async def generate(
        self, ids: tuple[int, ...], sampling: Sampling, stop_ids: tuple[int, ...], context: CallContext
    ) -> AsyncIterator[Chunk]:
        """Waits up to `wait_s` seconds for an engine that cannot be reached, as long as no id has come."""
        body = request_body(ids, sampling, stop_ids, context)
        loop = asyncio.get_running_loop()
        end = loop.time() + self._wait_s
        pause, fresh = 0.1, False
        tried: set[str] = set()
        while True:
            begun = False
            address = self._locate(context.rollout_id, fresh=fresh, avoid=tried)
            try:
                async with aclosing(self._attempt(body, address)) as chunks:
                    async for chunk in chunks:
                        begun = True
                        yield chunk
                return
            except _Unreachable as error:
                if begun:
                    raise EngineError(f"the engine was lost in the middle of an answer: {error}") from error
                if loop.time() + pause > end:
                    raise EngineError(f"no engine within {self._wait_s:.0f} s: {error}") from error
                if error.url and error.url not in tried:
                    tried.add(error.url)
                else:  # every replica was tried
                    tried.clear()
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, 1.0)
            fresh = True

    async def update(self, path: str, version: int) -> None:
        address = self._locate(fresh=True)
        if address is None:
            raise EngineError("there is no engine to update; start it with `openforge engine start MODEL`")
        headers = {"Authorization": f"Bearer {address.key}"}
        timeout = aiohttp.ClientTimeout(total=UPDATE_S)
        try:
            async with self._session().post(
                f"{address.url}/update_weights",
                json={"path": path, "version": version},
                headers=headers,
                timeout=timeout,
            ) as response:
                if response.status != 200:
                    raise EngineError(f"the weight update got {response.status}: {(await response.text())[:500]}")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(f"the weight update failed: {error!r}") from error

    async def close(self) -> None:
        if self._http:
            await self._http.close()
            self._http = None

    async def _attempt(self, body: bytes, address: EngineAddress | None) -> AsyncGenerator[Chunk, None]:
        if address is None:
            raise _Unreachable("none is registered for this model")
        try:
            async with self._session().post(f"{address.url}/v1/completions", data=body) as response:
                if await _is_whole(response):
                    yield read_whole(await response.text(), address.version)
                    return
                async with aclosing(read_chunks(response.content.iter_any(), address.version)) as chunks:
                    async for chunk in chunks:
                        yield chunk
        except _Unreachable as error:
            raise _Unreachable(str(error), address.url) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            raise _Unreachable(repr(error), address.url) from error
        except aiohttp.ClientError as error:
            raise EngineError(f"the engine at {address.url} broke HTTP: {error!r}") from error

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # a pooled socket must never be waited for (bug 84)
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                headers={"Content-Type": "application/json"},
            )
        return self._http


def request_body(ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], context: CallContext) -> bytes:
    """Call k of a rollout samples with seed + k, so that calls differ and a rerun is the same."""
    body: dict[str, Any] = {
        "prompt": list(ids),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": context.seed + context.call_index,
        "stop_token_ids": list(stop_ids),
        "logprobs": 1,
        "return_token_ids": True,
        "stream": True,
    }
    if context.schema is not None:
        body["structured_outputs"] = {"json": context.schema}
    return json.dumps(body, separators=(",", ":")).encode()


async def _is_whole(response: aiohttp.ClientResponse) -> bool:
    """False for a stream of events, True for a server that gives its answer in one piece all the same."""
    kind = response.headers.get("Content-Type", "")
    if response.status == 200 and kind.startswith(("text/event-stream", "application/json")):
        return kind.startswith("application/json")
    text = (await response.content.read(2000)).decode(errors="replace")
    if response.status in _BUSY:
        raise _Unreachable(f"{response.status}: {text}")
    raise EngineError(f"the engine answered {response.status} {kind or 'without a type'} instead of events: {text}")


def read_whole(text: str, version: int) -> Chunk:
    """The one chunk of a unary answer. Raises EngineError."""
    event = _object(text)
    choices = event.get("choices") or [{}]
    chunk = read_choice(choices[0], event.get("weight_version", version))
    told = (event.get("usage") or {}).get("completion_tokens", len(chunk.ids))
    if not chunk.finish_reason or told != len(chunk.ids):
        raise EngineError(f"the engine's answer is not finished, or is cut: it holds {len(chunk.ids)} of {told} ids")
    return chunk


# -- the stream ----------------------------------------------------------------------------------------


async def read_chunks(parts: AsyncIterator[bytes], version: int) -> AsyncGenerator[Chunk, None]:
    """Bytes of an event stream -> chunks. Raises EngineError for a broken event or an end before the finish."""
    count, finished = 0, False
    async with aclosing(_events(parts)) as events:
        async for data in events:
            if data == "[DONE]":
                break
            event = _object(data)
            _check_usage(event, count)
            for choice in event.get("choices") or ():
                chunk = read_choice(choice, event.get("weight_version", version))
                count += len(chunk.ids)
                finished = finished or bool(chunk.finish_reason)
                if chunk.ids or chunk.finish_reason:
                    yield chunk
    if not finished:
        raise EngineError(f"the engine's stream ended after {count} ids without a finish reason")


async def _events(parts: AsyncIterator[bytes]) -> AsyncGenerator[str, None]:
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > LINE_MAX:
            raise EngineError(f"the engine sent a line of more than {LINE_MAX} bytes")
        for line in lines:
            if data := _data(line):
                yield data
    if data := _data(rest):
        yield data


def _data(line: bytes) -> str:
    line = line.strip()
    if not line or line.startswith((b":", b"event:", b"id:", b"retry:")):
        return ""
    if not line.startswith(b"data:"):
        raise EngineError(f"the engine sent a line that is no event: {line[:200]!r}")
    return line[5:].strip().decode(errors="replace")


def _object(data: str) -> Mapping[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise EngineError(f"the engine sent a broken event: {data[:200]!r}") from error
    if not isinstance(event, dict):
        raise EngineError(f"the engine sent an event that is no object: {data[:200]!r}")
    if event.get("error"):
        raise EngineError(f"the engine failed: {json.dumps(event['error'])[:500]}")
    return event


def _check_usage(event: Mapping[str, Any], count: int) -> None:
    """vLLM closes with a usage event when asked; every sampled id must have come before it (bug 3)."""
    told = (event.get("usage") or {}).get("completion_tokens")
    if told is not None and not event.get("choices") and told != count:
        raise EngineError(f"the engine counts {told} sampled ids but sent {count}")


def read_choice(choice: Mapping[str, Any], version: int) -> Chunk:
    """One choice of a completion chunk. Raises EngineError when ids or log-probabilities are missing or wrong."""
    ids = choice.get("token_ids")
    if not isinstance(version, int):
        raise EngineError(f"the engine stamped a chunk with the weight version {version!r}")
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise EngineError("the engine sent a chunk without token_ids; it must support return_token_ids")
    reason = choice.get("finish_reason") or ""
    if reason not in ("", "stop", "length"):
        raise EngineError(f"the engine ended the answer with {reason!r}")
    return Chunk(tuple(ids), _logprobs(ids, choice.get("logprobs")), version, reason)


def _logprobs(ids: Sequence[int], block: Any) -> tuple[float, ...]:
    if not ids:
        return ()
    if not isinstance(block, dict) or not isinstance(block.get("token_logprobs"), list):
        raise EngineError("the engine sent ids without log-probabilities")
    values = block["token_logprobs"]
    if len(values) != len(ids):
        raise EngineError(f"the engine sent {len(ids)} ids with {len(values)} log-probabilities")
    tops = block.get("top_logprobs") or [None] * len(ids)
    if not isinstance(tops, list) or len(tops) != len(ids):
        raise EngineError(f"the engine sent {len(ids)} ids with top_logprobs of another length")
    return tuple(_sampled(i, v, t) for i, v, t in zip(ids, values, tops, strict=True))


def _sampled(token: int, value: Any, top: Any) -> float:
    """The sampled id's own entry where the engine names entries by id, never simply the first one (bug 83)."""
    if isinstance(top, dict) and any(key.startswith("token_id:") for key in top):
        value = top.get(f"token_id:{token}")
    if not isinstance(value, int | float) or not math.isfinite(value) or value > 1e-6:
        raise EngineError(f"the engine sent {value!r} as the log-probability of the sampled id {token}")
    return float(value)
