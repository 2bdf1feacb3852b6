"""The reference trainer: exact gradients however rows are packed or merged, and a resume to the same weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from training_fakes import save_policy
from transformers import AutoModelForCausalLM

from rollout.errors import ConfigError
from rollout.types import TrainingSample
from training.config import LossConfig, OptimizerConfig, TrainerConfig
from training.trainer.base import Trainer
from training.trainer.master import MasterAdamW
from training.trainer.reference import ReferenceTrainer, cut_batch

VOCAB = 64
EXACT = TrainerConfig(compute="f32", optimizer=OptimizerConfig(lr=1e-2))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


def sample(ids: Sequence[int], trained: set[int], advantage: float = 1.0, rollout: str = "r") -> TrainingSample:
    return TrainingSample(
        token_ids=tuple(ids),
        mask=tuple(t in trained for t in range(len(ids))),
        logprobs=tuple(-2.0 if t in trained else 0.0 for t in range(len(ids))),
        weight=tuple(1.0 if t in trained else 0.0 for t in range(len(ids))),
        advantage=advantage,
        rollout_id=rollout,
        group_id="g",
    )


def group(size: int = 6, seed: int = 0) -> list[TrainingSample]:
    """Rows with a common prefix of ten tokens and different answers."""
    generator = torch.Generator().manual_seed(seed)
    prefix = torch.randint(0, VOCAB, (10,), generator=generator).tolist()
    rows = []
    for k in range(size):
        tail = torch.randint(0, VOCAB, (5 + k % 3,), generator=generator).tolist()
        rows.append(sample(prefix + tail, set(range(10, 13)) | {14}, (-1.0) ** k * (1 + k / 7), f"r{k}"))
    return rows


def weights(trainer: ReferenceTrainer, folder: Path) -> dict[str, torch.Tensor]:
    trainer.export(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], *, atol: float = 0.0) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=atol, rtol=0.0)


def stepped(
    policy: Path, config: TrainerConfig, samples: Sequence[TrainingSample], folder: Path
) -> dict[str, torch.Tensor]:
    """Weights after one step of plain SGD-like size: a tiny Adam eps would blow up rounding differences."""
    trainer = ReferenceTrainer(policy, config)
    trainer.step(samples)
    return weights(trainer, folder)


def gradients(policy: Path, config: TrainerConfig, samples: Sequence[TrainingSample]) -> tuple[float, float]:
    """(loss, gradient norm) of one step."""
    stats = ReferenceTrainer(policy, config).step(samples)
    return stats.loss, stats.metrics["grad_norm"]


LARGE_EPS = EXACT.model_copy(update={"optimizer": OptimizerConfig(lr=1e-2, eps=1.0)})
"""With a large eps Adam's step is proportional to the gradient, so equal weights mean equal gradients."""


def test_shared_prefixes_change_no_gradient(policy: Path, tmp_path: Path) -> None:
    plain = LARGE_EPS.model_copy(update={"share_prefix": False})
    small = LARGE_EPS.model_copy(update={"pack_tokens": 24})
    reference = stepped(policy, plain, group(), tmp_path / "a")
    assert_same(reference, stepped(policy, LARGE_EPS, group(), tmp_path / "b"), atol=1e-6)
    assert_same(reference, stepped(policy, small, group(), tmp_path / "c"), atol=1e-6)
    initial = weights(ReferenceTrainer(policy, LARGE_EPS), tmp_path / "d")
    assert max(float((initial[n] - reference[n]).abs().max()) for n in initial) > 1e-4


def test_a_shared_prefix_is_computed_once(policy: Path) -> None:
    shared = ReferenceTrainer(policy, EXACT).step(group()).computed
    plain = ReferenceTrainer(policy, EXACT.model_copy(update={"share_prefix": False})).step(group()).computed
    assert plain - shared == 5 * 10


def test_merged_rows_and_paper_samples_give_the_same_gradient(policy: Path, tmp_path: Path) -> None:
    other = sample([9, 8, 7], {2}, advantage=-0.5, rollout="o")
    merged = [sample([1, 2, 3, 4, 5, 6, 7, 8], {2, 3, 6, 7}), other]
    paper = [sample([1, 2, 3, 4], {2, 3}), sample([1, 2, 3, 4, 5, 6, 7, 8], {6, 7}), other]
    assert_same(
        stepped(policy, LARGE_EPS, merged, tmp_path / "a"), stepped(policy, LARGE_EPS, paper, tmp_path / "b"), atol=1e-6
    )
    assert gradients(policy, EXACT, merged) == pytest.approx(gradients(policy, EXACT, paper), rel=1e-4)


def test_the_loss_is_the_token_mean_over_the_batch(policy: Path) -> None:
    """By hand: gradient of -mean(A * logp) from a plain forward; recorded equals current, so nothing is corrected."""
    rows = group(3)
    trainer = ReferenceTrainer(policy, EXACT)
    current = trainer.logprobs(rows)
    rows = [
        row.model_copy(update={"logprobs": _spread(row.mask, found)}) for row, found in zip(rows, current, strict=True)
    ]
    stats = trainer.step(rows)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    total, count = torch.zeros(()), 0
    for row in rows:
        logits = model(torch.tensor([row.token_ids])).logits[0].log_softmax(-1)
        for t, on in enumerate(row.mask):
            if on:
                total, count = total - row.advantage * logits[t - 1, row.token_ids[t]], count + 1
    (total / count).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert stats.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert stats.loss == pytest.approx(-sum(r.advantage * sum(r.mask) for r in rows) / count, rel=1e-4)
    assert stats.metrics["mismatch"] == pytest.approx(0.0, abs=1e-6)
    assert stats.tokens == count == 12


def _spread(mask: Sequence[bool], values: Sequence[float]) -> tuple[float, ...]:
    left = iter(values)
    return tuple(next(left) if on else 0.0 for on in mask)


@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_a_killed_trainer_resumes_to_equal_weights(policy: Path, tmp_path: Path, compute: str) -> None:
    config = TrainerConfig(compute=compute, optimizer=OptimizerConfig(lr=1e-3, warmup_steps=3))  # type: ignore[arg-type]
    whole = ReferenceTrainer(policy, config)
    for k in range(2):
        whole.step(group(seed=k))
    whole.save(tmp_path / "state")
    resumed = ReferenceTrainer(policy, config)
    resumed.load(tmp_path / "state")
    assert resumed.version == 2
    a, b = whole.step(group(seed=2)), resumed.step(group(seed=2))
    assert (a.loss, a.version, a.metrics["lr"]) == (b.loss, b.version, b.metrics["lr"])
    assert_same(weights(whole, tmp_path / "a"), weights(resumed, tmp_path / "b"))
    whole.step(group(seed=3))
    resumed.step(group(seed=3))
    assert_same(weights(whole, tmp_path / "a"), weights(resumed, tmp_path / "b"))


def test_a_state_of_another_model_is_refused(policy: Path, tmp_path: Path) -> None:
    ReferenceTrainer(policy, EXACT).save(tmp_path / "state")
    with pytest.raises(ConfigError, match="another model"):
        ReferenceTrainer(save_policy(tmp_path / "deep", layers=3), EXACT).load(tmp_path / "state")
    with pytest.raises(ConfigError, match="missing"):
        ReferenceTrainer(policy, EXACT).load(tmp_path)


def test_steps_raise_the_probability_of_good_answers(policy: Path) -> None:
    good, bad = sample([1, 2, 3, 4], {2, 3}, 1.0, "good"), sample([1, 2, 9, 8], {2, 3}, -1.0, "bad")
    trainer: Trainer = ReferenceTrainer(policy, TrainerConfig(optimizer=OptimizerConfig(lr=3e-3)))
    before = trainer.logprobs([good, bad])
    for _ in range(3):
        trainer.step([good, bad])
    after = trainer.logprobs([good, bad])
    assert sum(after[0]) > sum(before[0]) + 0.5
    assert sum(after[1]) < sum(before[1]) - 0.5


def test_small_updates_survive_in_the_master_weights(policy: Path) -> None:
    """A relative update of 1e-5 vanishes in bfloat16 weights, not in their masters."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    before = copy.deepcopy(dict(model.named_parameters()))
    optimizer = MasterAdamW(model, OptimizerConfig(lr=1e-6), torch.bfloat16)
    for _ in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    name = "model.layers.0.mlp.up_proj.weight"
    moved = (before[name] - optimizer.full_weights(model)[name]).detach()
    assert moved.mean() == pytest.approx(4e-6, rel=0.1)
    assert dict(model.named_parameters())[name].dtype == torch.bfloat16


def test_kl_holds_the_policy_at_its_start(policy: Path) -> None:
    def drift(kl: float) -> float:
        trainer = ReferenceTrainer(
            policy, EXACT.model_copy(update={"loss": LossConfig(kl=kl), "optimizer": OptimizerConfig(lr=2e-3)})
        )
        return [trainer.step(group()).metrics["kl"] for _ in range(10)][-1]

    free, held = drift(1e-9), drift(20.0)
    assert free > 0.02
    assert held < free / 2


def test_several_optimizer_steps_cut_between_trajectories(policy: Path) -> None:
    rows = [sample([1, 2, 3], {2}, rollout=f"r{k // 2}") for k in range(10)]
    parts = cut_batch(rows, 2)
    owners = [{row.rollout_id for row in part} for part in parts]
    assert len(parts) == 2
    assert not owners[0] & owners[1]
    assert sum(len(part) for part in parts) == 10
    assert len(cut_batch(rows[:2], 4)) == 1
    stats = ReferenceTrainer(policy, EXACT.model_copy(update={"optimizer_steps": 3})).step(group())
    assert stats.version == 1


def test_an_empty_batch_is_refused(policy: Path) -> None:
    with pytest.raises(ValueError, match="without samples"):
        ReferenceTrainer(policy, EXACT).step([])
