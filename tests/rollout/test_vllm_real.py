"""The proxy in front of a real vLLM server on the CPU: exact records, weight updates under load, parity (mark `vllm`).

The environment is `make vllm-env`'s; without it these tests are skipped.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from proxy_fakes import TOOLS, a_rollout, joined, serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from rollout.config import open_home
from rollout.errors import EngineError
from rollout.inference.backends import vllm_python
from rollout.inference.base import CallContext, Chunk
from rollout.inference.launch import EngineOptions, ensure_engine, read_key, stop_engine
from rollout.inference.router import EngineRouter
from rollout.inference.vllm import EngineAddress, VllmEngine
from rollout.proxy.app import ProxyContext, create_proxy
from rollout.proxy.codecs import load_codec
from rollout.proxy.messages import Message
from rollout.services import ServiceHost
from rollout.store import Store, open_store
from rollout.types import EngineRecord, Limits, ModelCall, ModelRef, Sampling
from training import parity
from training.config import TrainerConfig
from training.models import ENTRY, ModelEntry, add_model, write_entry
from training.trainer.reference import ReferenceTrainer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.model,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not vllm_python().exists(), reason="vLLM's environment is missing: make vllm-env"),
]
OPTIONS = EngineOptions(slots=16, max_len=2048, start_s=400.0, backend="vllm")
LONG = tuple(range(1000, 1400))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    home = open_home(tmp_path_factory.mktemp("vllm-home"))
    opened = open_store(home)
    add_model(home, "smollm2")
    yield opened
    for engine in opened.engines.all():
        stop_engine(opened, engine.id)
    opened.close()


@pytest.fixture(scope="module")
def entry(store: Store) -> ModelEntry:
    return add_model(store.home, "smollm2")


@pytest.fixture(scope="module")
def record(store: Store, entry: ModelEntry) -> EngineRecord:
    return ensure_engine(store, entry.name, entry.path, options=OPTIONS)


def client(store: Store, record: EngineRecord) -> VllmEngine:
    address = EngineAddress(record.url, record.version, read_key(store.home, record.id))
    return VllmEngine(lambda *_, **__: address)


async def ask(engine: VllmEngine, ids: tuple[int, ...], n: int, seed: int = 0, temperature: float = 1.0) -> list[Chunk]:
    sampling = Sampling(temperature=temperature, max_tokens=n)
    async with aclosing(engine.generate(ids, sampling, (), CallContext("r", "", 0, seed))) as chunks:  # type: ignore[type-var]
        return [chunk async for chunk in chunks]


def flat(chunks: list[Chunk]) -> tuple[list[int], list[float], list[int]]:
    """ids, log-probabilities, and the version of each id."""
    ids = [i for c in chunks for i in c.ids]
    return ids, [p for c in chunks for p in c.logprobs or ()], [c.version for c in chunks for _ in c.ids]


class Tap:
    """Stands between proxy and vLLM and keeps what passes."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[dict[str, Any]] = []
        self.answered: list[bytes] = []

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/completions", self._pass, methods=["POST"])])

    async def _pass(self, request: Request) -> StreamingResponse:
        body = await request.body()
        self.asked.append(json.loads(body))
        self.answered.append(b"")

        async def parts() -> AsyncIterator[bytes]:
            headers = {"content-type": "application/json"}
            async with (
                aiohttp.ClientSession() as http,
                http.post(f"{self.url}/v1/completions", data=body, headers=headers) as response,
            ):
                async for part in response.content.iter_any():
                    self.answered[-1] += part
                    yield part

        return StreamingResponse(parts(), media_type="text/event-stream")


async def converse(store: Store, entry: ModelEntry, url: str) -> ModelCall:
    sampling, limits = Sampling(temperature=0.0, max_tokens=48), Limits(context=2048)
    model = ModelRef(name="tapped")
    shutil.copytree(entry.path, store.home.models / "tapped", dirs_exist_ok=True)
    store.engines.put(EngineRecord(id="tap", model="tapped", path="", url=url, pid=0, process_started=0.0))
    store.rollouts.enqueue([a_rollout("exact", Path(entry.path), model=model, sampling=sampling, limits=limits)])
    headers = {"Authorization": f"Bearer {store.rollouts.issue_key('exact', 'agent')}"}
    router = EngineRouter(store)
    app = create_proxy(ProxyContext(store=store, services=ServiceHost(), engines=router))
    user = {"role": "user", "content": "Name three rivers of Europe. – 三条河流"}
    async with serving(app) as proxy, aiohttp.ClientSession(headers=headers) as http:
        body = {"messages": [user], "tools": TOOLS, "stream": True}
        async with http.post(f"{proxy}/rollouts/exact/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            joined(await response.read())
    await router.close()
    store.engines.remove("tap")
    return store.calls.of("exact")[0]


def test_the_record_is_what_passed_at_the_upstream_and_a_rerun_gives_it_again(
    store: Store, entry: ModelEntry, record: EngineRecord
) -> None:
    async def main() -> None:
        tap = Tap(record.url)
        async with serving(tap.app()) as url:
            call = await converse(store, entry, url)
        events = [json.loads(line[6:]) for line in tap.answered[0].split(b"\n\n") if line.startswith(b"data: {")]
        choices = [choice for event in events for choice in event["choices"]]
        assert list(call.prompt_ids) == tap.asked[0]["prompt"] == choices[0]["prompt_token_ids"]
        assert list(call.completion_ids) == [i for choice in choices for i in choice["token_ids"]]
        assert list(call.logprobs or ()) == [p for choice in choices for p in choice["logprobs"]["token_logprobs"]]
        assert len(call.completion_ids) > 5
        engine = client(store, record)
        ids, logprobs, _ = flat(await ask(engine, call.prompt_ids, len(call.completion_ids), temperature=0.0))
        await engine.close()
        assert ids == list(call.completion_ids)
        assert max(abs(a - b) for a, b in zip(logprobs, call.logprobs or (), strict=True)) < 1e-3

    asyncio.run(main())


def test_parity_is_within_the_bounds(entry: ModelEntry, store: Store, record: EngineRecord) -> None:
    codec = load_codec(Path(entry.path), entry.renderer)
    prompts = [codec.render([Message("user", text)], ()) for text in parity.PROMPTS]
    trainer = ReferenceTrainer(Path(entry.path), TrainerConfig(), temperature=0.8)
    found = parity.measure(client(store, record), trainer, prompts, codec.stop_ids, 0.8)
    assert found.tokens >= parity.TOKENS / 2
    parity.check(found, 0.05, 2.0)


def other_weights(store: Store, entry: ModelEntry) -> Path:
    """A policy that is clearly another one."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = store.home.models / "other"
    shutil.copytree(entry.path, folder)
    (folder / ENTRY).unlink()
    state = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    changed = {
        k: (v.float() * (1 + 0.05 * torch.randn(v.shape, generator=noise))).to(v.dtype) if v.ndim > 1 else v
        for k, v in state.items()
    }
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    write_entry(folder, name="other", renderer=entry.renderer, source="test")
    return folder


def test_weights_change_under_eight_streams_and_old_prefixes_are_computed_anew(
    store: Store, entry: ModelEntry, record: EngineRecord
) -> None:
    other = other_weights(store, entry)

    async def main() -> None:
        engine = client(store, record)
        before, old, _ = flat(await ask(engine, LONG, 8, temperature=0.0))
        streams = [asyncio.create_task(ask(engine, LONG[: 300 + i], 300, seed=i)) for i in range(8)]
        await asyncio.sleep(1.5)
        assert not any(stream.done() for stream in streams)
        await engine.update(str(other), 1)
        ended = await asyncio.gather(*streams)
        for chunks in ended:
            ids, logprobs, versions = flat(chunks)
            assert chunks[-1].finish_reason in ("stop", "length")
            assert len(ids) == len(logprobs) == len(versions)
            assert versions == sorted(versions)
            assert set(versions) <= {0, 1}
            assert not any(len(c.ids) != len(c.logprobs or ()) for c in chunks)
        spans = [set(flat(chunks)[2]) for chunks in ended]
        assert sum(span == {0, 1} for span in spans) >= 6, "the update fell into the streams"
        again, fresh, versions = flat(await ask(engine, LONG, 8, temperature=0.0))
        assert set(versions) == {1}
        assert (again, fresh) != (before, old)
        with pytest.raises(EngineError, match="400"):
            await engine.update(str(other / "none"), 2)
        await engine.close()

        newer = await asyncio.to_thread(
            ensure_engine, store, "other", str(other), options=OPTIONS
        )  # a fresh engine on the new weights
        clean = client(store, newer)
        ids, logprobs, _ = flat(await ask(clean, LONG, 8, temperature=0.0))
        await clean.close()
        assert ids == again
        assert max(abs(a - b) for a, b in zip(logprobs, fresh, strict=True)) < 1e-3

    asyncio.run(main())
