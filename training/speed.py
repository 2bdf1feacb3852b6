"""`python -m training.speed`: bf16 against float32 matrix products on this processor, as one line of JSON.

Processors without bf16 units emulate them, several times slower than float32: `openforge doctor` then advises a
smaller preset.
"""

from __future__ import annotations

import json
import time

import torch

SIZE = 768
ROUNDS = 8


def gflops(dtype: torch.dtype) -> float:
    """Best of `ROUNDS` products of two SIZE x SIZE matrices, in 10^9 operations a second."""
    a = torch.randn(SIZE, SIZE).to(dtype)
    b = torch.randn(SIZE, SIZE).to(dtype)
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * SIZE**3 / best / 1e9


def measure() -> dict[str, float]:
    f32, bf16 = gflops(torch.float32), gflops(torch.bfloat16)
    return {"f32_gflops": f32, "bf16_gflops": bf16, "bf16_over_f32": bf16 / f32}


if __name__ == "__main__":
    print(json.dumps(measure()))
