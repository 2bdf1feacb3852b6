"""Where state lives (`Home`) and how a preset is read (`load_preset`).

A preset is a sparse TOML file in `configs/`; its sections are pydantic models owned by the packages that use
them. `--set section.key=value` overrides one key; an unknown key is an error that names the nearest one.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from rollout.errors import ConfigError, NewerHomeError

HOME_VERSION = 1
CODE_ROOT = Path(__file__).resolve().parent.parent
MIN_FREE_MB = 500

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Home:
    """Layout of OPENFORGE_HOME."""

    root: Path

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def tasks(self) -> Path:
        return self.root / "tasks"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def datasets(self) -> Path:
        return self.root / "datasets"

    @property
    def harnesses(self) -> Path:
        """Installed harness programs, one folder a version."""
        return self.root / "harnesses"

    @property
    def blobs(self) -> Path:
        return self.root / "blobs"

    @property
    def sandboxes(self) -> Path:
        return self.root / "sandboxes"

    @property
    def reports(self) -> Path:
        return self.root / "reports"

    @property
    def run(self) -> Path:
        """Sockets, pid files and keys of running processes; mode 0700."""
        return self.root / "run"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def database_url(self, name: str) -> str:
        """SQLAlchemy URL of `ledger`, `rollouts` or `calls`; OPENFORGE_STORE_URL names a PostgreSQL for all."""
        return os.environ.get("OPENFORGE_STORE_URL") or f"sqlite:///{self.root / (name + '.db')}"


def open_home(root: str | Path | None = None, *, min_free_mb: int = MIN_FREE_MB) -> Home:
    """Opens (or makes) OPENFORGE_HOME, default `~/.openforge`.

    Raises ConfigError when it cannot be written or the disk is full, NewerHomeError for a newer home.
    """
    path = Path(root or os.environ.get("OPENFORGE_HOME") or Path.home() / ".openforge").absolute()
    home = Home(path)
    try:
        for folder in (path, home.run, home.logs):
            folder.mkdir(parents=True, exist_ok=True)
        home.run.chmod(0o700)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".write-") as probe:
            probe.write(b"ok")
    except OSError as error:
        raise ConfigError(
            f"OPENFORGE_HOME {path} cannot be written ({error.strerror or error}); "
            "set OPENFORGE_HOME to a folder that you may write to"
        ) from error
    _check_version(path / "home.json")
    free = shutil.disk_usage(path).free // 2**20
    if free < min_free_mb:
        raise ConfigError(f"only {free} MiB are free under {path}, {min_free_mb} MiB are needed; free some or move it")
    return home


def _check_version(file: Path) -> None:
    if not file.exists():
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"version": HOME_VERSION}))
        part.replace(file)
        return
    try:
        version = int(json.loads(file.read_text())["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not readable as a home's version file ({error}); restore or remove it") from error
    if version > HOME_VERSION:
        raise NewerHomeError(
            f"{file.parent} was written by a newer openforge (home version {version}, this one knows {HOME_VERSION}); "
            "upgrade openforge or use another OPENFORGE_HOME"
        )


# -- presets -------------------------------------------------------------------------------------------


def preset_path(name: str) -> Path:
    """A preset's file: a path that exists, or `configs/<name>.toml`."""
    if (name.endswith(".toml") and Path(name).exists()) or ("/" in name and Path(name).is_dir()):
        return Path(name)
    path = CODE_ROOT / "configs" / f"{name}.toml"
    if not path.exists():
        known = sorted(p.stem for p in path.parent.glob("*.toml"))
        raise ConfigError(f"no preset {name!r}{_nearest(name, known)}; there are: {', '.join(known)}")
    return path


def load_preset(model: type[M], name: str, overrides: Mapping[str, Any] | None = None) -> M:
    """The preset `name` as `model`; `overrides` maps dotted keys to values (strings are read as TOML values)."""
    path = preset_path(name)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read as a preset ({error.strerror}); give a TOML file") from error
    for key, value in (overrides or {}).items():
        _assign(data, key, value)
    return validate(model, data, source=f"preset {name!r}")


def validate(model: type[M], data: Mapping[str, Any], *, source: str) -> M:
    for key in _unknown(model, data):
        raise ConfigError(f"{source}: unknown key {key!r}{_nearest_key(key, [*_keys(model)])}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        rows = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors())
        raise ConfigError(f"{source}: {rows}") from error


def parse_set(items: Sequence[str]) -> dict[str, Any]:
    """`["rl.lr=1e-5"]` -> `{"rl.lr": "1e-5"}`. Raises ConfigError without an equals sign."""
    pairs: dict[str, Any] = {}
    for item in items:
        key, sep, value = item.partition("=")
        if not sep or not key.strip():
            raise ConfigError(f"--set takes section.key=value, not {item!r}")
        pairs[key.strip()] = value.strip()
    return pairs


def _assign(data: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{key!r}: {parent!r} is a value, not a section")
    if isinstance(value, str):
        with suppress(tomllib.TOMLDecodeError):  # a bare string stays one
            value = tomllib.loads(f"v = {value}")["v"]
    data[last] = value


def _unknown(model: type[BaseModel], data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in data.items():
        if key not in model.model_fields:
            yield ".".join([prefix + key, *(list(value)[:1] if isinstance(value, Mapping) else [])])
        elif (nested := _section(model, key)) is not None and isinstance(value, Mapping):
            yield from _unknown(nested, value, f"{prefix}{key}.")


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of every key, sections included."""
    for key in model.model_fields:
        yield prefix + key
        if (nested := _section(model, key)) is not None:
            yield from _keys(nested, f"{prefix}{key}.")


def _section(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    annotation = model.model_fields[key].annotation
    inner = [a for a in (annotation, *get_args(annotation)) if isinstance(a, type)]
    return next((a for a in inner if issubclass(a, BaseModel)), None)


def _nearest_key(key: str, known: Sequence[str]) -> str:
    """A key of the same section that is spelt alike, else one of that very name elsewhere, else the nearest of all."""
    section, _, last = key.rpartition(".")
    beside = [k for k in known if k.rpartition(".")[0] == section]
    elsewhere = [k for k in known if k.rpartition(".")[2] == last]
    for candidates in (difflib.get_close_matches(key, beside, 1, 0.75), elsewhere):
        if candidates:
            return f" (did you mean {candidates[0]!r}?)"
    return _nearest(key, beside) or _nearest(key, known)


def _nearest(key: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    return f" (did you mean {close[0]!r}?)" if close else ""
