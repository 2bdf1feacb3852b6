"""Writes a bundle: at once or not at all, and never one that could not be read again."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.bundle.reading import load_task
from rollout.bundle.spec import BundleSpec, plain_dockerfile
from rollout.errors import ConfigError
from rollout.types import TaskSpec, VerificationMode


def write_bundle(spec: BundleSpec, folder: str | Path) -> TaskSpec:
    """Writes a bundle, replacing one that stands there, and returns its task.

    It is laid out beside the target and checked before it takes its place. Raises ConfigError.
    """
    root = Path(folder).absolute()
    if ".." in spec.id:
        raise ConfigError(f"task id {spec.id!r} holds '..'; use letters, digits, '.', '-' and '_'")
    part = root.with_name(f".{root.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        for name, data in _layout(spec).items():
            _write(part, name, data)
        load_task(part)
        if root.exists():
            root.rename(part.with_suffix(".old"))
        part.rename(root)
    except (OSError, UnicodeEncodeError) as error:
        raise ConfigError(f"bundle {root} cannot be written: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(part.with_suffix(".old"), ignore_errors=True)
    return load_task(root)


def _layout(spec: BundleSpec) -> dict[str, bytes]:
    files = {
        "task.toml": _toml(spec).encode(),
        "instruction.md": spec.instruction.encode(),
        "environment/Dockerfile": (spec.dockerfile or plain_dockerfile(bool(spec.files))).encode(),
        **{f"tests/{name}": data for name, data in spec.tests.items()},
        "tests/test.sh": spec.test.encode(),
        **{f"environment/files/{name}": data for name, data in spec.files.items()},
        **{f"solution/wrong/{name}.sh": text.encode() for name, text in spec.wrong.items()},
    }
    if spec.services:
        files["environment/services.json"] = _dump(spec.services)
    if spec.solve:
        files["solution/solve.sh"] = spec.solve.encode()
    if spec.plan:
        files["solution/plan.json"] = _dump(spec.plan)
    return files


def _write(root: Path, name: str, data: bytes) -> None:
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise ConfigError(f"{name!r} is no relative path inside a bundle")
    path = root.joinpath(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    if name.endswith(".sh"):
        path.chmod(0o755)


def _dump(value: Any) -> bytes:
    try:
        return (json.dumps(value, ensure_ascii=False, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a bundle's JSON cannot be written: {error}") from error


def _toml(spec: BundleSpec) -> str:
    p, r = spec.provenance, spec.resources
    shown = {"family": p.family, "difficulty": p.difficulty}
    place = {"domain": spec.domain.value, "category": spec.category, "split": spec.split.value}
    tables: dict[str, dict[str, Any]] = {
        "task": {"name": f"openforge/{spec.id}", "description": spec.description, "keywords": spec.keywords},
        "metadata": {**spec.metadata, **place, **shown},
        "metadata.openforge": {
            "harness": spec.harness,
            "services": sorted(spec.services),
            "tools": spec.tools,
            "mode": spec.verifier.mode.value,
            "state": spec.verifier.state,
            "needs_image": spec.needs_image,
            **({"error_rate": spec.error_rate} if spec.error_rate else {}),
            "pids": r.pids,
            "output_kb": r.output_kb,
            "setup_timeout_sec": spec.timeouts.setup,
            "provenance": p.model_dump(mode="json", exclude={"family", "difficulty"}),
        },
        "agent": {"timeout_sec": spec.timeouts.agent},
        "verifier": {"timeout_sec": spec.timeouts.verify},
        "environment": {
            "cpus": r.cpus,
            "memory_mb": r.memory_mb,
            "storage_mb": r.disk_mb,
            "network_mode": "no-network",
        },
    }
    top: dict[str, Any] = {"schema_version": "1.4"}
    if spec.verifier.mode is VerificationMode.FRESH:
        top["artifacts"] = spec.verifier.state
        tables["verifier"]["environment_mode"] = "separate"
    blocks = [_rows(top), *(f"[{name}]\n{_rows(rows)}" for name, rows in tables.items())]
    return "\n".join(blocks)


def _rows(rows: Mapping[str, Any]) -> str:
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in rows.items())


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    """A TOML value. JSON's string escapes are TOML's, but for DEL."""
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case Mapping():
            return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }" if value else "{}"
        case list() | tuple():
            return "[" + ", ".join(map(_value, value)) + "]"
    raise ConfigError(f"{value!r} is no TOML value; metadata takes text, numbers, booleans, lists and tables")
