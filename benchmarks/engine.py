"""Speed of the embedded engine: `python benchmarks/engine.py [--model DIR] [--streams 1 8 16] [--rollouts 32 64]`.

Prints ratios against plain `generate` of transformers (bf16, sdpa, sampling, no top-k) on the same prompts in the same
run, alternating, best of `--repeat`; the bar is 0.9. The engine is measured in process, through the batcher: HTTP is
not included, except in the rows that say so. Then what KV reuse saves on a rollout's second call, and the tokens per
second of a step of RL: rollouts of 3 calls over a prompt of 330 tokens, 300 of them common to all. Ends 1 below a bar.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import torch
from transformers import AutoModelForCausalLM

from rollout.config import open_home
from training.engine.batcher import Batcher, Request
from training.models import add_model

BAR = 0.9
PROMPT, NEW = 64, 48
SHARED, OWN, CALLS, ANSWER, RESULT = 300, 30, 3, 40, 20
HTTP_START_S, HTTP_S = 120.0, 600.0


@dataclass(frozen=True)
class Best:
    """Tokens per second of the best round of each."""

    engine: float
    plain: float

    @property
    def ratio(self) -> float:
        return self.engine / self.plain


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(100, 40000) for _ in range(length)] for _ in range(count)]


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def run_batch(batcher: Batcher, batch: Sequence[Sequence[int]], new: int) -> dict[str, list[int]]:
    for k, prompt in enumerate(batch):
        batcher.submit(Request(str(k), tuple(prompt), new, seed=k))
    answers: dict[str, list[int]] = {str(k): [] for k in range(len(batch))}
    while not batcher.idle:
        for event in batcher.step():
            answers[event.request].append(event.token)
    return answers


@torch.no_grad()
def plain_generate(model: torch.nn.Module, batch: Sequence[Sequence[int]], new: int) -> None:
    ids = torch.tensor(batch)
    model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
    )


def compare(batcher: Batcher, model: torch.nn.Module, streams: int, repeat: int) -> Best:
    engine, plain = [], []
    for k in range(repeat):
        batch = prompts(streams, PROMPT, seed=1000 * streams + k)
        batcher.table.clear()
        engine.append(streams * NEW / seconds(lambda b=batch: run_batch(batcher, b, NEW)))
        plain.append(streams * NEW / seconds(lambda b=batch: plain_generate(model, b, NEW)))
    return Best(max(engine), max(plain))


def second_call(batcher: Batcher, repeat: int) -> tuple[float, float]:
    """Seconds to the first token of a second call, with its first call cached and without."""
    cached, fresh = [], []
    for k in range(repeat):
        [first] = prompts(1, 600, seed=k)
        batcher.table.clear()
        run_batch(batcher, [first], 1)
        second = first + prompts(1, RESULT, seed=k + 500)[0]
        cached.append(seconds(lambda p=second: run_batch(batcher, [p], 1)))
        batcher.table.clear()
        fresh.append(seconds(lambda p=second: run_batch(batcher, [p], 1)))
    return min(cached), min(fresh)


def first_prompts(rollouts: int) -> list[list[int]]:
    [common] = prompts(1, SHARED, seed=1)
    return [common + own for own in prompts(rollouts, OWN, seed=2)]


def rollouts_in_process(batcher: Batcher, rollouts: int) -> float:
    """Sampled tokens per second; every rollout goes on to its next call as soon as its answer is there."""
    batcher.table.clear()
    history = first_prompts(rollouts)
    calls = [0] * rollouts
    answers: list[list[int]] = [[] for _ in range(rollouts)]

    def submit(k: int) -> None:
        batcher.submit(Request(str(k), tuple(history[k]), ANSWER, seed=1000 * calls[k] + k))

    began = time.perf_counter()
    for k in range(rollouts):
        submit(k)
    while not batcher.idle:
        for event in batcher.step():
            k = int(event.request)
            answers[k].append(event.token)
            if event.finish:
                calls[k] += 1
                history[k] += answers[k][-ANSWER:] + prompts(1, RESULT, seed=k)[0]
                if calls[k] < CALLS:
                    submit(k)
    return sum(map(len, answers)) / (time.perf_counter() - began)


async def rollouts_over_http(url: str, rollouts: int) -> float:
    """The same through the server, streamed, with the client on the same cores."""
    sampled = 0

    async def one(session: aiohttp.ClientSession, k: int, history: list[int]) -> None:
        nonlocal sampled
        for call in range(CALLS):
            body = {"prompt": history, "max_tokens": ANSWER, "seed": 1000 * call + k, "stream": True, "logprobs": 1}
            async with session.post(f"{url}/v1/completions", json={**body, "ignore_eos": True}) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        ids = json.loads(line[6:])["choices"][0]["token_ids"]
                        sampled += len(ids)
                        history = history + ids
            history = history + prompts(1, RESULT, seed=k)[0]

    connector = aiohttp.TCPConnector(limit=0)
    began = time.perf_counter()
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(HTTP_S)) as session:
        await asyncio.gather(*(one(session, k, p) for k, p in enumerate(first_prompts(rollouts))))
    return sampled / (time.perf_counter() - began)


def over_http(folder: str, counts: Sequence[int]) -> list[float]:
    with tempfile.TemporaryDirectory() as scratch:
        port = Path(scratch) / "port"
        slots = str(max(counts, default=1))
        command = [sys.executable, "-m", "training.serve", "--model", folder, "--port-file", str(port)]
        process = subprocess.Popen([*command, "--slots", slots, "--max-len", "1024"])
        try:
            end = time.monotonic() + HTTP_START_S
            while not port.exists():
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit("the engine did not start")
                time.sleep(0.1)
            url = f"http://127.0.0.1:{port.read_text().strip()}"
            return [asyncio.run(rollouts_over_http(url, n)) for n in counts]
        finally:
            process.terminate()
            process.wait(20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder; default: smollm2 of OPENFORGE_HOME, added if it is not there")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 16])
    parser.add_argument("--rollouts", type=int, nargs="*", default=[32, 64])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--http", action="store_true", help="also the rollouts through the server")
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    torch.set_flush_denormal(True)
    folder = args.model or add_model(open_home(), "smollm2").path
    batcher = Batcher(folder, slots=max([*args.streams, *args.rollouts, 1]), max_len=1024)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    run_batch(batcher, prompts(1, PROMPT, seed=0), 4)
    plain_generate(model, prompts(1, PROMPT, seed=0), 4)
    below = False
    print(f"{torch.get_num_threads()} threads, prompts of {PROMPT}, {NEW} new tokens, in process (HTTP not included)")
    for streams in args.streams:
        best = compare(batcher, model, streams, args.repeat)
        below |= best.ratio < BAR
        print(
            f"{streams:3d} streams: engine {best.engine:6.1f} tok/s, generate {best.plain:6.1f}: ratio {best.ratio:.2f}"
        )
    cached, fresh = second_call(batcher, args.repeat)
    below |= cached >= fresh
    print(f"second call of 620 tokens: {cached:.3f} s with KV reuse, {fresh:.3f} s without: ratio {fresh / cached:.1f}")
    del model
    for n in args.rollouts:
        print(f"{n:3d} rollouts of {CALLS} calls x {ANSWER} tokens: {rollouts_in_process(batcher, n):6.1f} tok/s")
    print(f"peak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB")
    if args.http:
        del batcher
        for n, speed in zip(args.rollouts, over_http(folder, args.rollouts), strict=True):
            print(f"{n:3d} rollouts over HTTP: {speed:6.1f} tok/s")
    print(f"{'BELOW' if below else 'within'} the bar (ratio >= {BAR}, reuse faster than none)")
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
