"""Bad HTTP at a real socket, byte by byte: whatever comes in, the next client is served and no record is wrong."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import pytest
from proxy_clients import PATHS, Talk
from proxy_fakes import Stage, until

from rollout.proxy import intake
from rollout.types import ModelCall

BODY = b'{"messages": [{"role": "user", "content": "hi"}]}'


def calls(stage: Stage) -> list[ModelCall]:
    return stage.store.calls.of("r")


def head(stage: Stage, length: int | None, *more: str, version: str = "1.1", path: str = "r") -> bytes:
    """A request up to its body."""
    lines = [f"POST /rollouts/{path}/v1/chat/completions HTTP/{version}", "Host: proxy"]
    lines += [f"Authorization: Bearer {stage.keys['r']}", *more]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return "\r\n".join([*lines, "", ""]).encode()


class Wire:
    """One connection to the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, stage: Stage) -> Wire:
        where = urlsplit(stage.url)
        return cls(*await asyncio.open_connection(where.hostname, where.port))

    async def send(self, data: bytes) -> Wire:
        self.writer.write(data)
        await self.writer.drain()
        return self

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of the next answer; (0, b"") where the server hung up."""
        async with asyncio.timeout(10):
            try:
                top = await self.reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                return 0, b""
            status = int(top.split()[1])
            fields = dict(line.lower().split(b": ", 1) for line in top.split(b"\r\n")[1:-2])
            size = fields.get(b"content-length")
            return status, await self.reader.readexactly(int(size)) if size else b""

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            return


async def still_serves(stage: Stage) -> None:
    before = len(calls(stage))
    assert (await stage.ask("r", BODY))[0] == 200
    assert len(calls(stage)) == before + 1


def stand(stage: Stage) -> None:
    stage.add("r")
    stage.engine.script = lambda asked: stage.say("ok")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "JSON"),
        (b'{"messages": [}', "JSON"),
        (b'["a"]', "object"),
        (b"\xff\xfe", "JSON"),
        (b"", "JSON"),
        (b'{"messages": [], "messages": []}', "twice"),
        (b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "twice"),
        (b'{"temperature": NaN, "messages": [{"role": "user", "content": "a"}]}', "NaN"),
        (b'{"max_tokens": 1e999, "messages": [{"role": "user", "content": "a"}]}', "large"),
        (b"[" * 100_000, "JSON"),
    ],
)
@pytest.mark.parametrize("dialect", list(PATHS))
def test_bodies_that_are_no_request_are_refused(proxy_stage: Any, dialect: str, body: bytes, said: str) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stand(stage)
            url = f"{stage.url}/rollouts/r/v1/{PATHS[dialect]}"
            headers = {"Authorization": f"Bearer {stage.keys['r']}"}
            async with stage.http.post(url, data=body, headers=headers) as response:
                assert response.status == 400
                assert said in (await response.json())["error"]["message"]
            assert calls(stage) == []
            await still_serves(stage)

    asyncio.run(main())


def test_lone_surrogates_become_replacement_characters(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stand(stage)
            assert (await stage.ask("r", b'{"messages": [{"role": "user", "content": "a\\ud83d b"}]}'))[0] == 200
            assert calls(stage)[0].messages[0]["content"] == "a? b"

    asyncio.run(main())


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "br", "deflate", "gzip, identity"])
def test_compressed_bodies_are_told(proxy_stage: Any, encoding: str) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stand(stage)
            status, answer = await stage.ask("r", BODY, headers={"Content-Encoding": encoding})
            assert (status, answer["error"]["code"]) == (415, "compressed")

    asyncio.run(main())


def test_a_client_of_http_1_0_is_served(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stand(stage)
            wire = await Wire.open(stage)
            status, body = await (await wire.send(head(stage, len(BODY), version="1.0") + BODY)).answer()
            assert (status, json.loads(body)["choices"][0]["message"]["content"]) == (200, "ok")
            await wire.close()

    asyncio.run(main())


def test_100_continue_is_answered_before_the_body(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stand(stage)
            wire = await Wire.open(stage)
            await wire.send(head(stage, len(BODY), "Expect: 100-continue"))
            assert (await wire.answer())[0] == 100
            assert (await (await wire.send(BODY)).answer())[0] == 200
            await wire.close()

    asyncio.run(main())


def test_pipelined_requests_are_answered_in_order(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stand(stage)
            stage.engine.script = lambda asked: stage.say(f"answer {len(stage.engine.asked)}")
            wire = await Wire.open(stage)
            bodies = [BODY[:-1] + b', "user": "%d"}' % n for n in range(3)]
            await wire.send(b"".join(head(stage, len(body)) + body for body in bodies))
            texts = [json.loads((await wire.answer())[1])["choices"][0]["message"]["content"] for _ in range(3)]
            assert texts == ["answer 1", "answer 2", "answer 3"]
            await wire.close()

    asyncio.run(main())


def test_headers_of_a_megabyte_are_refused_or_read_and_the_next_client_served(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stand(stage)
            wire = await Wire.open(stage)
            status = 0
            try:
                await wire.send(head(stage, len(BODY), "X-Big: " + "x" * 2**20) + BODY)
                status, _ = await wire.answer()
            except ConnectionError:
                pass
            assert status in (0, 200, 400, 431)
            await wire.close()
            await still_serves(stage)

    asyncio.run(main())


def test_a_body_shorter_than_declared_leaves_nothing(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stand(stage)
            wire = await Wire.open(stage)
            await wire.send(head(stage, len(BODY) + 10) + BODY)
            await asyncio.sleep(0.05)
            await wire.close()
            await asyncio.sleep(0.05)
            assert calls(stage) == []
            await still_serves(stage)

    asyncio.run(main())


def test_a_body_longer_than_declared_is_no_second_request(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stand(stage)
            wire = await Wire.open(stage)
            await wire.send(head(stage, len(BODY)) + BODY + b'{"rest": 1}\r\n\r\n')
            assert (await wire.answer())[0] in (200, 400)
            assert (await wire.answer())[0] in (0, 400)
            await wire.close()
            assert len(stage.engine.asked) <= 1
            await still_serves(stage)

    asyncio.run(main())


@pytest.mark.parametrize("length", ["-1", "abc", "1, 2", "+5"])
def test_lengths_that_are_none_are_refused(proxy_stage: Any, length: str) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stand(stage)
            wire = await Wire.open(stage)
            await wire.send(head(stage, None, f"Content-Length: {length}") + BODY)
            assert (await wire.answer())[0] in (0, 400, 413)
            await wire.close()
            assert calls(stage) == []
            await still_serves(stage)

    asyncio.run(main())


def test_a_slow_client_is_served_and_one_that_never_ends_is_given_up(
    proxy_stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "READ_S", 0.5)

    async def main() -> None:
        async with proxy_stage() as stage:
            stand(stage)
            slow, endless = await Wire.open(stage), await Wire.open(stage)
            await endless.send(head(stage, len(BODY)) + BODY[:5])
            await slow.send(head(stage, len(BODY)))
            for at in range(0, len(BODY), 10):
                await slow.send(BODY[at : at + 10])
                await asyncio.sleep(0.02)
            assert (await slow.answer())[0] == 200
            status, body = await endless.answer()
            assert (status, json.loads(body)["error"]["code"]) == (408, "too_slow")
            await slow.close()
            await endless.close()
            assert len(calls(stage)) == 1

    asyncio.run(main())


def test_a_client_that_vanishes_mid_stream_is_noticed(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stand(stage)
            stage.engine.script = lambda asked: stage.say("x" * 300, pause=0.02)
            body = BODY[:-1] + b', "stream": true}'
            wire = await (await Wire.open(stage)).send(head(stage, len(body)) + body)
            await wire.reader.readuntil(b"data: ")
            wire.writer.transport.abort()
            await until(lambda: stage.engine.aborted == 1, 1.0)
            await until(lambda: len(calls(stage)) == 1)
            assert calls(stage)[0].failure
            assert not calls(stage)[0].delivered

    asyncio.run(main())


@pytest.mark.parametrize("dialect", list(PATHS))
def test_unknown_revoked_and_foreign_keys(proxy_stage: Any, dialect: str) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stand(stage)
            stage.add("other")
            talk = Talk(stage, "r", dialect).user("a")
            mine = stage.keys["r"]
            for key in ("", "no", stage.keys["other"], mine[:-1], mine + "x", mine.upper()):
                stage.keys["r"] = key
                status, raw = await talk.post(talk.body())
                assert status == 401
                assert mine not in raw.decode()
            stage.keys["r"] = mine
            stage.store.rollouts.revoke_keys("r")
            assert stage.app
            stage.app.state.sessions.forget("r")
            assert (await talk.post(talk.body()))[0] == 401
            assert (calls(stage), stage.engine.asked) == ([], [])

    asyncio.run(main())


def test_an_id_outside_the_vocabulary_is_an_engine_error(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stand(stage)
            for wrong in (10**6, -1):
                reply = stage.say("ok")
                bad = type(reply)((*reply.ids[:-1], wrong, reply.ids[-1]))
                stage.engine.script = lambda asked, bad=bad: bad
                status, answer = await stage.ask("r", BODY)
                assert (status, answer["error"]["code"]) == (502, "engine_error")
                assert "vocabulary" in answer["error"]["message"]
                assert calls(stage)[-1].failure

    asyncio.run(main())


def test_an_engine_that_goes_on_after_its_end_is_an_engine_error(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stand(stage)
            stage.engine.script = lambda asked: stage.say("ok", fault="twice")
            status, answer = await stage.ask("r", BODY)
            assert (status, answer["error"]["code"]) == (502, "engine_error")
            assert calls(stage)[-1].failure

    asyncio.run(main())
