"""Homes and presets: what the user gets wrong is one clear sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from pydantic import BaseModel, Field

from rollout.config import load_preset, open_home, parse_set, validate
from rollout.errors import ConfigError, NewerHomeError


class Rl(BaseModel):
    lr: float = Field(1e-5, gt=0)
    group: int = 8


class Preset(BaseModel):
    rl: Rl = Rl()
    name: str = "x"


def test_home_is_made_and_private(tmp_path: Path) -> None:
    home = open_home(tmp_path / "home")
    assert (home.run.stat().st_mode & 0o777) == 0o700
    assert json.loads((home.root / "home.json").read_text())["version"] == 1


def test_newer_home_is_refused(tmp_path: Path) -> None:
    (tmp_path / "home.json").write_text('{"version": 99}')
    with pytest.raises(NewerHomeError, match="newer openforge"):
        open_home(tmp_path)


def test_damaged_version_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "home.json").write_text("{")
    with pytest.raises(ConfigError, match=r"home\.json"):
        open_home(tmp_path)


def test_home_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="OPENFORGE_HOME"):
        open_home(tmp_path / "file" / "home")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_home_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot be written"):
        open_home(tmp_path)
    tmp_path.chmod(0o700)


def test_full_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MiB are free"):
        open_home(tmp_path, min_free_mb=2**40)


def test_overrides_reach_nested_keys(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text("[rl]\ngroup = 4\n")
    preset = load_preset(Preset, str(file), parse_set(["rl.lr=2e-5", "name=räder"]))
    assert preset == Preset(rl=Rl(lr=2e-5, group=4), name="räder")


@pytest.mark.parametrize(
    ("key", "hint"),
    [("rl.grup", "rl.group"), ("nam", "name"), ("lr", "rl.lr"), ("model.group", "rl.group"), ("rl.learning", None)],
)
def test_unknown_key_names_the_nearest(tmp_path: Path, key: str, hint: str | None) -> None:
    file = tmp_path / "p.toml"
    file.write_text("")
    with pytest.raises(ConfigError, match="unknown key") as caught:
        load_preset(Preset, str(file), {key: "1"})
    assert hint is None or f"did you mean {hint!r}" in str(caught.value)


def test_what_is_no_preset_file_is_said(tmp_path: Path) -> None:
    binary = tmp_path / "p.toml"
    binary.write_bytes(b"\xff\xfe\x00[rl]")
    for name in (str(binary), str(tmp_path)):
        with pytest.raises(ConfigError, match=str(tmp_path)):
            load_preset(Preset, name)


def test_bad_value_says_what_came() -> None:
    with pytest.raises(ConfigError, match=r"rl\.lr.*greater than 0.*-1"):
        validate(Preset, {"rl": {"lr": -1}}, source="preset 'p'")


def test_unknown_preset_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="no preset 'demp'"):
        load_preset(Preset, "demp")


def test_set_needs_an_equals_sign() -> None:
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        parse_set(["rl.lr"])
