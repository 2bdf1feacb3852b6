"""`openforge rollouts show --raw` gives requests and answers byte for byte."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from proxy_fakes import a_rollout

from cli.rollouts import show
from rollout.config import open_home
from rollout.errors import ConfigError
from rollout.store import open_store
from rollout.types import ModelCall

WIRE = ((b'{ "messages" :[]}\xff', b'{"a": 1}'), (b'{"stream": true}', b"data: {}\n\ndata: [DONE]\n\n"))


@pytest.fixture
def rollout_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OPENFORGE_HOME", str(tmp_path / "home"))
    store = open_store(open_home())
    store.rollouts.enqueue([a_rollout("r", tmp_path), a_rollout("quiet", tmp_path)])
    for index, (request, response) in enumerate(WIRE):
        asyncio.run(store.calls.append(ModelCall(rollout_id="r", index=index, stream=index == 1), request, response))
    store.close()
    return "r"


def test_raw_prints_the_bytes_of_every_call_or_of_one(
    rollout_id: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert show(rollout_id, raw=True) == 0
    assert capfdbinary.readouterr().out == b"".join(sent + b"\n" for call in WIRE for sent in call)
    show(rollout_id, raw=True, call=1)
    assert capfdbinary.readouterr().out == WIRE[1][0] + b"\n" + WIRE[1][1] + b"\n"


def test_raw_into_a_folder_adds_nothing(rollout_id: str, tmp_path: Path) -> None:
    show(rollout_id, raw=True, out=tmp_path / "out")
    found = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert found == {
        "0000.request.json": WIRE[0][0],
        "0000.response.json": WIRE[0][1],
        "0001.request.json": WIRE[1][0],
        "0001.response.sse": WIRE[1][1],
    }


def test_a_call_that_is_not_there_is_named(rollout_id: str) -> None:
    with pytest.raises(ConfigError, match="no call 7; there are 0 to 1"):
        show(rollout_id, raw=True, call=7)
    with pytest.raises(ConfigError, match="none is recorded"):
        show("quiet", raw=True)


def test_one_call_is_shown_alone(rollout_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    show(rollout_id, json=True, call=1)
    assert '"index": 1' in (text := capsys.readouterr().out)
    assert '"index": 0' not in text
