"""What the README says the command can do is what it can do, and nothing that it can do is left out."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App

from cli.app import app

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
MENTION = re.compile(r"openforge((?: [a-z]+(?:-[a-z]+)*)+)((?: (?:--?[a-z-]+|[A-Za-z0-9./:=_-]+))*)")


def commands(node: App, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], App]]:
    for name in node:
        if name.startswith("-"):
            continue
        child = node[name]
        if any(not sub.startswith("-") for sub in child):
            yield from commands(child, (*prefix, name))
        else:
            yield (*prefix, name), child


COMMANDS = dict(commands(app))


def options(command: App) -> set[str]:
    return {name for argument in command.assemble_argument_collection() for name in argument.names}


def mentions() -> list[tuple[tuple[str, ...], list[str]]]:
    """(words after `openforge`, options) of every use in the README's code."""
    found = []
    fenced = re.findall(r"```sh\n(.*?)```", README, flags=re.S)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", README, flags=re.S))
    for line in (line for block in (*fenced, *inline) for line in block.splitlines()):
        for words, rest in MENTION.findall(line):
            found.append((tuple(words.split()), re.findall(r"--[a-z-]+", words + rest)))
    return found


def command_of(words: tuple[str, ...]) -> tuple[str, ...] | None:
    return next((words[:n] for n in (2, 1) if words[:n] in COMMANDS), None)


def test_readme_mentions_only_commands_that_exist() -> None:
    assert len(mentions()) > 20
    assert [words for words, _ in mentions() if command_of(words) is None] == []


@pytest.mark.parametrize("command", sorted(COMMANDS), ids=" ".join)
def test_every_command_is_in_the_readme(command: tuple[str, ...]) -> None:
    assert f"openforge {' '.join(command)}" in README


def test_every_option_in_the_readme_exists() -> None:
    used = [(command_of(words), option) for words, given in mentions() for option in given]
    assert len(used) > 8
    unknown = [(c, option) for c, option in used if c and option not in options(COMMANDS[c])]
    assert unknown == []


def test_every_command_and_option_is_documented() -> None:
    bare = [name for name, command in COMMANDS.items() if not (command.help or "").strip()]
    assert bare == []
    for name, command in COMMANDS.items():
        for argument in command.assemble_argument_collection(parse_docstring=True):
            if argument.parse and argument.show:
                assert argument.parameter.help, f"{' '.join(name)}: {argument.name} has no help"


def test_every_preset_is_in_the_readme() -> None:
    for path in (ROOT / "configs").glob("*.toml"):
        assert f"`{path.stem}`" in README


def test_python_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    assert "Python 3.11" in README
