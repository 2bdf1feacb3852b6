"""`python -m training.sft_process SPEC`: the child that runs TRL's SFTTrainer on recorded token rows.

The rows go in already tokenised (`input_ids`, `labels`), in the planned order. The loss is TRL's token mean; what
this adds is arithmetic: the model computes in bfloat16 over float32 master weights, a prefix that a batch's rows
share is computed once, and only positions that predict a trained token go through the output layer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from rollout.types import StepRecord
from training.checkpoint import export_model, whole_folder
from training.child import Events, child_main
from training.config import SftConfig
from training.dataset import SftRow, read_rows
from training.loss import score_tokens
from training.models import write_entry
from training.packing import pack_rows
from training.sft import SftSpec, plan_rows
from training.trainer.master import MasterAdamW
from training.trainer.reference import DTYPES, load_full

IGNORED = -100


class PaddedRow:
    """A row of a collated batch, as the packing wants it."""

    def __init__(self, input_ids: torch.Tensor, labels: torch.Tensor) -> None:
        self.token_ids: Sequence[int] = input_ids.tolist()
        self.mask: Sequence[bool] = (labels != IGNORED).tolist()


class SharedPrefixTrainer(SFTTrainer):  # type: ignore[misc]
    """SFTTrainer whose loss computes a batch's common prefixes once; loss and gradients are SFTTrainer's."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        rows = [PaddedRow(*pair) for pair in zip(inputs["input_ids"], inputs["labels"], strict=True)]
        logprobs = score_tokens(model, pack_rows(rows)).logprobs
        return -logprobs.sum() / (len(logprobs) if num_items_in_batch is None else num_items_in_batch)


class StepReporter(TrainerCallback):  # type: ignore[misc]
    """Sends each logged step to the parent."""

    def __init__(self, spec: SftSpec, events: Events, rows: Sequence[SftRow]) -> None:
        self._spec, self._events, self._rows = spec, events, rows
        self._began = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" not in (logs or {}):
            return
        batch = self._spec.config.batch
        rows = self._rows[(state.global_step - 1) * batch : state.global_step * batch]
        now = time.monotonic()
        record = StepRecord(
            run=self._spec.run,
            kind="sft",
            step=state.global_step,
            samples=len(rows),
            tokens=sum(sum(row.mask) for row in rows),
            loss=float(logs["loss"]),
            metrics={"lr": float(logs["learning_rate"]), "grad_norm": float(logs["grad_norm"])},
            seconds=now - self._began,
        )
        self._began = now
        self._events.step(record)
        self._events.progress("sft", state.global_step, state.max_steps)


def learning_rate_factor(step: int, total: int, config: SftConfig) -> float:
    """Warm-up to 1, then linear to `final_lr` at the last step; `step` counts from 0."""
    warmup = min(config.optimizer.warmup_steps, total)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 1 - (1 - config.final_lr) * (step - warmup) / max(1, total - 1 - warmup)


def make_dataset(rows: Sequence[SftRow]) -> Dataset:
    """The columns that SFTTrainer takes as ready: `labels` equals `input_ids` on trained tokens, else -100."""
    labels = [[t if on else IGNORED for t, on in zip(r.token_ids, r.mask, strict=True)] for r in rows]
    return Dataset.from_dict({"input_ids": [list(r.token_ids) for r in rows], "labels": labels})


def make_trainer(model: Any, tokenizer: Any, rows: Sequence[SftRow], config: SftConfig, folder: Path) -> SFTTrainer:
    """TRL's trainer over the planned rows, with our optimizer and schedule. `model` is float32."""
    total = -(-len(rows) // config.batch)
    optimizer = MasterAdamW(model, config.optimizer, DTYPES[config.compute])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, total, config))
    arguments = SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=config.batch,
        num_train_epochs=1,
        max_length=None,
        train_sampling_strategy="sequential",
        max_grad_norm=config.optimizer.clip,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        logging_first_step=True,
        disable_tqdm=True,
        report_to="none",
        save_strategy="steps" if config.save_every else "no",
        save_steps=config.save_every or 500,
        save_total_limit=1,
        dataloader_pin_memory=False,
        seed=config.seed,
    )
    kind = SharedPrefixTrainer if config.share_prefix else SFTTrainer
    return kind(
        model=model,
        args=arguments,
        train_dataset=make_dataset(rows),
        processing_class=tokenizer,
        optimizers=(optimizer, schedule),
    )


def train(spec: SftSpec, events: Events) -> None:
    """Trains and leaves a whole model folder at `spec.output`."""
    config, source = spec.config, Path(spec.student.path)
    torch.set_flush_denormal(True)
    if config.threads:
        torch.set_num_threads(config.threads)
    transformers.utils.logging.disable_progress_bar()
    rows = plan_rows(read_rows(Path(spec.dataset)), config)
    events.progress("sft", 0, -(-len(rows) // config.batch))
    model = load_full(source)
    folder = Path(spec.output + ".work") / "trainer"
    trainer = make_trainer(model, AutoTokenizer.from_pretrained(source), rows, config, folder)
    trainer.add_callback(StepReporter(spec, events, rows))
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")) or None)
    optimizer = trainer.optimizer.optimizer
    with whole_folder(Path(spec.output)) as part:
        export_model(model, part, companions=source, state=optimizer.full_weights(model))
        write_entry(part, name=spec.run, renderer=spec.student.renderer, source=spec.run)


if __name__ == "__main__":
    child_main(SftSpec, train)
