"""Reads and checks a bundle. Whatever is wrong is a ConfigError that names the file and says what to do."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollout.bundle.spec import BundleSpec, Extras, plain_dockerfile
from rollout.errors import ConfigError
from rollout.types import Provenance, Resources, TaskSpec, Timeouts, VerifierSpec

INSTRUCTION_MAX = 65536
"""Characters; a file of more than four times as many bytes is not even read."""
FILE_MAX = 32 * 2**20
PLAIN = frozenset({"FROM", "WORKDIR", "COPY", "ENV", "LABEL", "USER", "ARG"})
"""Dockerfile instructions that the local sandbox gives without an image."""
PLAIN_BASES = ("debian", "python", "ubuntu")
_SHARED = (
    "domain",
    "category",
    "split",
    "harness",
    "tools",
    "needs_image",
    "error_rate",
    "verifier",
    "resources",
    "timeouts",
    "provenance",
)


def load_task(folder: str | Path) -> TaskSpec:
    """The task of a bundle. Raises ConfigError for everything that keeps it from being run."""
    root = Path(folder).absolute()
    config = _config(root)
    ours = _table(config, "openforge", root) or _table(_table(config, "metadata", root), "openforge", root)
    extras = _extras(ours, root)
    metadata = _table(config, "metadata", root) if ours else {}
    seeds = _seeds(root)
    if extras.services is not None and set(extras.services) != set(seeds):
        raise ConfigError(
            f"{root}: task.toml names the services {sorted(extras.services)}, environment/services.json seeds "
            f"{sorted(seeds)}; they must be the same"
        )
    _check_files(root, extras)
    name = str(_table(config, "task", root).get("name") or root.name)
    spec: dict[str, Any] = {
        "id": name.rsplit("/", 1)[-1].lower(),
        "harness": extras.harness,
        "instruction": _instruction(root),
        "bundle": str(root),
        "digest": digest_bundle(root),
        "services": tuple(sorted(seeds)),
        "tools": extras.tools,
        "verifier": VerifierSpec(mode=extras.mode, state=extras.state),
        "needs_image": _needs_image(root, config) if extras.needs_image is None else extras.needs_image,
        "error_rate": extras.error_rate,
        "provenance": _provenance(extras, metadata),
        **{key: metadata[key] for key in ("domain", "category", "split") if key in metadata},
    }
    try:
        return TaskSpec(**spec, resources=_resources(config, extras, root), timeouts=_timeouts(config, extras, root))
    except ValidationError as error:
        raise ConfigError(f"{root / 'task.toml'}: {_rows(error)}") from error


def _extras(ours: Mapping[str, Any], root: Path) -> Extras:
    try:
        return Extras.model_validate(ours)
    except ValidationError as error:
        known = ", ".join(Extras.model_fields)
        message = f"{root / 'task.toml'} [metadata.openforge]: {_rows(error)}; the keys are {known}"
        raise ConfigError(message) from error


def _rows(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())


def load_tasks(folder: str | Path) -> list[TaskSpec]:
    """Every bundle directly below `folder`, by name. Raises ConfigError when there is none."""
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"there is no task set at {root}; give a folder of bundles, or run `openforge synth` first")
    folders = [path.parent for path in sorted(root.glob("*/task.toml")) if not path.parent.name.startswith(".")]
    tasks = [load_task(path) for path in folders]
    if not tasks:
        raise ConfigError(f"{root} holds no task bundle (a folder with task.toml); give a task set's folder")
    return tasks


def read_bundle(folder: str | Path) -> BundleSpec:
    """All parts of a bundle, for a new version of it. Raises ConfigError."""
    task, root = load_task(folder), Path(folder).absolute()
    config = _config(root)
    package = _table(config, "task", root)
    known = {"domain", "category", "split", "family", "difficulty", "openforge"}
    tests = _files(root / "tests")
    solution = _files(root / "solution")
    docker = root / "environment" / "Dockerfile"
    dockerfile = _text(docker) if docker.exists() else ""
    files = _files(root / "environment" / "files")
    return BundleSpec(
        id=task.id,
        instruction=task.instruction,
        test=_decode(tests.pop("test.sh"), root / "tests" / "test.sh"),
        description=str(package.get("description", "")),
        keywords=tuple(package.get("keywords", ())),
        services=_seeds(root),
        files=files,
        tests=tests,
        solve=_decode(solution.pop("solve.sh", b""), root / "solution" / "solve.sh"),
        wrong={
            name[6:-3]: _decode(data, root / "solution" / name)
            for name, data in solution.items()
            if re.fullmatch(r"wrong/[^/]+\.sh", name)
        },
        plan=_json(root / "solution" / "plan.json"),
        dockerfile="" if dockerfile == plain_dockerfile(bool(files)) else dockerfile,
        metadata={k: v for k, v in _table(config, "metadata", root).items() if k not in known},
        **{key: getattr(task, key) for key in _SHARED},
    )


def digest_bundle(folder: str | Path) -> str:
    """sha256 over sorted relative paths and contents. Raises ConfigError for anything but files and folders."""
    total = hashlib.sha256()
    for name, data in _files(Path(folder)).items():
        for part in (os.fsencode(name), data):
            total.update(len(part).to_bytes(8, "big"))
            total.update(part)
    return total.hexdigest()


def _files(root: Path) -> dict[str, bytes]:
    """Relative path -> contents, sorted; empty when there is no such folder."""
    found: dict[str, bytes] = {}
    for path in sorted(root.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ConfigError(f"{path} is neither a file nor a folder; a bundle holds nothing else, replace it")
        if path.is_file():
            if path.stat().st_size > FILE_MAX:
                raise ConfigError(f"{path} is larger than {FILE_MAX // 2**20} MiB; a bundle is no place for it")
            found[path.relative_to(root).as_posix()] = path.read_bytes()
    return dict(sorted(found.items()))


def _decode(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error


def _text(path: Path) -> str:
    try:
        return _decode(path.read_bytes(), path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}); a task bundle needs it") from error


def _config(root: Path) -> dict[str, Any]:
    path = root / "task.toml"
    try:
        return tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _table(config: Mapping[str, Any], name: str, root: Path) -> dict[str, Any]:
    table = config.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{root / 'task.toml'}: {name} must be a table, not {table!r}")
    return table


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(_text(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _seeds(root: Path) -> dict[str, Any]:
    return _json(root / "environment" / "services.json")


def _instruction(root: Path) -> str:
    path = root / "instruction.md"
    size = path.stat().st_size if path.exists() else 0
    text = _text(path).strip() if size <= 4 * INSTRUCTION_MAX else ""
    if size > 4 * INSTRUCTION_MAX or len(text) > INSTRUCTION_MAX:
        raise ConfigError(f"{path} has {size} bytes; an instruction has at most {INSTRUCTION_MAX} characters")
    if not text:
        raise ConfigError(f"{path} is empty; it must say what the policy is to do")
    return text


def _check_files(root: Path, extras: Extras) -> None:
    test = root / "tests" / "test.sh"
    if not test.is_file() or not test.stat().st_size:
        raise ConfigError(f"{test} is missing or empty; it must write a reward to /logs/verifier/reward.txt or .json")
    for path in extras.state:
        if ".." in path.split("/") or not (path == "/workspace" or path.startswith("/workspace/")):
            raise ConfigError(f"{root / 'task.toml'}: state {path!r} is not below /workspace")


def _provenance(extras: Extras, metadata: Mapping[str, Any]) -> Provenance:
    shown = {key: str(metadata[key]) for key in ("family", "difficulty") if key in metadata}
    return extras.provenance.model_copy(update=shown)


def _resources(config: Mapping[str, Any], extras: Extras, root: Path) -> Resources:
    place = _table(config, "environment", root)
    named = {"cpus": "cpus", "memory_mb": "memory_mb", "storage_mb": "disk_mb"}
    values = {ours: place[theirs] for theirs, ours in named.items() if place.get(theirs) is not None}
    return Resources(**values, pids=extras.pids, output_kb=extras.output_kb)


def _timeouts(config: Mapping[str, Any], extras: Extras, root: Path) -> Timeouts:
    values: dict[str, Any] = {"setup": extras.setup_timeout_sec}
    for theirs, ours in (("agent", "agent"), ("verifier", "verify")):
        seconds = _table(config, theirs, root).get("timeout_sec")
        if seconds is not None:
            values[ours] = seconds
    return Timeouts(**values)


def _needs_image(root: Path, config: Mapping[str, Any]) -> bool:
    """Whether the environment is more than files and services on a plain base."""
    place = root / "environment"
    if _table(config, "environment", root).get("docker_image") or list(place.glob("docker-compose.y*ml")):
        return True
    docker = place / "Dockerfile"
    if not docker.exists():
        return False
    lines = re.sub(r"\\\n", " ", _text(docker)).splitlines()
    words = [line.split() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    bases = [word[1] for word in words if word[0].upper() == "FROM" and len(word) > 1]
    return any(word[0].upper() not in PLAIN for word in words) or any(
        not base.rsplit("/", 1)[-1].startswith(PLAIN_BASES) for base in bases
    )
