"""The model room: what is added, what is refused, and that the chat template is the renderer's own text."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.config import Home, open_home
from rollout.errors import ConfigError
from training.models import (
    ENTRY,
    ModelEntry,
    add_model,
    digest_folder,
    list_models,
    read_entry,
    renderer_of,
    resolve_model,
    write_entry,
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Looks up a {name} – schnell & “exact” <b>",
            "parameters": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
        },
    }
    for name in ("get_ticket", "get_invoice")
]


def call(name: str, arguments: object) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [{"role": "user", "content": "Close ticket 47.\n"}],
    "system first": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "¿Qué? 日本 🎉"}],
    "a tool cycle": [
        {"role": "user", "content": "Close 47 and 48"},
        {"role": "assistant", "content": "", "tool_calls": [call("get_ticket", {"id": 47}), call("get_invoice", "{}")]},
        {"role": "tool", "tool_call_id": "c1", "content": '{"id": 47, "now": 52}'},
        {"role": "tool", "tool_call_id": "c2", "content": "naïve\n\n"},
        {"role": "assistant", "content": "First:\n", "tool_calls": [call("get_ticket", {"ok": False, "x": None})]},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "done"},
    ],
    "no content": [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call("get_ticket", {})]},
        {"role": "tool", "content": "{}"},
    ],
    "two questions": [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "one"},
        {"role": "system", "content": "now two"},
        {"role": "user", "content": [{"type": "text", "text": "2"}, "+"]},
        {"role": "assistant", "content": "two", "reasoning_content": "well\n"},
        {"role": "tool", "content": "late"},
    ],
    "thought out loud": [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\none"},
        {"role": "user", "content": "<tool_response>\nx\n</tool_response>"},
        {"role": "assistant", "content": "<think>\nhm again\n</think>\n\ntwo"},
    ],
}


def rendered_alike(tokenizer: Any, messages: list[dict[str, Any]], tools: Any, *, thinking: bool, prompt: bool) -> str:
    from renderers import Qwen3RendererConfig, create_renderer

    renderer = create_renderer(tokenizer, Qwen3RendererConfig(enable_thinking=thinking))
    ids = renderer.render_ids(messages, tools=tools, add_generation_prompt=prompt)
    text = tokenizer.apply_chat_template(
        messages,
        tools=tools,
        add_generation_prompt=prompt,
        tokenize=False,
        **({"enable_thinking": True} if thinking else {}),
    )
    assert tokenizer.encode(text, add_special_tokens=False) == list(ids)
    assert isinstance(text, str)
    return text


@pytest.fixture(scope="module")
def tokenizer(tiny_model: ModelEntry) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model.path)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_template_gives_the_ids_of_the_renderer(tokenizer: Any, name: str, tools: Any, thinking: bool) -> None:
    for prompt in (True, False):
        text = rendered_alike(tokenizer, CONVERSATIONS[name], tools, thinking=thinking, prompt=prompt)
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


TEXT = st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=30)
VALUE = st.one_of(st.booleans(), st.integers(-(10**6), 10**6), TEXT, st.none())
ANSWER = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": TEXT.filter(lambda t: "think>" not in t)},
    optional={
        "tool_calls": st.lists(
            st.builds(call, st.sampled_from(["get_ticket", "x"]), st.dictionaries(TEXT, VALUE, max_size=2)), max_size=2
        )
    },
)
OTHER = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": TEXT})


@given(first=TEXT, rest=st.lists(st.one_of(ANSWER, OTHER), max_size=6), tools=st.booleans())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_template_gives_the_ids_of_the_renderer_for_any_history(
    tokenizer: Any, first: str, rest: list[dict[str, Any]], tools: bool
) -> None:
    messages = [{"role": "user", "content": first}, *rest]
    rendered_alike(tokenizer, messages, TOOLS if tools else None, thinking=False, prompt=True)


def test_special_tokens_survive_a_reload(tokenizer: Any) -> None:
    assert tokenizer.unk_token is None
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    ids = tokenizer.convert_tokens_to_ids(["<think>", "</think>", "<tool_call>", "</tool_call>", "</tool_response>"])
    assert ids == [49152, 49153, 49154, 49155, 49157]
    assert tokenizer.encode("<tool_call>", add_special_tokens=False) == [49154]


def test_an_added_model_is_listed_and_found_by_name_and_path(model_home: Home, tiny_model: ModelEntry) -> None:
    assert tiny_model.digest == digest_folder(Path(tiny_model.path))
    assert tiny_model in list_models(model_home)
    assert resolve_model(model_home, "smollm2-tiny") == resolve_model(model_home, tiny_model.path) == tiny_model
    assert add_model(model_home, "smollm2-tiny") == tiny_model
    with pytest.raises(ConfigError, match="smollm2-tiny"):
        resolve_model(model_home, "nobody")
    with pytest.raises(ConfigError, match="no folder"):
        add_model(model_home, "/nowhere", "other")


def test_a_folder_is_copied_and_keeps_its_digest_when_the_source_changes(
    tmp_path: Path, tiny_model: ModelEntry
) -> None:
    home = open_home(tmp_path / "home")
    source = tmp_path / "my-model"
    shutil.copytree(tiny_model.path, source)
    seen: list[str] = []
    entry = add_model(home, str(source), progress=lambda label, _done, _total: seen.append(label))
    assert (entry.name, entry.renderer, entry.digest) == ("my-model", "qwen3", tiny_model.digest)
    assert {"copy", "digest"} <= set(seen)
    (source / "model.safetensors").write_bytes(b"other")
    assert digest_folder(Path(entry.path)) == entry.digest
    with pytest.raises(ConfigError, match="made from"):
        add_model(home, tiny_model.path, "my-model")


def test_a_half_written_folder_is_named_and_mended_by_adding_again(tmp_path: Path, tiny_model: ModelEntry) -> None:
    home = open_home(tmp_path)
    entry = add_model(home, tiny_model.path, "m")
    (Path(entry.path) / ENTRY).unlink()
    (Path(entry.path) / "model.safetensors").write_bytes(b"half")
    for look in (lambda: resolve_model(home, "m"), lambda: list_models(home), lambda: read_entry(Path(entry.path))):
        with pytest.raises(ConfigError, match=r"half-written.*models add"):
            look()
    assert add_model(home, tiny_model.path, "m") == entry
    assert digest_folder(Path(entry.path)) == entry.digest


@pytest.mark.parametrize(
    ("gone", "says"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no \\*.safetensors"),
        ("tokenizer.json", "no tokenizer.json"),
        ("chat_template.jinja", "no chat template"),
    ],
)
def test_an_incomplete_folder_is_refused_and_leaves_nothing(
    tmp_path: Path, tiny_model: ModelEntry, gone: str, says: str
) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_model.path, source)
    (source / gone).unlink()
    home = open_home(tmp_path / "home")
    with pytest.raises(ConfigError, match=says):
        add_model(home, str(source), "m")
    assert list_models(home) == []
    assert [p.name for p in home.models.iterdir() if p.is_dir()] == []


def _cut(source: Path) -> None:
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _no_header(source: Path) -> None:
    (source / "model.safetensors").write_bytes(b"\0" * 64)


def _shard_gone(source: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


def _template_with(text: str) -> Callable[[Path], None]:
    def write(source: Path) -> None:
        (source / "chat_template.jinja").write_text(text)

    return write


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_cut, "half-written"),
        (_no_header, "half-written"),
        (_shard_gone, "lacks model-00002"),
        (_template_with("{% for m in messages %}{{ m.content }}"), "cannot render"),
        (_template_with("{{ raise_exception('no') }}"), "cannot render"),
        (_template_with("{{ messages[0].content.nothing.at.all }}"), "cannot render"),
    ],
)
def test_a_damaged_folder_is_refused_and_leaves_nothing(
    tmp_path: Path, tiny_model: ModelEntry, damage: Callable[[Path], None], says: str
) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_model.path, source)
    damage(source)
    home = open_home(tmp_path / "home")
    with pytest.raises(ConfigError, match=says):
        add_model(home, str(source), "m")
    assert list_models(home) == []
    assert [p.name for p in home.models.iterdir() if p.is_dir()] == []


def test_unreadable_entry_and_bad_names_are_config_errors(tmp_path: Path, tiny_model: ModelEntry) -> None:
    home = open_home(tmp_path)
    entry = add_model(home, tiny_model.path, "m")
    (Path(entry.path) / ENTRY).write_text('{"name": "m"')
    with pytest.raises(ConfigError, match="not readable"):
        resolve_model(home, "m")
    for name in ("a/b", ".hidden"):
        with pytest.raises(ConfigError, match="no model name"):
            add_model(home, tiny_model.path, name)


def test_two_processes_that_add_the_same_model_agree(tmp_path: Path, tiny_model: ModelEntry) -> None:
    home = open_home(tmp_path)
    code = (
        "import sys; from rollout.config import open_home; from training.models import add_model; "
        "print(add_model(open_home(sys.argv[1]), sys.argv[2], 'm').digest)"
    )
    command = [sys.executable, "-c", code, str(home.root), tiny_model.path]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [p.communicate(timeout=100)[0].strip() for p in both]
    assert outputs == [tiny_model.digest] * 2
    assert [p.returncode for p in both] == [0, 0]
    assert sorted(p.name for p in home.models.iterdir() if p.is_dir()) == ["m"]


def test_a_checkpoint_folder_is_a_model(tmp_path: Path, tiny_model: ModelEntry) -> None:
    folder = tmp_path / "step-3"
    shutil.copytree(tiny_model.path, folder, ignore=shutil.ignore_patterns(ENTRY))
    entry = write_entry(folder, name="step-3", renderer="qwen3", source="run-1")
    assert resolve_model(open_home(tmp_path / "home"), str(folder)) == entry
    assert json.loads((folder / ENTRY).read_text()).keys() == {"name", "digest", "renderer", "source"}
    os.rename(folder, tmp_path / "moved")
    assert read_entry(tmp_path / "moved").path == str(tmp_path / "moved")


TEMPLATES = {
    "its own": ("", "", "qwen3"),
    "another line break in the tool block": ("# Tools\\n\\n", "# Tools\\n", "default"),
    "another tool result": ("<tool_response>\\n", "<tool_response>", "default"),
    "thinking by default": ("<think>\\n\\n</think>\\n\\n", "", "default"),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_only_a_template_that_gives_the_same_ids_gets_the_familys_renderer(
    tmp_path: Path, tiny_model: ModelEntry, case: str
) -> None:
    """All of these hold the family's marks; what differs shows in one kind of history only."""
    before, after, renderer = TEMPLATES[case]
    source = tmp_path / "source"
    shutil.copytree(tiny_model.path, source)
    file = source / "chat_template.jinja"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after) if before else text)
    assert add_model(open_home(tmp_path / "home"), str(source), "m").renderer == renderer


def test_a_template_without_the_familys_marks_is_used_as_it_is(tmp_path: Path, tiny_model: ModelEntry) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_model.path, source)
    (source / "chat_template.jinja").write_text("{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}")
    assert renderer_of(source) == "default"


@pytest.mark.model
def test_control_tokens_have_rows_of_their_own(smollm2_model: ModelEntry) -> None:
    import torch
    from safetensors.torch import load_file

    table = load_file(Path(smollm2_model.path) / "model.safetensors")["model.embed_tokens.weight"].float()
    rows = table[49152:]
    assert rows.shape == (6, 576)
    assert torch.allclose(rows.norm(dim=1), torch.full((6,), 3.3), atol=0.02)
    unit = rows / rows.norm(dim=1, keepdim=True)
    likeness = unit @ unit.T - torch.eye(6)
    assert likeness.max() < 0.97
    assert 2.5 < table[:49152].norm(dim=1).mean() < 4.0
