"""Settings of distillation, SFT and RL; the presets in `configs/` fill them. Defaults are the demo's.

Values that the paper does not state are ours (docs/design/training.md); those of its table A1 stand in the presets.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A section of a preset."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RolloutSettings(Section):
    """Bounds of the rollouts that a training stage asks for."""

    max_tokens: int = Field(96, ge=1, le=65536)
    """Longest answer of one call, in tokens."""
    calls: int = Field(6, ge=1, le=1000)
    """Model calls of one rollout; the cap is a normal end that the policy caused."""
    tokens: int = Field(1024, ge=1)
    """Sampled tokens of one rollout."""
    context: int = Field(1024, ge=16)
    """Longest prompt + answer of a call, in tokens."""


class CleanConfig(Section):
    """Which successful trajectories stay out of the SFT data. The last three are the paper's browser rules."""

    min_reward: float = Field(1.0, ge=0, le=1)
    """Trajectories below it are dropped."""
    allow_policy_ends: bool = False
    """Keeps trajectories that ended at a cap or by a malformed call although they scored."""
    drop_identical_over: int = Field(0, ge=0)
    """More consecutive identical actions than this drop the trajectory (paper B.3: 5); 0 is off."""
    squash_identical_over: int = Field(0, ge=0)
    """Of a longer run of identical actions only the last turn is trained (paper B.3: 3); 0 is off."""
    shortest_per_task: bool = False
    """Of several successes of one task only the one with the fewest calls stays (paper B.3)."""


class DistillConfig(Section):
    """Teacher rollouts and rejection sampling."""

    teacher: str = "scripted:oracle"
    """A model name, or `scripted:oracle`, which plays each bundle's `solution/plan.json`."""
    shortcut_rate: float = Field(0.86, ge=0, le=1)
    """Scripted teacher only: probability of acting at once, without the check that the task calls for."""
    mistake_rate: float = Field(0.05, ge=0, le=1)
    """Scripted teacher only: probability of playing the plan's mistake."""
    attempts: int = Field(3, ge=1, le=64)
    """Teacher rollouts of each task (paper table 1: 3)."""
    keep: int = Field(256, ge=1)
    """Most trajectories in the dataset; families are kept in equal numbers as far as they go."""
    max_length: int = Field(768, ge=16)
    """Longest row in tokens; longer ones are dropped and counted."""
    merge: bool = True
    """Calls that extend each other become one row; `false` writes one row a call."""
    clean: CleanConfig = CleanConfig()
    rollout: RolloutSettings = RolloutSettings()
    temperature: float = Field(1.0, ge=0, le=2)
    """Sampling temperature of a real teacher."""
    seed: int = 0
    max_seconds: float = Field(900.0, gt=0)
    """Deadline for all teacher rollouts; what has not ended by then is dropped and counted."""

    @model_validator(mode="after")
    def _shares(self) -> DistillConfig:
        if self.shortcut_rate + self.mistake_rate > 1:
            raise ValueError("shortcut_rate and mistake_rate are shares of rollouts: together at most 1")
        return self


class OptimizerConfig(Section):
    """AdamW over float32 master weights."""

    lr: float = Field(2e-5, gt=0, le=1)
    """Peak learning rate."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up."""
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip: float = Field(1.0, gt=0)
    """Largest norm of the gradient."""


class SftConfig(Section):
    """Supervised fine-tuning on the teacher's recorded tokens, by TRL's SFTTrainer in a child process."""

    optimizer: OptimizerConfig = OptimizerConfig(lr=5e-4, warmup_steps=3)
    final_lr: float = Field(0.1, ge=0, le=1)
    """The learning rate falls linearly to this share of its peak."""
    batch: int = Field(4, ge=1)
    """Rows of one optimizer step."""
    epochs: float = Field(1.0, gt=0)
    max_steps: int = Field(0, ge=0)
    """Ends after so many steps whatever `epochs` says; 0 is off."""
    share_prefix: bool = True
    """Computes a prefix that rows of a batch share once: same loss and gradients, fewer operations."""
    batching: Literal["grouped", "mixed"] = "grouped"
    """`grouped` cuts batches inside a family, so that rows share their prefix, and shuffles the batches."""
    compute: Literal["bf16", "f32"] = "bf16"
    """Arithmetic of forward and backward; the master weights are always float32."""
    threads: int = Field(0, ge=0)
    """Threads of torch; 0 leaves its default."""
    save_every: int = Field(0, ge=0)
    """Steps between resumable checkpoints; 0 starts a killed run anew."""
    seed: int = 0
    max_seconds: float = Field(1800.0, gt=0)
    """Deadline of the child process; past it the stage fails."""


class LossConfig(Section):
    """The policy-gradient loss of one optimizer step."""

    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio new / old policy is clipped below 1 - this."""
    clip_high: float = Field(0.2, gt=0)
    """... and above 1 + this; larger than `clip_low` is DAPO's asymmetric clipping."""
    importance_cap: float = Field(2.0, ge=1)
    """Cap of the correction trainer / engine probability of each sampled token."""
    kl: float = Field(0.0, ge=0)
    """Coefficient of the k3 estimate of KL(policy || initial policy), in the loss."""
    entropy: float = Field(0.0, ge=0)
    """Coefficient of the entropy bonus."""


class TrainerConfig(Section):
    """The reference trainer."""

    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    optimizer_steps: int = Field(1, ge=1)
    """Optimizer steps of one batch, cut between trajectories."""
    pack_tokens: int = Field(1024, ge=16)
    """Distinct tokens of one forward pass; memory grows with it, the gradient does not depend on it."""
    share_prefix: bool = True
    """Computes the prefix that a group's rows share once: same loss and gradients, fewer operations."""
    compute: Literal["bf16", "f32"] = "bf16"
    """Arithmetic of forward and backward; the master weights are always float32."""
    threads: int = Field(0, ge=0)
    """Threads of torch; 0 leaves its default."""


class RlConfig(Section):
    """GRPO over groups of rollouts (paper sections 1, 2 and 6)."""

    trainer: TrainerConfig = TrainerConfig()
    tasks: int = Field(8, ge=1)
    """Tasks of one step (paper table A1: 8)."""
    group: int = Field(8, ge=1)
    """Rollouts of each task (paper table A1: 8)."""
    steps: int = Field(12, ge=0)
    max_seconds: float = Field(240.0, gt=0)
    """Wall clock of all steps together, over restarts; no step starts past it."""
    step_seconds: float = Field(300.0, gt=0)
    """Deadline of one step's rollouts; those missing then are named, dropped and cancelled."""
    gamma: float = Field(1.0, gt=0, le=1)
    std: bool = True
    """Divides the advantage by the group's standard deviation (GRPO's default)."""
    merge: bool = True
    """Trains merged rows; `false` is the paper's one sample a call. The gradient is the same."""
    weighting: Literal["token", "call"] = "token"
    """`token`: mean over all trained tokens of the batch; `call`: every call weighs the same."""
    policy_ends: Literal["keep", "drop"] = "keep"
    """Whether an end that the policy caused (cap, malformed call) is trained with its reward."""
    temperature: float = Field(1.0, gt=0, le=2)
    rollout: RolloutSettings = RolloutSettings()
    val_every: int = Field(4, ge=0)
    """Steps between validations; 0 never validates, and the last weights are kept."""
    val_tasks: int = Field(16, ge=1)
    """Tasks of the fixed validation set, the first of the split `validation` by id."""
    val_trials: int = Field(2, ge=1)
    malformed_bound: float = Field(0.1, gt=0, le=1)
    """Training stops when the share of rollouts with a malformed call passes this, and twice the first step's."""
    collapse_bound: float = Field(0.15, gt=0, le=1)
    """Training stops when validation falls more than this below its best."""
    parity_bound: float = Field(0.25, gt=0)
    """Largest mean difference, in nats a token, between the engine's and the trainer's log-probabilities in a step."""
    parity_mean: float = Field(0.05, gt=0)
    """The same before the first step, over 512 tokens sampled for fixed prompts; beyond it nothing is trained."""
    parity_max: float = Field(2.0, gt=0)
    """Largest difference of a single one of those tokens, in nats."""
    checkpoint_every: int = Field(4, ge=1)
    """Steps between saves of the whole trainer; later steps are replayed from their recorded rollouts."""
    seed: int = 0
