"""The RL loop: synchronous GRPO steps over groups of rollouts (paper sections 1, 2 and 6).

One step: draw tasks -> group rollouts -> trajectories -> samples -> advantages -> one trainer step -> new weights in
the engine -> ledger row. Nothing is sampled under weights in training: the engine serves version v while step v's
rollouts run. All ids depend on run, step and task alone, so a loop that starts again from its last checkpoint finds
the rollouts of later steps in the store and repeats only the arithmetic.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Protocol

from rollout.client import Plan, make_rollouts, seed_of
from rollout.errors import InfrastructureError
from rollout.store import Store
from rollout.types import CallTag, Limits, ModelRef, Purpose, Rollout, Sampling, StepRecord, TaskSpec, Trajectory
from training.advantage import Scored, by_group, mixed, with_advantages
from training.collect import Progress, RolloutSource, Sorted, Wait, collect, sort_by_end
from training.config import RlConfig
from training.rl_state import LoopState, RunFolder
from training.samples import SampleRules, make_samples, split_calls
from training.trainer.base import StepStats, Trainer

log = logging.getLogger(__name__)
UNATTRIBUTED_BOUND = 0.02
ENGINE_CHECK_S = 2.0


class PolicyEngine(Protocol):
    """The engine that this run alone uses."""

    def ensure(self, path: Path, version: int) -> None:
        """Returns when a live engine serves exactly these weights; starts or updates one if need be."""
        ...


@dataclass(frozen=True)
class Parts:
    """What the loop works with."""

    store: Store
    client: RolloutSource
    trainer: Trainer
    engine: PolicyEngine
    folder: RunFolder
    progress: Progress


@dataclass(frozen=True)
class Curriculum:
    """Who is trained on what."""

    run: str
    model: ModelRef
    path: Path
    """Folder of the initial policy: version 0."""
    tasks: tuple[TaskSpec, ...]
    validation: tuple[TaskSpec, ...]


def draw_tasks(tasks: Sequence[TaskSpec], step: int, count: int, seed: int) -> list[TaskSpec]:
    """The step's tasks: each epoch is a shuffle of all tasks, cut into whole steps, its remainder left out."""
    count = min(count, len(tasks))
    epoch, place = divmod(step, len(tasks) // count)
    order = sorted(tasks, key=lambda t: t.id)
    random.Random(f"{seed}-{epoch}").shuffle(order)
    return order[place * count : (place + 1) * count]


class RlLoop:
    def __init__(self, parts: Parts, curriculum: Curriculum, config: RlConfig) -> None:
        self._parts, self._curriculum, self._config = parts, curriculum, config

    def run(self) -> LoopState:
        """Trains to the end and returns the last state, whose `best_weights` is the policy to keep."""
        trainer, folder = self._parts.trainer, self._parts.folder
        state = folder.resume(trainer) or LoopState(best_weights=str(self._curriculum.path))
        if state.step == 0:
            state = self._validate(state)
        while not self._over(state):
            state = self._step(state)
            if not state.stopped and self._config.val_every and state.step % self._config.val_every == 0:
                state = self._validate(state)
            folder.prune(trainer.version, state)
            if state.step % self._config.checkpoint_every == 0:
                folder.checkpoint(trainer, state)
        if state.validated != state.step and not state.stopped:
            state = self._validate(state)
        folder.checkpoint(trainer, state)
        return state

    def _over(self, state: LoopState) -> bool:
        spent = state.seconds >= self._config.max_seconds
        return bool(state.stopped) or spent or state.step >= self._config.steps

    def _weights(self) -> Path:
        """Folder of the trainer's current weights, written if it is not there yet."""
        version = self._parts.trainer.version
        if version and not self._parts.folder.has_weights(version):
            self._parts.folder.export(self._parts.trainer)
        return self._parts.folder.weights(version) if version else self._curriculum.path

    def _serve(self) -> None:
        self._parts.engine.ensure(self._weights(), self._parts.trainer.version)

    # -- rollouts

    def _rollouts(self, tasks: Sequence[TaskSpec], label: str, purpose: Purpose, n: int) -> list[Rollout]:
        """n rollouts of each task under ids that begin with run and label; validation has the same seeds each time."""
        config, bounds = self._config, self._config.rollout
        plan = Plan(
            run=f"{self._curriculum.run}-{label}",
            purpose=purpose,
            model=self._curriculum.model,
            sampling=Sampling(temperature=config.temperature, max_tokens=bounds.max_tokens),
            limits=Limits(calls=bounds.calls, tokens=bounds.tokens, context=bounds.context),
            seed=seed_of(config.seed, label if purpose is Purpose.TRAIN else "validation"),
        )
        return [r.model_copy(update={"run": self._curriculum.run}) for r in make_rollouts(tasks, plan, n)]

    def _collect(self, rollouts: Sequence[Rollout], label: str) -> Sorted:
        """Waits for the rollouts under the current weights. Those that ended in an earlier life need no engine."""
        ids = [r.id for r in rollouts]
        if len(self._parts.client.done(ids)) < len(ids):
            self._serve()
        checked = time.monotonic()

        def watch(text: str, done: int, total: int) -> None:
            nonlocal checked
            if time.monotonic() - checked > ENGINE_CHECK_S:
                self._serve()
                checked = time.monotonic()
            self._parts.progress(text, done, total)

        wait = Wait(self._config.step_seconds, label, watch)
        collected = collect(self._parts.store, self._parts.client, rollouts, wait)
        for rollout_id in collected.missing:
            log.warning("%s: rollout %s did not end within %.0f s", label, rollout_id, self._config.step_seconds)
        return sort_by_end(collected, self._config.policy_ends)

    # -- training

    def _step(self, state: LoopState) -> LoopState:
        began, config = time.monotonic(), self._config
        tasks = draw_tasks(self._curriculum.tasks, state.step, config.tasks, config.seed)
        rollouts = self._rollouts(tasks, f"s{state.step:04d}", Purpose.TRAIN, config.group)
        ended = self._collect(rollouts, f"step {state.step + 1}: rollouts")
        if not ended.usable:
            raise InfrastructureError(f"no rollout of step {state.step + 1} gave samples: {dict(ended.dropped)}")
        sampled_under = self._parts.trainer.version
        self._parts.progress(f"step {state.step + 1}: training", state.step, config.steps)
        scored, calls = score(ended.usable, config, sampled_under)
        groups = by_group(scored)
        samples = with_advantages(groups, gamma=config.gamma, std=config.std)
        stats = self._parts.trainer.step(samples) if samples else None
        if stats is not None:
            self._check_parity(stats)
        record = StepRecord(
            run=self._curriculum.run,
            kind="rl",
            step=state.step,
            weight_version=sampled_under,
            started=len(rollouts),
            finished=len(ended.usable),
            dropped=dict(ended.dropped),
            group_sizes=tuple(len(g) for g in groups.values()),
            mixed_groups=sum(mixed(g, config.gamma) for g in groups.values()),
            samples=len(samples),
            tokens=stats.tokens if stats else 0,
            reward_mean=fmean(t.reward or 0.0 for t in ended.usable),
            loss=stats.loss if stats else None,
            metrics={**episode_metrics(ended.usable), **calls, **(train_metrics(stats) if stats else {})},
            seconds=time.monotonic() - began,
        )
        return self._after(state, self._commit(record, f"rl-{state.step:04d}"))

    def _after(self, state: LoopState, record: StepRecord) -> LoopState:
        """The state after a committed step; it stops when malformed calls are out of bounds.

        Without validation the weights to keep are the last ones whose rollouts stayed within bounds.
        """
        malformed = record.metrics["malformed_share"]
        first = malformed if state.first_malformed is None else state.first_malformed
        stop = "malformed" if malformed > max(self._config.malformed_bound, 2 * first) else ""
        self._parts.progress(
            f"step {state.step + 1}: reward {record.reward_mean:.2f}", state.step + 1, self._config.steps
        )
        update = {"step": state.step + 1, "seconds": state.seconds + record.seconds, "stopped": stop}
        if not self._config.val_every and not stop:
            sampled = record.weight_version
            update["best_weights"] = str(self._parts.folder.weights(sampled) if sampled else self._curriculum.path)
        return state.model_copy(update={**update, "first_malformed": first})

    def _commit(self, record: StepRecord, key: str) -> StepRecord:
        """Writes the ledger row; a repeated step keeps the seconds that it took the first time."""
        known = self._parts.store.records.get(StepRecord, run=record.run, key=key)
        if known is not None:
            record = record.model_copy(update={"seconds": known.seconds})
        self._parts.store.records.put(record, run=record.run, key=key)
        return record

    def _check_parity(self, stats: StepStats) -> None:
        gap = stats.metrics.get("mismatch", 0.0)
        if gap > self._config.parity_bound:
            raise InfrastructureError(
                f"engine and trainer disagree by {gap:.3f} nats a token (bound {self._config.parity_bound}): "
                "they do not hold the same weights, or not the same sampling temperature"
            )

    # -- validation

    def _validate(self, state: LoopState) -> LoopState:
        """Scores the current weights on the fixed set, keeps them when none were better, stops on a collapse."""
        config, version = self._config, self._parts.trainer.version
        if not config.val_every or not self._curriculum.validation:
            return state.model_copy(update={"best_weights": str(self._weights()), "validated": state.step})
        began = time.monotonic()
        tasks = self._curriculum.validation[: config.val_tasks]
        rollouts = self._rollouts(tasks, f"v{state.step:04d}", Purpose.VALIDATE, config.val_trials)
        ended = self._collect(rollouts, f"validation at step {state.step}")
        score = fmean(t.reward or 0.0 for t in ended.usable) if ended.usable else None
        record = StepRecord(
            run=self._curriculum.run,
            kind="validation",
            step=state.step,
            weight_version=version,
            started=len(rollouts),
            finished=len(ended.usable),
            dropped=dict(ended.dropped),
            reward_mean=score,
            metrics=episode_metrics(ended.usable),
            seconds=time.monotonic() - began,
        )
        record = self._commit(record, f"validation-{state.step:04d}")
        update: dict[str, object] = {"validated": state.step, "seconds": state.seconds + record.seconds}
        best = state.best_score
        if score is not None and (best is None or score >= best):
            update |= {"best_score": score, "best_step": state.step, "best_weights": str(self._weights())}
        elif score is not None and best is not None and score < best - config.collapse_bound:
            update["stopped"] = "collapse"
        return state.model_copy(update=update)


def score(trajectories: Sequence[Trajectory], config: RlConfig, version: int) -> tuple[list[Scored], dict[str, float]]:
    """Samples of the trajectories, and how many calls were left out for which reason (`calls_<reason>`).

    `version` is the trainer's: a call sampled under other weights is left out as `stale`.
    """
    rules = SampleRules(weighting=config.weighting, version=version)
    scored: list[Scored] = []
    dropped: Counter[str] = Counter()
    for trajectory in trajectories:
        split = split_calls(trajectory, rules)
        dropped.update(split.dropped)
        if split.kept and trajectory.reward is not None:
            samples = tuple(make_samples(trajectory, rules, merge=config.merge))
            scored.append(Scored(trajectory.rollout.group_id, trajectory.reward, len(split.kept), samples))
    total = sum(len(t.calls) for t in trajectories)
    if dropped["unattributed"] > UNATTRIBUTED_BOUND * total:
        share = dropped["unattributed"] / total
        tagged = (t.rollout.id for t in trajectories if any(c.tag is CallTag.UNATTRIBUTED for c in t.calls))
        log.warning("%.0f %% of the step's calls are unattributed, e.g. in %s", 100 * share, next(tagged))
    return scored, {f"calls_{reason}": float(count) for reason, count in dropped.items()}


def episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means and shares over rollouts: length, malformed calls, ends that the policy caused."""
    if not trajectories:
        return {}
    return {
        "calls_mean": fmean(len(t.calls) for t in trajectories),
        "tokens_mean": fmean(sum(len(c.completion_ids) for c in t.calls) for t in trajectories),
        "malformed_share": fmean(any(c.malformed for c in t.calls) for t in trajectories),
        "policy_end_share": fmean(bool(t.rollout.end_reason) for t in trajectories),
    }


def train_metrics(stats: StepStats) -> dict[str, float]:
    return {**stats.metrics, "train_seconds": stats.seconds, "computed_tokens": float(stats.computed)}
