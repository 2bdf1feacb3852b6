"""Harness programs on this host, once per version: `<home>/harnesses/<name>-<version>/`, mounted read-only.

    lock -> empty folder -> npm | pip -> right version? -> warm the compile caches -> installed.json, written last

A folder without `installed.json` is a broken install and is made anew. Versions are pinned: npm silently takes an
older version that suits its Node, so what came is checked against what was asked for, twice.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import ValidationError

from rollout.config import Home
from rollout.errors import ConfigError
from rollout.types import Record

Progress = Callable[[str], None]
NODE = "24.21.0"
"""Node.js of the harnesses that need one of their own (npm package `node-linux-<arch>`)."""
INSTALL_S = 900.0
CHECK_S = 120.0
MARKER = "installed.json"
OFFLINE = (
    "ENOTFOUND",
    "EAI_AGAIN",
    "ECONNREFUSED",
    "ENETUNREACH",
    "ETIMEDOUT",
    "EHOSTUNREACH",
    "Connection",
    "ENOTCACHED",
)
ARCH = {"x86_64": "x64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Recipe:
    """How a harness is installed. In paths and package names `{arch}` is `x64` or `arm64`."""

    name: str
    version: str
    packages: tuple[str, ...]
    """With their versions; the first is the harness itself."""
    program: str
    """Pattern of the executable below the folder."""
    check: tuple[str, ...] = ("{program}", "--version")
    """Command whose output names the version. `{program}` is the executable, `{folder}` the install."""
    env: Mapping[str, str] = field(default_factory=dict)
    warm: Callable[[Path], None] | None = None
    """Fills compile caches inside the folder."""
    python: bool = False
    """From a Python index into a virtual environment instead of from npm."""


class Installed(Record):
    """`installed.json`. `program` is relative to the folder."""

    name: str
    version: str
    program: str
    seconds: float = 0.0


def folder_of(home: Home, recipe: Recipe) -> Path:
    return home.harnesses / f"{recipe.name}-{recipe.version}"


def find(home: Home, recipe: Recipe) -> Installed | None:
    """What is installed, or None."""
    try:
        found = Installed.model_validate_json((folder_of(home, recipe) / MARKER).read_text())
    except (FileNotFoundError, ValidationError):
        return None
    return found if (found.name, found.version) == (recipe.name, recipe.version) else None


def require(home: Home, recipe: Recipe) -> tuple[Path, str]:
    """Folder and program of an installed harness. Raises ConfigError that says how to install it."""
    found = find(home, recipe)
    if found is None:
        raise ConfigError(
            f"{recipe.name} {recipe.version} is not installed in {home.root}: openforge harness install {recipe.name}"
        )
    return folder_of(home, recipe), found.program


def install(home: Home, recipe: Recipe, progress: Progress = print) -> Path:
    """Installs it unless it is there. Safe to call from several processes at once.

    Raises ConfigError for missing npm, no network, another version than asked for, or a program that does not start.
    """
    folder = folder_of(home, recipe)
    if find(home, recipe):
        return folder
    home.harnesses.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(home.harnesses / f".{folder.name}.lock", timeout=INSTALL_S):
            if not find(home, recipe):
                _install(folder, recipe, progress)
    except Timeout as error:
        raise ConfigError(f"another process has been installing {folder.name} for {INSTALL_S:.0f} s") from error
    return folder


def _install(folder: Path, recipe: Recipe, progress: Progress) -> None:
    began = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    progress(f"{recipe.name} {recipe.version}: downloading")
    (_from_index if recipe.python else _from_npm)(folder, recipe)
    program = _program(folder, recipe)
    progress(f"{recipe.name} {recipe.version}: checking")
    _check(folder, recipe, program)
    if recipe.warm:
        progress(f"{recipe.name} {recipe.version}: warming its compile cache")
        recipe.warm(folder)
    seconds = time.monotonic() - began
    marker = Installed(name=recipe.name, version=recipe.version, program=program, seconds=round(seconds, 1))
    part = folder / f"{MARKER}.part"
    part.write_text(marker.model_dump_json())
    part.replace(folder / MARKER)
    progress(f"{recipe.name} {recipe.version}: installed in {seconds:.0f} s")


def _from_npm(folder: Path, recipe: Recipe) -> None:
    npm = shutil.which("npm")
    if not npm:
        raise ConfigError(f"npm is missing, and {recipe.name} comes from it: install Node.js 20 or newer")
    flags = ("--no-audit", "--no-fund", "--ignore-scripts", "--save-exact", "--fetch-retries=1", "--loglevel=error")
    argv = (npm, "install", "--prefix", str(folder), *flags, *map(expand, recipe.packages))
    _run(argv, recipe, {}, "npm")
    for package in map(expand, recipe.packages):
        name, _, version = package.rpartition("@")
        file = folder / "node_modules" / name / "package.json"
        came = json.loads(file.read_text())["version"] if file.exists() else "none"
        _same(name, version, came)


def _from_index(folder: Path, recipe: Recipe) -> None:
    """The environment is of the system's own Python: a sandbox shows no other."""
    _run(("/usr/bin/python3", "-m", "venv", "--without-pip", str(folder)), recipe, {}, "python3 -m venv")
    pip = (sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"))
    _run((*pip, "install", "--quiet", "--disable-pip-version-check", *recipe.packages), recipe, {}, "pip")
    site = [str(path) for path in folder.glob("lib/python3*/site-packages")]
    have = {found.metadata["Name"]: found.version for found in distributions(path=site)}
    for package in recipe.packages:
        name, _, version = package.partition("==")
        _same(name, version, have.get(name, "none"))


def _same(name: str, asked: str, came: str) -> None:
    if came != asked:
        raise ConfigError(f"asked for {name} {asked}, but {came} was installed; is that version in your registry?")


def _program(folder: Path, recipe: Recipe) -> str:
    found = sorted(folder.glob(expand(recipe.program)))
    if not found:
        wanted = expand(recipe.program)
        raise ConfigError(f"{recipe.name} {recipe.version} has no {wanted}; is it built for {platform.machine()}?")
    return str(found[0].relative_to(folder))


def _check(folder: Path, recipe: Recipe, program: str) -> None:
    argv = [expand(word).format(program=folder / program, folder=folder) for word in recipe.check]
    with tempfile.TemporaryDirectory() as place:
        said = _run(argv, recipe, {"HOME": place, **recipe.env}, Path(argv[0]).name)
    if recipe.version not in said:
        raise ConfigError(f"{recipe.name} was to be {recipe.version}, but says: {said.strip()[-200:]}")


def _run(argv: Sequence[str], recipe: Recipe, env: Mapping[str, str], what: str) -> str:
    """Output of a command. Raises ConfigError with its last words."""
    limit = CHECK_S if env else INSTALL_S
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
            env={**os.environ, **env},
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{recipe.name} could not be installed: {what}: {error}") from error
    if done.returncode == 0:
        return done.stdout + done.stderr
    tail = (done.stderr or done.stdout).strip()[-800:]
    if any(word in tail for word in OFFLINE):
        raise ConfigError(f"{recipe.name} could not be downloaded: {what} does not reach its registry. {tail}")
    raise ConfigError(f"{recipe.name} could not be installed: {what} ended with {done.returncode}: {tail}")


def expand(text: str) -> str:
    """Raises ConfigError on a machine that no harness is built for."""
    if "{arch}" not in text:
        return text
    arch = ARCH.get(platform.machine())
    if arch is None:
        raise ConfigError(f"no build for {platform.machine()}; there are: {', '.join(ARCH)}")
    return text.replace("{arch}", arch)
