"""Models of the training tests: each made once a session, in the way that `openforge models add` makes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.config import Home, open_home
from training.models import ModelEntry, add_model, write_entry


@pytest.fixture(scope="session")
def model_home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return open_home(tmp_path_factory.mktemp("models-home"))


@pytest.fixture(scope="session")
def tiny_model(model_home: Home) -> ModelEntry:
    """Random Qwen3 of 3.2 million parameters, SmolLM2's tokenizer with the six control tokens."""
    return add_model(model_home, "smollm2-tiny")


@pytest.fixture(scope="session")
def smollm2_model(model_home: Home) -> ModelEntry:
    """The real SmolLM2-135M; its tests carry the mark `model`."""
    return add_model(model_home, "smollm2")


def write_random_model(folder: Path, kind: str, seed: int) -> Path:
    """A model folder of a few thousand parameters whose answers depend sharply on every earlier token."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    shape = {
        "vocab_size": 300,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "tie_word_embeddings": kind == "qwen3",
        "eos_token_id": 299,
    }
    config = LlamaConfig(**shape) if kind == "llama" else Qwen3Config(**shape)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    write_entry(folder, name=f"{kind}-{seed}", renderer="default", source="test")
    return folder


@pytest.fixture(scope="session")
def sharp_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`qwen3` and `llama`, and `qwen3-next`: other weights of the first one's shape."""
    root = tmp_path_factory.mktemp("sharp")
    made = {"qwen3": ("qwen3", 1), "llama": ("llama", 2), "qwen3-next": ("qwen3", 3)}
    return {name: write_random_model(root / name, kind, seed) for name, (kind, seed) in made.items()}
