"""Parameters and presets: literal defaults, names that follow from what was asked, presets that validate."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollout.errors import ConfigError
from tasks.params import EvalParams, StageParams

ROOT = Path(__file__).resolve().parents[2]
PRESETS = sorted(path.stem for path in (ROOT / "configs").glob("*.toml"))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_validates(name: str) -> None:
    assert StageParams(preset=name).load() is not None


@pytest.mark.parametrize(
    ("name", "lr", "tasks", "group", "kl", "entropy", "steps"),
    [
        ("claw", 1e-6, 8, 8, 0.001, 0.0, 100),
        ("computer-use", 5e-7, 8, 8, 0.01, 0.0, 80),
        ("browser-use", 1e-6, 12, 5, 0.0, 0.001, 100),
    ],
)
def test_paper_presets_are_table_a1(
    name: str, lr: float, tasks: int, group: int, kl: float, entropy: float, steps: int
) -> None:
    rl = StageParams(preset=name).load().rl
    loss = rl.trainer.loss
    assert (rl.trainer.optimizer.lr, rl.tasks, rl.group, rl.steps) == (lr, tasks, group, steps)
    assert (loss.kl, loss.entropy, rl.gamma, rl.merge) == (kl, entropy, 1.0, False)


@pytest.mark.parametrize(
    ("name", "cpus", "memory_mb", "agent_s"),
    [("claw", 2.0, 2048, 900.0), ("computer-use", 4.0, 4096, 600.0), ("browser-use", 2.0, 6144, 900.0)],
)
def test_paper_presets_give_tasks_the_pods_of_table_a1(name: str, cpus: float, memory_mb: int, agent_s: float) -> None:
    synth = StageParams(preset=name).load().synth
    assert (synth.resources.cpus, synth.resources.memory_mb) == (cpus, memory_mb)
    assert synth.timeouts.agent == agent_s


def test_demo_preset_has_the_evaluation_that_it_promises() -> None:
    preset = StageParams(preset="demo").load()
    assert preset.synth.counts.heldout >= 48
    assert preset.eval.trials == 3
    assert preset.synth.heldout_family in preset.eval.apart


@pytest.mark.parametrize("name", [p for p in PRESETS if p in ("demo", "small", "smoke", "learn")])
def test_a_family_left_out_of_training_is_apart_in_the_table(name: str) -> None:
    preset = StageParams(preset=name).load()
    assert preset.synth.heldout_family in preset.eval.apart
    assert not set(preset.synth.families) & set(preset.eval.apart)


def test_forms_have_literal_defaults() -> None:
    for kind in (StageParams, EvalParams):
        schema = kind.model_json_schema()
        assert all("default" in field and "title" in field for field in schema["properties"].values())


def test_run_name_is_the_preset_or_what_was_given() -> None:
    assert StageParams().run_name == "demo"
    assert StageParams(run="mine", overrides={"rl.steps": 1}).run_name == "mine"
    assert StageParams(preset="configs/smoke.toml").run_name == "smoke"


def test_other_settings_never_share_a_name() -> None:
    names = {
        StageParams().run_name,
        StageParams(overrides={"rl.steps": 3}).run_name,
        StageParams(overrides={"rl.steps": 4}).run_name,
        StageParams(tasks="/a").run_name,
        StageParams(model="/a").run_name,
    }
    assert len(names) == 5


def test_tasks_of_a_run_do_not_depend_on_the_model() -> None:
    assert StageParams(model="m").task_run == StageParams().task_run


def test_evaluations_of_a_pipeline_stay_in_its_run() -> None:
    params = StageParams(model="/some/model", tasks="/some/tasks")
    base, rl = params.evaluate("base"), params.evaluate("rl")
    assert base.run_name == rl.run_name == params.run_name
    assert (base.model, rl.model) == ("/some/model", "")


@given(st.dictionaries(st.sampled_from(["rl.steps", "rl.group", "eval.trials"]), st.integers(1, 9)))
def test_run_names_fit_what_ids_allow(overrides: dict[str, int]) -> None:
    name = StageParams(overrides=dict(overrides)).run_name
    assert StageParams(run=name).run_name == name
    assert name == StageParams(overrides=dict(reversed(overrides.items()))).run_name


@pytest.mark.parametrize("run", ["Ä", "a b", "-x", "x" * 33])
def test_run_names_that_cannot_be_ids_are_refused(run: str) -> None:
    with pytest.raises(ValidationError):
        StageParams(run=run)


def test_unknown_override_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"synth\.counts\.heldout"):
        StageParams(overrides={"synth.counts.heldoutt": 3}).load()
