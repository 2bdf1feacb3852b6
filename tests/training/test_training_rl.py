"""The RL loop with the real trainer on a tiny policy: it learns, survives kills, and keeps its bounds.

The engine is the exported weights themselves: the player samples from the folder that the loop told it to serve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training_fakes import Played, PlayedClient, save_policy, succeeded
from transformers import AutoModelForCausalLM

from rollout.client import seed_of
from rollout.config import open_home
from rollout.errors import FailureClass, InfrastructureError
from rollout.store import Store, open_store
from rollout.types import (
    Failure,
    ModelCall,
    ModelRef,
    Purpose,
    Rollout,
    RolloutState,
    StepRecord,
    TaskSpec,
    Verdict,
    VersionSpan,
)
from training.config import OptimizerConfig, RlConfig, TrainerConfig
from training.rl_loop import Curriculum, Parts, RlLoop, draw_tasks
from training.rl_state import LoopState, RunFolder
from training.trainer.reference import ReferenceTrainer

VOCAB = 32
TRAINER = TrainerConfig(compute="f32", optimizer=OptimizerConfig(lr=2e-2))
CONFIG = RlConfig(
    trainer=TRAINER,
    tasks=3,
    group=6,
    steps=6,
    val_every=2,
    val_tasks=2,
    val_trials=8,
    checkpoint_every=2,
    max_seconds=999,
    collapse_bound=1.0,
)


class FolderEngine:
    """Serves the folder that it was told to; counts what it was told."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.model: Any = None
        self.version = -1

    def ensure(self, path: Path, version: int) -> None:
        if version != self.version:
            self.told.append(version)
            self.version = version
            self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    @torch.no_grad()
    def answer(self, prompt: list[int], seed: int) -> tuple[int, float]:
        """One sampled token and its log-probability."""
        logits = self.model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        token = int(torch.multinomial(logits.exp(), 1, generator=torch.Generator().manual_seed(seed)))
        return token, float(logits[token])


def tasks(count: int) -> tuple[TaskSpec, ...]:
    return tuple(TaskSpec(id=f"t{k}", instruction="x", bundle="/b", digest="d") for k in range(count))


Change = Callable[[Rollout, ModelCall], Played | None]


class World:
    """One home, whose loop can be started again."""

    def __init__(self, root: Path, change: Change | None = None) -> None:
        self.store: Store = open_store(open_home(root / "home"))
        self.policy = save_policy(root / "policy", vocab=VOCAB)
        self.engine = FolderEngine()
        self.client = PlayedClient(self.store, self.play)
        self.change = change
        self.folder = RunFolder(root / "work", "run", "default")

    def play(self, rollout: Rollout) -> Played | None:
        """Reward 1 for an even token. The prompt names the task."""
        prompt = [5, 6, 7, 8 + int(rollout.task_id[1:])]
        token, logprob = self.engine.answer(prompt, rollout.sampling.seed)
        call = ModelCall(
            rollout_id=rollout.id,
            index=0,
            prompt_ids=tuple(prompt),
            completion_ids=(token,),
            logprobs=(logprob,),
            versions=(VersionSpan(version=self.engine.version, tokens=1),),
            delivered=True,
        )
        if self.change and (changed := self.change(rollout, call)) is not None:
            return changed if changed.rollout.id else None
        reward = 1.0 - token % 2
        return Played(succeeded(rollout, verdict=Verdict(reward=reward, passed=reward == 1.0)), (call,))

    def loop(self, config: RlConfig = CONFIG, progress: Callable[[str, int, int], None] = lambda *_: None) -> RlLoop:
        parts = Parts(
            store=self.store,
            client=self.client,
            trainer=ReferenceTrainer(self.policy, config.trainer),
            engine=self.engine,
            folder=self.folder,
            progress=progress,
        )
        lessons = Curriculum("run", ModelRef(name="tiny"), self.policy, tasks(6), tasks(8)[6:])
        return RlLoop(parts, lessons, config)

    def steps(self, kind: str = "rl") -> list[StepRecord]:
        found = [s for s in self.store.records.all(StepRecord, run="run") if s.kind == kind]
        return sorted(found, key=lambda s: s.step)

    def weights(self, folder: str) -> dict[str, torch.Tensor]:
        return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(change: Change | None = None) -> World:
        made.append(World(tmp_path / str(len(made)), change))
        return made[-1]

    yield make
    for world in made:
        world.store.close()


def test_it_learns_and_writes_one_row_a_step(worlds: Callable[..., World]) -> None:
    world = worlds()
    state = world.loop(CONFIG.model_copy(update={"steps": 8, "val_every": 4})).run()
    steps, validations = world.steps(), world.steps("validation")
    assert [s.step for s in steps] == list(range(8))
    assert [s.step for s in validations] == [0, 4, 8]
    assert (state.step, state.stopped, state.validated) == (8, "", 8)
    rewards = [s.reward_mean for s in validations if s.reward_mean is not None]
    assert rewards[-1] >= rewards[0] + 0.2
    assert state.best_score == max(rewards)
    assert all(s.started == s.finished == 18 and s.group_sizes == (6, 6, 6) for s in steps)
    assert all(s.metrics["mismatch"] < 1e-4 for s in steps if s.mixed_groups)
    assert all(s.tokens == s.samples == 6 * s.mixed_groups for s in steps)
    assert [s.weight_version for s in steps] == sorted(s.weight_version for s in steps)
    assert (Path(state.best_weights) / "openforge.json").exists()


def test_each_step_samples_under_its_own_weights(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.loop().run()
    for step in world.steps():
        ids = [r.id for r in world.store.rollouts.query(run="run") if r.id.startswith(f"run-s{step.step:04d}-")]
        calls = [c for t in world.client.trajectories(world.client.wait(ids, 1.0)) for c in t.calls]
        assert {c.versions[0].version for c in calls} == {step.weight_version}
    assert world.engine.told == sorted(world.engine.told)


def test_only_mixed_groups_are_trained_and_none_means_no_step(worlds: Callable[..., World]) -> None:
    world = worlds(lambda r, c: Played(succeeded(r, verdict=Verdict(reward=1.0, passed=True)), (c,)))
    state = world.loop().run()
    assert world.engine.told == [0]
    assert all((s.mixed_groups, s.samples, s.tokens, s.loss) == (0, 0, 0, None) for s in world.steps())
    assert state.best_weights == str(world.policy)


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the loop runs after it."""


@pytest.mark.parametrize("moment", ["step 4: rollouts", "step 4: training", "step 4: reward", "validation at step 4"])
def test_a_killed_run_goes_on_to_the_same_end(worlds: Callable[..., World], moment: str) -> None:
    whole, broken = worlds(), worlds()
    expected = whole.loop().run()
    left = [5 if "rollouts" in moment or "validation" in moment else 1]

    def kill(label: str, _done: int, _total: int) -> None:
        if label.startswith(moment):
            left[0] -= 1
            if left[0] == 0:
                raise Killed

    with pytest.raises(Killed):
        broken.loop(progress=kill).run()
    found = broken.loop().run()
    relative = {"best_weights": "", "seconds": 0.0}
    assert found.model_copy(update=relative) == expected.model_copy(update=relative)
    assert max(broken.client.plays.values()) == 1
    assert broken.client.plays == whole.client.plays
    mine, theirs = (_comparable(w.steps() + w.steps("validation")) for w in (broken, whole))
    assert mine == theirs
    a, b = broken.weights(found.best_weights), whole.weights(expected.best_weights)
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=0.0, rtol=0.0)


def _comparable(steps: list[StepRecord]) -> list[StepRecord]:
    metrics = [{k: v for k, v in s.metrics.items() if k != "train_seconds"} for s in steps]
    return [s.model_copy(update={"seconds": 0.0, "metrics": m}) for s, m in zip(steps, metrics, strict=True)]


def test_bug_59_failed_rollouts_give_no_rows_and_bug_61_a_smaller_group(worlds: Callable[..., World]) -> None:
    def change(rollout: Rollout, call: ModelCall) -> Played | None:
        if rollout.purpose is Purpose.TRAIN and rollout.start_index < 2:
            failure = Failure(kind=FailureClass.INFRASTRUCTURE)
            return Played(rollout.model_copy(update={"state": RolloutState.FAILED, "failure": failure}), (call,))
        return None

    world = worlds(change)
    world.loop(CONFIG.model_copy(update={"steps": 2})).run()
    for step in world.steps():
        assert step.dropped == {"infrastructure": 6}
        assert step.group_sizes == (4, 4, 4)
        assert step.finished == 12
        assert step.samples == 4 * step.mixed_groups


def test_bug_57_a_rollout_that_never_ends_is_left_out_and_the_step_goes_on(
    worlds: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    never = "run-s0000-"

    def change(rollout: Rollout, _call: ModelCall) -> Played | None:
        stuck = rollout.id.startswith(never) and rollout.start_index == 5
        return Played(rollout.model_copy(update={"id": ""})) if stuck else None

    world = worlds(change)
    world.loop(CONFIG.model_copy(update={"steps": 1})).run()
    [step] = world.steps()
    assert step.dropped == {"missing": 3}
    assert step.group_sizes == (5, 5, 5)
    assert len(world.store.rollouts.to_cancel()) == 3
    assert sum("did not end within" in message for message in caplog.messages) == 3


def test_bug_58_a_step_without_any_sample_says_why(worlds: Callable[..., World]) -> None:
    failure = Failure(kind=FailureClass.HARNESS)
    world = worlds(lambda r, c: Played(r.model_copy(update={"state": RolloutState.FAILED, "failure": failure})))
    with pytest.raises(InfrastructureError, match=r"step 1 gave samples: \{'harness': 18\}"):
        world.loop().run()


def test_malformed_calls_out_of_bounds_stop_the_run_and_keep_the_best(worlds: Callable[..., World]) -> None:
    def change(rollout: Rollout, call: ModelCall) -> Played | None:
        if not rollout.id.startswith("run-s0003-"):
            return None
        return Played(
            succeeded(rollout, end_reason="malformed", verdict=Verdict(reward=0.0, passed=False)),
            (call.model_copy(update={"malformed": True}),),
        )

    world = worlds(change)
    state = world.loop().run()
    assert (state.stopped, state.step) == ("malformed", 4)
    assert world.steps()[-1].metrics["malformed_share"] == 1.0
    assert state.best_step in (0, 2)
    assert Path(state.best_weights).exists()


def test_a_policy_that_starts_malformed_is_not_stopped_for_it(worlds: Callable[..., World]) -> None:
    def change(rollout: Rollout, call: ModelCall) -> Played | None:
        if rollout.start_index != 0:
            return None
        return Played(
            succeeded(rollout, end_reason="malformed", verdict=Verdict(reward=0.0, passed=False)),
            (call.model_copy(update={"malformed": True}),),
        )

    assert worlds(change).loop(CONFIG.model_copy(update={"steps": 3})).run().stopped == ""


def test_a_collapse_stops_the_run_and_restores_the_best(worlds: Callable[..., World]) -> None:
    def change(rollout: Rollout, call: ModelCall) -> Played | None:
        if rollout.purpose is not Purpose.VALIDATE:
            return None
        reward = 0.0 if rollout.id.startswith("run-v0004") else 1.0
        return Played(succeeded(rollout, verdict=Verdict(reward=reward, passed=reward == 1.0)), (call,))

    world = worlds(change)
    config = CONFIG.model_copy(update={"collapse_bound": 0.15})
    state = world.loop(config).run()
    assert (state.stopped, state.step, state.best_step, state.best_score) == ("collapse", 4, 2, 1.0)
    assert [s.step for s in world.steps("validation")] == [0, 2, 4]
    assert Path(state.best_weights).exists()
    assert world.loop(config).run().stopped == "collapse"


def test_the_wall_clock_cap_starts_no_further_step(worlds: Callable[..., World]) -> None:
    world = worlds()
    state = world.loop(CONFIG.model_copy(update={"max_seconds": 1e-3})).run()
    assert (state.step, state.stopped, state.validated) == (0, "", 0)
    assert world.steps() == []


def test_without_validation_the_last_weights_are_kept(worlds: Callable[..., World]) -> None:
    world = worlds()
    state = world.loop(CONFIG.model_copy(update={"val_every": 0, "steps": 3})).run()
    assert world.steps("validation") == []
    last = max(p.name for p in (world.folder.root / "weights").iterdir())
    assert Path(state.best_weights).name == last
    assert len(list((world.folder.root / "weights").iterdir())) <= 3


def test_an_engine_on_other_weights_is_noticed(worlds: Callable[..., World]) -> None:
    world = worlds()
    other = save_policy(world.policy.parent / "other", layers=3, vocab=VOCAB)
    real = world.engine.ensure
    world.engine.ensure = lambda path, version: real(other, version)  # type: ignore[method-assign]
    with pytest.raises(InfrastructureError, match="nats a token"):
        world.loop().run()


def test_tasks_are_drawn_without_replacement_and_by_seed_alone() -> None:
    pool = tasks(10)
    epoch = [t.id for step in range(3) for t in draw_tasks(pool, step, 3, seed=1)]
    assert len(set(epoch)) == 9
    second = [t.id for step in range(3, 6) for t in draw_tasks(pool, step, 3, seed=1)]
    assert len(set(second)) == 9
    assert epoch != second
    assert draw_tasks(pool[::-1], 2, 3, seed=1) == draw_tasks(pool, 2, 3, seed=1)
    assert [t.id for t in draw_tasks(pool, 0, 3, seed=2)] != epoch[:3]
    assert len(draw_tasks(pool[:2], 7, 8, seed=1)) == 2


def test_seeds_differ_between_steps_and_agree_between_validations(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.loop().run()
    asked = world.store.rollouts.query(run="run")
    train = [r.sampling.seed for r in asked if r.purpose is Purpose.TRAIN]
    assert len(set(train)) == len(train)
    by_step = {step: [r.sampling.seed for r in asked if r.id.startswith(f"run-v{step:04d}")] for step in (0, 2, 4, 6)}
    assert len({tuple(sorted(seeds)) for seeds in by_step.values()}) == 1
    assert seed_of(0, "validation") not in train


def test_states_and_weights_are_pruned(worlds: Callable[..., World]) -> None:
    world = worlds()
    state = world.loop().run()
    assert [p.name for p in sorted((world.folder.root / "state").iterdir())] == ["0004", "0006"]
    assert len(list((world.folder.root / "weights").iterdir())) <= 4
    assert LoopState.model_validate_json((world.folder.root / "state" / "0006" / "loop.json").read_text()) == state
