"""Evaluation against a real store; only the processes that would run the rollouts are played by a fake client."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest

from evaluation.run import demo_json, eval_run, evaluate, passes, summary
from evaluation.types import EvalConfig, ModelSummary
from rollout.client import RolloutClient
from rollout.errors import Cancelled, ConfigError, FailureClass, PhaseTimeout
from rollout.store import Store
from rollout.types import (
    Failure,
    ModelRef,
    Provenance,
    Purpose,
    ResultRecord,
    Rollout,
    RolloutState,
    Sampling,
    StageRecord,
    TaskSpec,
    Verdict,
)

MODEL = ModelRef(name="smollm2", digest="abc")
Judge = Callable[[Rollout], float | FailureClass]


class PlayedClient:
    """Enqueues for real; `wait` takes each queued rollout through its states to the end that `judge` names."""

    def __init__(self, store: Store, judge: Judge) -> None:
        self.client = RolloutClient(store)
        self.store = store
        self.judge = judge
        self.submitted = 0

    def submit(self, rollouts: Sequence[Rollout]) -> list[str]:
        self.submitted += 1
        return self.client.submit(rollouts)

    def wait(
        self, ids: Sequence[str], deadline_s: float, progress: Callable[[int, int], None] | None = None
    ) -> list[Rollout]:
        for rollout in self.store.rollouts.claim("played", len(ids), 60.0):
            self._end(rollout)
        latest = self.store.rollouts.latest(ids)
        if progress:
            progress(len(ids), len(ids))
        return [latest[i] for i in ids]

    def _end(self, rollout: Rollout) -> None:
        verdict = self.judge(rollout)
        self.store.rollouts.note_call(rollout.id, 7, 0)
        if isinstance(verdict, FailureClass):
            states = {FailureClass.TIMEOUT: RolloutState.TIMED_OUT, FailureClass.CANCELLED: RolloutState.CANCELLED}
            failure = Failure(kind=verdict, phase="agent")
            self.store.rollouts.finish(rollout, states.get(verdict, RolloutState.FAILED), failure)
            return
        for state in (RolloutState.RUNNING, RolloutState.VERIFYING):
            rollout = self.store.rollouts.advance(rollout, state=state) or rollout
        found = Verdict(reward=verdict, passed=verdict >= 1)
        self.store.rollouts.advance(rollout, state=RolloutState.SUCCEEDED, verdict=found, ended=rollout.created + 5)


def tasks(n: int, family: str = "merged") -> list[TaskSpec]:
    return [
        TaskSpec(id=f"{family}-{i}", instruction="x", bundle="/b", digest="d", provenance=Provenance(family=family))
        for i in range(n)
    ]


def call(store: Store, client: PlayedClient, chosen: Sequence[TaskSpec], **changes: object) -> ResultRecord:
    given = {"run": "demo", "label": "sft", "model": MODEL, "progress": lambda *_: None, **changes}
    config = given.pop("config", EvalConfig(sampling=Sampling(temperature=0.7, max_tokens=40)))
    return evaluate(store, config, tasks=chosen, client=client, **given)  # type: ignore[arg-type]


def test_result_has_every_trial_in_order_and_what_it_was_sampled_with(store: Store) -> None:
    seen: list[tuple[str, int, int]] = []
    client = PlayedClient(store, lambda r: float(r.start_index < 2))
    result = call(store, client, tasks(2), progress=lambda *step: seen.append(step))
    assert result.trials == {"merged-0": [1.0, 1.0, 0.0], "merged-1": [1.0, 1.0, 0.0]}
    assert result.rollouts["merged-1"] == [f"demo-eval-sft-merged-1-{i}" for i in range(3)]
    assert result.families == {"merged-0": "merged", "merged-1": "merged"}
    assert (result.harness, result.model, result.sampling.temperature) == ("react", MODEL, 0.7)
    assert result.metrics["pass_at_1"] == pytest.approx(2 / 3)
    assert result.metrics["pass_hat_3"] == 0.0
    assert seen == [("eval-sft", 6, 6)]
    stored = store.rollouts.query(run=eval_run("demo", "sft"))
    assert {r.purpose for r in stored} == {Purpose.EVAL}
    assert len({r.sampling.seed for r in stored}) == 6


def test_all_models_get_the_same_seeds(store: Store) -> None:
    client = PlayedClient(store, lambda r: 1.0)
    for label in ("base", "rl"):
        call(store, client, tasks(2), label=label, model=ModelRef(name=label))
    seeds = [
        {(r.task_id, r.start_index): r.sampling.seed for r in store.rollouts.query(run=eval_run("demo", x))}
        for x in ("base", "rl")
    ]
    assert seeds[0] == seeds[1]


def test_broken_trials_count_zero_and_are_reported_by_class(store: Store) -> None:
    ends: dict[str, float | FailureClass] = {
        "merged-0": FailureClass.INFRASTRUCTURE,
        "merged-1": FailureClass.TIMEOUT,
        "merged-2": FailureClass.VERIFIER,
        "merged-3": 1.0,
    }
    result = call(store, PlayedClient(store, lambda r: ends[r.task_id]), tasks(4))
    assert result.dropped == {"infrastructure": 3, "timeout": 3, "verifier": 3}
    assert result.trials["merged-0"] == [0.0] * 3
    assert summary(result).pass_at_1 == pytest.approx(0.25)
    stage = store.records.get(StageRecord, run="demo", key="eval-sft")
    assert stage
    assert (stage.kept, stage.dropped, stage.rollouts, stage.tokens) == (3, result.dropped, 12, 84)


def test_asked_again_it_returns_at_once(store: Store) -> None:
    client = PlayedClient(store, lambda r: 1.0)
    first = call(store, client, tasks(2))
    assert call(store, client, tasks(2)) == first
    assert client.submitted == 1


def test_killed_before_the_record_it_finds_its_rollouts_again(store: Store) -> None:
    class Killed(PlayedClient):
        def wait(self, ids: Sequence[str], deadline_s: float, progress: object = None) -> list[Rollout]:
            super().wait(ids, deadline_s)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(store, Killed(store, lambda r: 1.0), tasks(2))
    assert store.records.all(ResultRecord) == []
    result = call(store, PlayedClient(store, lambda r: 0.0), tasks(2))
    assert result.trials == {"merged-0": [1.0] * 3, "merged-1": [1.0] * 3}
    assert len(store.rollouts.query(run=eval_run("demo", "sft"))) == 6


def test_a_label_stands_for_one_model_and_one_set_of_tasks(store: Store) -> None:
    client = PlayedClient(store, lambda r: 1.0)
    call(store, client, tasks(2))
    with pytest.raises(ConfigError, match="another run name or label"):
        call(store, client, tasks(2), model=ModelRef(name="smollm2", digest="other"))
    with pytest.raises(ConfigError, match="evaluated on 2 tasks"):
        call(store, client, tasks(3))
    with pytest.raises(ConfigError, match="no held-out tasks"):
        call(store, client, [])


def test_a_cancelled_evaluation_is_no_result(store: Store) -> None:
    client = PlayedClient(store, lambda r: FailureClass.CANCELLED if r.task_id == "merged-1" else 1.0)
    with pytest.raises(Cancelled, match="3 trials"):
        call(store, client, tasks(2))
    assert store.records.all(ResultRecord) == []


def test_a_deadline_names_who_is_missing(store: Store) -> None:
    class NeverEnds(PlayedClient):
        def wait(self, ids: Sequence[str], deadline_s: float, progress: object = None) -> list[Rollout]:
            raise PhaseTimeout(f"{len(ids)} of {len(ids)} rollouts did not end in {deadline_s:.0f} s")

    with pytest.raises(PhaseTimeout, match=r"6 of 6 .* 9 s"):
        call(store, NeverEnds(store, lambda r: 1.0), tasks(2), config=EvalConfig(deadline_s=9))
    assert store.records.all(ResultRecord) == []


def test_a_family_apart_is_not_in_the_table(store: Store) -> None:
    client = PlayedClient(store, lambda r: float(r.task.provenance.family == "merged"))
    result = call(store, client, [*tasks(2), *tasks(3, "unseen")], config=EvalConfig(apart=("unseen",)))
    main, apart = summary(result), summary(result, apart=True)
    assert (main.n_tasks, main.pass_at_1) == (2, 1.0)
    assert (apart.n_tasks, apart.pass_at_1) == (3, 0.0)
    assert not set(passes(result)) & set(passes(result, apart=True))
    assert result.metrics["pass_at_1"] == 1.0


def test_only_a_family_apart_still_gives_a_result(store: Store) -> None:
    result = call(store, PlayedClient(store, lambda r: 1.0), tasks(2, "unseen"), config=EvalConfig(apart=("unseen",)))
    assert "pass_at_1" not in result.metrics
    assert summary(result, apart=True).pass_at_1 == 1.0


def test_partial_rewards_pass_from_the_threshold_of_the_config(store: Store) -> None:
    result = call(store, PlayedClient(store, lambda r: 0.8), tasks(2), config=EvalConfig(pass_reward=0.75))
    assert result.trials["merged-0"] == [0.8] * 3
    assert summary(result).trials["merged-0"] == [1, 1, 1]


def test_demo_json_has_exactly_the_agreed_shape(store: Store) -> None:
    client = PlayedClient(store, lambda r: float(r.model.name == "rl"))
    results = [call(store, client, tasks(2), label=x, model=ModelRef(name=x)) for x in ("base", "sft", "rl")]
    found = json.loads(json.dumps(demo_json(results, store.records.all(StageRecord), 12.5, 800.0)))
    assert list(found) == ["base", "sft", "rl", "stages", "seconds", "peak_rss_mib"]
    keys = ["pass_at_1", "pass_at_3", "pass_hat_3", "ci_low", "ci_high", "n_tasks", "n_trials", "trials"]
    assert list(found["rl"]) == keys == list(ModelSummary.model_fields)
    assert found["rl"]["trials"] == {"merged-0": [1, 1, 1], "merged-1": [1, 1, 1]}
    assert (found["base"]["pass_at_1"], found["rl"]["ci_low"], found["rl"]["n_trials"]) == (0.0, 1.0, 6)
    assert found["stages"]["eval-rl"]["kept"] == 6
    assert (found["seconds"], found["peak_rss_mib"]) == (12.5, 800.0)


def test_demo_json_names_the_model_that_is_missing(store: Store) -> None:
    with pytest.raises(ConfigError, match="base, sft, rl"):
        demo_json([], [], 1.0, 1.0)
