"""Long sessions of real harnesses: how their calls merge into rows, and the same plumbing under a real model.

In every answer of the long session the model reasons and writes its arguments oddly spaced: what a harness sends back
is then never what was sampled.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from harness_stage import DIALECTS, SHOWN, a_task, launched, ready, through_proxy
from proxy_fakes import a_rollout
from rollout_servers import Listening, hosted
from wire_rows import rows_from_the_wire

from rollout.config import Home, open_home
from rollout.errors import PolicyEnd
from rollout.harness import ADAPTERS, make_harness, stop_style, tagger_of
from rollout.inference.launch import EngineOptions, ensure_engine, stop_engine
from rollout.inference.router import EngineRouter
from rollout.proxy.app import ProxyContext, create_proxy
from rollout.proxy.attribution import Adapters
from rollout.services import ServiceHost
from rollout.store import Store, open_store
from rollout.types import CallTag, EngineRecord, HistoryMode, Limits, ModelCall, RolloutState, Sampling, Trajectory
from training.models import add_model
from training.samples import merged_samples, trained_tokens

pytestmark = [pytest.mark.harness, pytest.mark.sandbox, pytest.mark.timeout(900)]


@pytest.fixture
def home(harness_home: Home) -> Home:
    return harness_home


THINK = "<think>\nTicket 7, attempt {n}.\n</think>\n\n"


def odd(name: str, n: int) -> str:
    tool, arguments = SHOWN[name]
    given = json.dumps(arguments).replace(": ", " :  ")
    return THINK.format(n=n) + f'<tool_call>\n{{"name":"{tool}" , "arguments":{given}}}\n</tool_call>'


def trajectory(store_calls: list[ModelCall], name: str, folder: Path) -> Trajectory:
    rollout = a_rollout("r1", folder, harness=name, state=RolloutState.SUCCEEDED)
    return Trajectory(rollout=rollout, calls=tuple(store_calls))


@pytest.mark.parametrize("mode", list(HistoryMode))
@pytest.mark.parametrize("name", ["codex", "claude-code", "openclaw"])
def test_eight_calls_are_one_row_in_mode_retain_and_what_the_wire_says_in_mode_template(
    home: Home, name: str, mode: HistoryMode, proxy_folder: Path
) -> None:
    ready(home, name)
    texts = [*(odd(name, n) for n in range(7)), THINK.format(n=7) + "fertig ✓"]
    with FileLock(home.harnesses / ".test.lock", timeout=600):
        completed, _, calls = asyncio.run(through_proxy(home, name, proxy_folder, texts, history=mode))
    ADAPTERS[name](home).check(completed, "")
    assert [call.tag for call in calls] == [CallTag.MAIN] * 8
    assert all(call.delivered and call.failure is None for call in calls)
    whole = trajectory(calls, name, proxy_folder)
    samples = merged_samples(whole)
    assert trained_tokens(samples) == sum(len(call.completion_ids) for call in calls)
    if mode is HistoryMode.RETAIN:
        assert len(samples) == 1, [call.fork_reason for call in calls]
        return
    store = open_store(home)
    bodies = [json.loads(store.blobs.get(call.request)) for call in calls]
    store.close()
    assert len(samples) == rows_from_the_wire(DIALECTS[name], bodies, texts)


# -- a real model ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineRecord]:
    """SmolLM2 on the embedded engine, under the name of its folder."""
    store = open_store(open_home(tmp_path_factory.mktemp("smollm2")))
    folder = add_model(store.home, "smollm2").path
    record = ensure_engine(store, folder, folder, options=EngineOptions(slots=2))
    yield record
    stop_engine(store, record.id)
    store.close()


@pytest.fixture
def store(home: Home, served: EngineRecord) -> Iterator[Store]:
    opened = open_store(home)
    opened.engines.put(served)
    yield opened
    opened.close()


@pytest.mark.model
@pytest.mark.parametrize("name", ["react", *SHOWN])
def test_a_session_with_a_real_model_is_recorded_whole(
    home: Home, name: str, store: Store, served: EngineRecord
) -> None:
    """An untrained model of 135 million parameters solves nothing here: the plumbing must hold."""
    if name != "react":
        ready(home, name)
    with FileLock(home.harnesses / ".test.lock", timeout=600):
        completed = asyncio.run(with_model(home, store, served.model, name))
    rollout, calls = store.rollouts.get("r1"), list(store.calls.of("r1"))
    assert rollout
    with suppress(PolicyEnd):
        make_harness(name, home).check(completed, rollout.end_reason)
    assert calls, completed.stderr[-2000:]
    answered = [call for call in calls if call.completion_ids]
    assert answered
    for call in answered:
        assert len(call.completion_ids) == len(call.logprobs or ())
        assert call.delivered
        assert call.failure is None
        assert store.blobs.get(call.request)
        assert store.blobs.get(call.response)


async def with_model(home: Home, store: Store, model: str, name: str) -> Any:
    services, router = ServiceHost(), EngineRouter(store)
    task = a_task(services=("helpdesk",))
    limits, sampling = Limits(calls=2, tokens=2048, context=8192), Sampling(max_tokens=32, seed=1)
    changes = {"harness": name, "task": task, "limits": limits, "sampling": sampling}
    store.rollouts.enqueue([a_rollout("r1", Path(model), **changes)])
    key = store.rollouts.issue_key("r1", "agent")
    services.open("r1", {"helpdesk": {"tickets": [{"id": 7}]}})
    app = create_proxy(ProxyContext(store, services, router, Adapters(tagger_of, stop_style)))
    try:
        async with hosted(home) as host:
            return await launched(home, host, store, Listening(app, home.run / "proxy" / "proxy.sock"), key)
    finally:
        await router.close()
