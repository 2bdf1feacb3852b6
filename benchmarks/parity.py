"""How far engine and trainer are apart on the same weights: the measurement behind `rl.parity_mean` and `parity_max`.

    python benchmarks/parity.py [--model smollm2] [--backends embedded vllm]

Prints, per engine and sampling temperature, the mean and the largest |difference| in nats over 512 sampled tokens, for
the trainer in bf16 (as RL computes) and in float32. vLLM is measured where its environment is there.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rollout.config import open_home
from rollout.inference.backends import vllm_python
from rollout.inference.launch import EngineOptions, ensure_engine, stop_engine
from rollout.inference.vllm import EngineAddress, VllmEngine
from rollout.proxy.codecs import load_codec
from rollout.proxy.messages import Message
from rollout.store import open_store
from training import parity
from training.config import TrainerConfig
from training.models import add_model
from training.trainer.reference import ReferenceTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backends", nargs="*", default=["embedded", "vllm"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = open_home(folder)
        entry = add_model(home, args.model)
        codec = load_codec(Path(entry.path), entry.renderer)
        prompts = [codec.render([Message("user", text)], ()) for text in parity.PROMPTS]
        store = open_store(home)
        print(f"{'engine':10} {'temperature':>11} {'trainer':>8} {'tokens':>7} {'mean':>8} {'largest':>8}")
        for backend in args.backends:
            if backend == "vllm" and not vllm_python().exists():
                print("vllm       not measured: run `make vllm-env` first")
                continue
            options = EngineOptions(slots=8, max_len=2048, backend=backend)
            record = ensure_engine(store, entry.name, entry.path, options=options)
            try:
                for temperature in (1.0, 0.6):
                    for compute in ("bf16", "f32"):
                        config = TrainerConfig.model_validate({"compute": compute})
                        trainer = ReferenceTrainer(Path(entry.path), config, temperature=temperature)
                        engine = VllmEngine(lambda *_, url=record.url, **__: EngineAddress(url))
                        found = parity.measure(engine, trainer, prompts, codec.stop_ids, temperature)
                        numbers = f"{found.tokens:7} {found.mean:8.4f} {found.largest:8.4f}"
                        print(f"{backend:10} {temperature:11} {compute:>8} {numbers}", flush=True)
            finally:
                stop_engine(store, record.id)
        store.close()


if __name__ == "__main__":
    main()
