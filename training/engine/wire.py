"""The shapes of the engine's HTTP API: the subset of vLLM's that the proxy uses. What cannot be honoured is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from training.engine.batcher import Event


class CompletionRequest(BaseModel):
    """`POST /v1/completions`. Fields that vLLM has and this engine has not may only carry their neutral value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = ""
    prompt: list[Annotated[int, Field(ge=0)]]
    """Token ids; text is not accepted."""
    max_tokens: int = Field(256, ge=1)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = None
    stop_token_ids: list[int] = []
    """Beside the model's own end ids. The id that stopped it is part of the answer."""
    ignore_eos: bool = False
    """The model's own end ids do not stop it."""
    stream: bool = False
    logprobs: Literal[0, 1] | None = None
    return_token_ids: bool = True
    n: Literal[1] = 1
    echo: Literal[False] = False
    top_k: Literal[-1, 0] = 0
    min_p: Literal[0] = 0
    stop: list[str] | None = Field(None, max_length=0)
    skip_special_tokens: bool = True
    """Without meaning here: the answer holds no text."""
    request_id: str = ""
    """Without meaning here: shown in no log."""


class UpdateRequest(BaseModel):
    """`POST /update_weights`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    """Folder that a `save_pretrained` wrote."""
    version: int = Field(ge=0)


def choice(events: Sequence[Event], *, logprobs: bool) -> dict[str, Any]:
    """One choice that holds the ids of `events` (all of one version)."""
    return {
        "index": 0,
        "text": "",
        "token_ids": [e.token for e in events],
        "logprobs": {"tokens": [], "token_logprobs": [e.logprob for e in events]} if logprobs else None,
        "finish_reason": events[-1].finish or None,
    }


def by_version(events: Sequence[Event]) -> Iterator[tuple[int, list[Event]]]:
    for version, group in groupby(events, key=lambda e: e.version):
        yield version, list(group)


def error(message: str, kind: str, status: int) -> dict[str, Any]:
    """vLLM's error body."""
    return {"error": {"message": message, "type": kind, "code": status}}
