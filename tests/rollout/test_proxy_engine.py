"""The proxy in front of the embedded engine, as processes: exact ids, the template's text, updates, a killed engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from proxy_fakes import TOOLS, a_rollout, joined, serving

from rollout.config import open_home
from rollout.inference.launch import EngineOptions, ensure_engine, stop_engine, update_engine
from rollout.inference.router import EngineRouter
from rollout.proxy.app import ProxyContext, create_proxy
from rollout.services import ServiceHost
from rollout.store import Store, open_store
from rollout.types import Limits, ModelCall, ModelRef, Sampling

pytestmark = pytest.mark.model
USER = {"role": "user", "content": "Close ticket 47 – or the one it was merged into. ✓"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    from training.models import add_model

    home = open_home(tmp_path_factory.mktemp("engine-home"))
    add_model(home, "smollm2-tiny")
    opened = open_store(home)
    yield opened
    for engine in opened.engines.all():
        stop_engine(opened, engine.id)
    opened.close()


def folder(store: Store) -> Path:
    return store.home.models / "smollm2-tiny"


def start(store: Store) -> Any:
    return ensure_engine(store, "smollm2-tiny", folder(store), options=EngineOptions(slots=4, max_len=1024))


async def converse(store: Store, name: str, between: Any = None) -> list[ModelCall]:
    """Two calls of one rollout, the first streamed; `between` runs in a thread after the first."""
    import aiohttp

    model = ModelRef(name="smollm2-tiny")
    sampling, limits = Sampling(temperature=0.8, top_p=0.95, max_tokens=24, seed=3), Limits(context=1024)
    store.rollouts.enqueue([a_rollout(name, folder(store), model=model, sampling=sampling, limits=limits)])
    headers = {"Authorization": f"Bearer {store.rollouts.issue_key(name, 'agent')}"}
    router = EngineRouter(store)
    app = create_proxy(ProxyContext(store=store, services=ServiceHost(), engines=router))
    async with serving(app) as url, aiohttp.ClientSession(headers=headers) as http:
        path = f"{url}/rollouts/{name}/v1/chat/completions"
        body = {"messages": [USER], "tools": TOOLS, "stream": True}
        async with http.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            message = joined(await response.read())
        if between:
            await asyncio.to_thread(between)
        answer = {"role": "assistant", "content": message["content"], "tool_calls": message["tool_calls"] or None}
        body = {"messages": [USER, answer, {"role": "user", "content": "And now?"}], "tools": TOOLS}
        async with http.post(path, json=body) as response:
            assert response.status == 200, await response.text()
    await router.close()
    return store.calls.of(name)


def test_ids_are_exact_and_the_prompt_is_the_templates_text(store: Store) -> None:
    from transformers import AutoTokenizer

    start(store)
    one, two = asyncio.run(converse(store, "exact"))
    tokenizer = AutoTokenizer.from_pretrained(str(folder(store)))
    for call in (one, two):
        history = [*call.messages[:-1]]
        text = tokenizer.apply_chat_template(
            history, tools=list(call.tools), add_generation_prompt=True, tokenize=False, enable_thinking=False
        )
        assert tokenizer.decode(call.prompt_ids, clean_up_tokenization_spaces=False) == text
        assert len(call.completion_ids) == len(call.logprobs or ()) > 0
        assert all(value <= 1e-6 for value in call.logprobs or ())
    assert two.prompt_ids[: len(one.prompt_ids + one.completion_ids)] == one.prompt_ids + one.completion_ids
    assert (one.fork_reason, two.fork_reason) == ("", "")


def test_a_seed_gives_the_same_ids_again(store: Store) -> None:
    start(store)
    first, again = asyncio.run(converse(store, "seed-a")), asyncio.run(converse(store, "seed-b"))
    assert [c.completion_ids for c in first] == [c.completion_ids for c in again]
    assert first[0].completion_ids != first[1].completion_ids


def test_a_killed_engine_that_is_started_again_goes_on(store: Store) -> None:
    record = start(store)

    def kill_and_start() -> None:
        psutil.Process(record.pid).kill()
        assert start(store).pid != record.pid

    one, two = asyncio.run(converse(store, "killed", kill_and_start))
    assert (one.failure, two.failure) == (None, None)


def test_updated_weights_are_stamped_with_their_version(store: Store) -> None:
    record = start(store)
    one, two = asyncio.run(converse(store, "updated", lambda: update_engine(store, record, folder(store), 7)))
    assert {span.version for span in one.versions} == {0}
    assert {span.version for span in two.versions} == {7}
