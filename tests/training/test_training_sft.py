"""SFT: TRL's loss and gradients with shared prefixes, the child process, resume, and what the parent records."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training_fakes import EOT, save_policy
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout.config import open_home
from rollout.errors import ConfigError
from rollout.store import Store, open_store
from rollout.types import ModelRef, StepRecord
from training.config import OptimizerConfig, SftConfig
from training.dataset import Origin, SftRow, write_dataset
from training.models import resolve_model
from training.sft import sft
from training.sft_process import learning_rate_factor, make_trainer
from training.trainer.reference import load_full

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*dataloader.*:UserWarning"),
]


def rows(count: int = 12, seed: int = 0) -> list[SftRow]:
    """Two families, each with a prefix of its own, two answers a row."""
    chance = random.Random(seed)
    out = []
    for k in range(count):
        prefix = [3 + k % 2] * 3 + [7, 8, 9, 10]
        ids = [*prefix, chance.randrange(11, 60), 20, EOT, 30, 31, 40 + k % 5, EOT]
        mask = [False] * 8 + [True, True, False, False, True, True]
        out.append(
            SftRow(token_ids=tuple(ids), mask=tuple(mask), rollout_id=f"r{k}", task_id=f"t{k}", family=f"f{k % 2}")
        )
    return out


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(open_home(tmp_path / "home"))
    save_policy(opened.home.models / "tiny")
    yield opened
    opened.close()


@pytest.fixture
def dataset(store: Store) -> Path:
    folder = store.home.datasets / "d"
    write_dataset(folder, rows(), Origin("d", ModelRef(name="tiny"), Counter()))
    return folder


def quiet(_label: str, _done: int, _total: int) -> None:
    return None


def one_batch(policy: Path, tmp_path: Path, *, share: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradients) that the trainer computes for its first batch."""
    model = load_full(policy)
    config = SftConfig(compute="f32", share_prefix=share, batch=4)
    trainer = make_trainer(model, AutoTokenizer.from_pretrained(policy), rows(4), config, tmp_path / "out")
    batch: dict[str, Any] = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(model, dict(batch), num_items_in_batch=(batch["labels"][:, 1:] != -100).sum())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_loss_and_gradients_equal_those_of_trls_own_trainer(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy")
    loss, gradients = one_batch(policy, tmp_path, share=True)
    plain_loss, plain = one_batch(policy, tmp_path, share=False)
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    assert gradients.keys() == plain.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain[name], atol=1e-5, rtol=1e-4)
    assert max(float(g.abs().max()) for g in plain.values()) > 1e-2


def test_the_loss_trains_exactly_the_masked_tokens(tmp_path: Path) -> None:
    """By hand, from a plain forward: the mean over trained tokens, the first answer token and each end of turn too."""
    policy = save_policy(tmp_path / "policy")
    loss, _ = one_batch(policy, tmp_path, share=False)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    found = []
    for row in rows(4):
        logits = model(torch.tensor([row.token_ids])).logits[0].log_softmax(-1)
        found += [-float(logits[t - 1, row.token_ids[t]].detach()) for t, on in enumerate(row.mask) if on]
    assert len(found) == 16
    assert loss == pytest.approx(sum(found) / len(found), rel=1e-5)


def test_the_rate_warms_up_and_falls_to_its_share() -> None:
    config = SftConfig(optimizer=OptimizerConfig(lr=5e-4, warmup_steps=3), final_lr=0.1)
    factors = [learning_rate_factor(k, 64, config) for k in range(64)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[-1] == pytest.approx(0.1)
    assert factors[3:] == sorted(factors[3:], reverse=True)


def test_a_child_trains_and_the_parent_records(store: Store, dataset: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    config = SftConfig(batch=4, epochs=4.0, threads=1, optimizer=OptimizerConfig(lr=1e-2, warmup_steps=1))
    record = sft(store, config, run="s", student="tiny", dataset=dataset, progress=lambda *event: seen.append(event))
    steps = [s for s in store.records.all(StepRecord, run="s") if s.kind == "sft"]
    assert [s.step for s in steps] == list(range(1, 13))
    assert sum(s.tokens for s in steps) == 4 * 12 * 4
    losses = [s.loss for s in steps if s.loss is not None]
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])
    assert seen[0] == ("sft", 0, 12)
    assert seen[-1] == ("sft", 12, 12)
    entry = resolve_model(store.home, str(record.details["checkpoint"]))
    assert (entry.name, entry.source, entry.renderer) == ("s", "s", "default")
    trained = AutoModelForCausalLM.from_pretrained(entry.path)
    assert trained.dtype == torch.float32
    assert not (store.home.checkpoints / "s.work").exists()
    again = sft(store, config, run="s", student="tiny", dataset=dataset, progress=lambda *_: pytest.fail("ran again"))
    assert again == record


def test_a_killed_child_resumes_from_its_last_save(store: Store, dataset: Path) -> None:
    """Killed once after a save; the second child goes on and ends with the weights of an unkilled run."""
    config = SftConfig(batch=4, epochs=8.0, save_every=8, threads=1, optimizer=OptimizerConfig(lr=1e-3))
    killed = threading.Event()

    def kill(_label: str, done: int, _total: int) -> None:
        if done >= 9 and not killed.is_set():
            killed.set()
            for pid in _children("training.sft_process"):
                os.kill(pid, signal.SIGKILL)

    broken = sft(store, config, run="a", student="tiny", dataset=dataset, progress=kill)
    whole = sft(store, config, run="b", student="tiny", dataset=dataset, progress=quiet)
    assert killed.is_set()
    assert (broken.details["steps"], whole.details["steps"]) == (24, 24)
    a, b = (
        AutoModelForCausalLM.from_pretrained(r.details["checkpoint"], dtype=torch.float32).state_dict()
        for r in (broken, whole)
    )
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=0.0, rtol=0.0)


def _children(module: str) -> list[int]:
    """Pids of this process's own children that run `module`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and module in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def test_bug_69_an_untrainable_dataset_is_an_error_before_anything_starts(store: Store) -> None:
    folder = store.home.datasets / "bad"
    silent = rows(1)[0].model_copy(update={"mask": (False,) * 14})
    write_dataset(folder, [silent], Origin("bad", ModelRef(name="tiny"), Counter()))
    with pytest.raises(ConfigError, match="all zero"):
        sft(store, SftConfig(), run="s", student="tiny", dataset=folder, progress=quiet)
    assert not (store.home.logs / "sft-s.log").exists()
