"""The preset: one model per component, each owned by the package that uses it, composed here and nowhere else.

A file of `configs/` names only what differs from the defaults; `rollout.config.load_preset` reads it and names the
nearest key when one is unknown.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from evaluation.types import EvalConfig
from rollout.types import Limits, Sampling
from synthesis.config import SynthConfig
from training.config import DistillConfig, RlConfig, SftConfig


class ModelSection(BaseModel):
    """The student."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "smollm2"
    """A name of `openforge models list`; `smollm2` and `smollm2-tiny` are made when they are missing."""


class RunSection(BaseModel):
    """`openforge run`: one rollout by hand."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sampling: Sampling = Sampling()
    """Injected into every call."""
    limits: Limits = Limits()
    """Caps of the rollout; passing one is a normal end that the policy caused."""
    deadline_s: float = Field(3600.0, gt=0)
    """Longest wait for it, in seconds."""


class Preset(BaseModel):
    """All settings of an experiment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelSection = ModelSection()
    synth: SynthConfig = SynthConfig()
    distill: DistillConfig = DistillConfig()
    sft: SftConfig = SftConfig()
    rl: RlConfig = RlConfig()
    eval: EvalConfig = EvalConfig()
    rollout: RunSection = RunSection()
