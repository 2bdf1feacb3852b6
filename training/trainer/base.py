"""The contract of an RL trainer: samples in, a changed policy out. Serves the RL loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rollout.types import TrainingSample


@dataclass(frozen=True)
class StepStats:
    """What one `step` did. Means are over trained tokens by their weights."""

    version: int
    """Version of the weights after the step."""
    loss: float
    tokens: int
    """Trained tokens."""
    computed: int
    """Tokens of all forward passes; below the rows' sum where prefixes are shared."""
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    """`grad_norm`, `lr`, `clipped`, `kl`, `entropy`, `mismatch` (nats between engine and trainer), ..."""


class Trainer(Protocol):
    """One policy under training. Not thread-safe."""

    @property
    def version(self) -> int:
        """Steps done so far: the version of the current weights."""
        ...

    def step(self, samples: Sequence[TrainingSample]) -> StepStats:
        """Updates the policy on one batch. Raises ValueError for an empty one."""
        ...

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[list[float]]:
        """Log-probability of each trained token of each sample under the current weights."""
        ...

    def save(self, folder: Path) -> None:
        """Writes everything that `load` needs to go on exactly here: weights, optimizer, random state, version."""
        ...

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote. Raises ConfigError when the folder does not fit."""
        ...

    def export(self, folder: Path) -> None:
        """Writes a Hugging Face folder of the weights in the compute type, as an engine serves them."""
        ...
