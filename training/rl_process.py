"""`python -m training.rl_process SPEC`: the child that holds trainer and loop of one RL run.

It leases an engine of its own for the run. A child that dies leaves the engine and its rollouts; the next one finds
both. The parent ends the engine when the run is over, however it ended.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from rollout.bundle import load_tasks
from rollout.client import RolloutClient
from rollout.config import open_home
from rollout.errors import ConfigError
from rollout.inference.base import Engine
from rollout.inference.launch import ensure_engine
from rollout.inference.vllm import EngineAddress, VllmEngine
from rollout.proxy.codecs import load_codec
from rollout.proxy.messages import Message
from rollout.store import Store, open_store
from rollout.types import ModelRef, Split, TaskSpec
from training import parity
from training.checkpoint import whole_folder
from training.child import Events, child_main
from training.models import ENTRY, write_entry
from training.rl import RESULT_FILE, RlSpec
from training.rl_loop import Curriculum, Parts, RlLoop
from training.rl_state import LoopState, RunFolder
from training.trainer.reference import ReferenceTrainer

log = logging.getLogger(__name__)


class LeasedEngine:
    """The run's exclusive engine: found and brought to the wanted weights, or started on them.

    The first time it is compared with the trainer, which holds the same weights then.
    """

    def __init__(self, store: Store, model: ModelRef, run: str, compare: Callable[[Engine], None]) -> None:
        self._store, self._model, self._run = store, model, run
        self._compare: Callable[[Engine], None] | None = compare

    def ensure(self, path: Path, version: int) -> None:
        record = ensure_engine(self._store, self._model.name, path, version=version, exclusive=self._run)
        if self._compare is not None:
            address = EngineAddress(record.url, record.version)
            self._compare(VllmEngine(lambda *_, **__: address))
            self._compare = None


def curriculum(spec: RlSpec) -> Curriculum:
    """The tasks of the splits `rl` and `validation`, in id order. Raises ConfigError when there is none to train."""
    tasks = sorted(load_tasks(Path(spec.tasks_dir)), key=lambda t: t.id)
    chosen: dict[Split, tuple[TaskSpec, ...]] = {
        split: tuple(t for t in tasks if t.split is split) for split in (Split.RL, Split.VALIDATION)
    }
    if not chosen[Split.RL]:
        raise ConfigError(
            f"{spec.tasks_dir} has no task of the split `rl`; run `openforge synth` or pass another --tasks"
        )
    if spec.config.val_every and not chosen[Split.VALIDATION]:
        raise ConfigError(f"{spec.tasks_dir} has no task of the split `validation`; add some or set rl.val_every=0")
    return Curriculum(
        run=spec.run,
        model=ModelRef(name=spec.model, digest=spec.policy.digest),
        path=Path(spec.policy.path),
        tasks=chosen[Split.RL],
        validation=chosen[Split.VALIDATION],
    )


def publish(state: LoopState, spec: RlSpec) -> None:
    """Copies the weights to keep to the run's place, with the loop's result beside them."""
    best = Path(state.best_weights)
    with whole_folder(Path(spec.output)) as part:
        for file in sorted(best.iterdir()):
            if file.is_file() and file.name not in (ENTRY, RESULT_FILE):
                shutil.copyfile(file, part / file.name)
        (part / RESULT_FILE).write_text(state.model_dump_json(indent=1) + "\n")
        write_entry(part, name=spec.run, renderer=spec.policy.renderer, source=spec.run)


def train(spec: RlSpec, events: Events) -> None:
    """Runs the loop to its end and leaves the best policy at `spec.output`."""
    torch.set_flush_denormal(True)
    if spec.config.trainer.threads:
        torch.set_num_threads(spec.config.trainer.threads)
    transformers.utils.logging.disable_progress_bar()
    lessons, config = curriculum(spec), spec.config
    store = open_store(open_home(spec.home))
    trainer = ReferenceTrainer(lessons.path, config.trainer, temperature=config.temperature)
    codec = load_codec(lessons.path, spec.policy.renderer)

    def compare(engine: Engine) -> None:
        events.progress("parity of engine and trainer", 0, 1)
        prompts = [codec.render([Message("user", text)], ()) for text in parity.PROMPTS]
        found = parity.measure(engine, trainer, prompts, codec.stop_ids, config.temperature)
        log.info(
            "engine and trainer: %d tokens, %.4f nats apart, %.4f at most", found.tokens, found.mean, found.largest
        )
        parity.check(found, config.parity_mean, config.parity_max)

    try:
        parts = Parts(
            store=store,
            client=RolloutClient(store),
            trainer=trainer,
            engine=LeasedEngine(store, lessons.model, spec.run, compare),
            folder=RunFolder(Path(spec.work), spec.run, spec.policy.renderer),
            progress=events.progress,
        )
        publish(RlLoop(parts, lessons, spec.config).run(), spec)
    finally:
        store.close()


if __name__ == "__main__":
    child_main(RlSpec, train)
