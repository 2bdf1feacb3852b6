"""Which program serves a model's weights, and the environment that it needs.

`embedded` is ours, on the CPU, in this environment. `vllm` runs in an environment of its own (design "Engine"), which
`make vllm-env` builds; OPENFORGE_VLLM_PYTHON names another one, for example with vLLM's CUDA build.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args

from rollout.config import CODE_ROOT
from rollout.errors import ConfigError

Backend = Literal["embedded", "vllm"]
BACKEND_VARIABLE = "OPENFORGE_ENGINE"
PYTHON_VARIABLE = "OPENFORGE_VLLM_PYTHON"


def default_backend() -> Backend:
    """What $OPENFORGE_ENGINE says, else the embedded engine. Raises ConfigError."""
    named = os.environ.get(BACKEND_VARIABLE) or "embedded"
    for backend in get_args(Backend):
        if named == backend:
            return backend  # type: ignore[no-any-return]
    raise ConfigError(f"{BACKEND_VARIABLE}={named!r} is no engine; there are: {', '.join(get_args(Backend))}")


def vllm_python() -> Path:
    """The interpreter of vLLM's environment, whether it is there or not."""
    return Path(os.environ.get(PYTHON_VARIABLE) or CODE_ROOT / ".venv-vllm" / "bin" / "python")


def program(backend: Backend) -> tuple[str, ...]:
    """The command that serves, without its arguments. Raises ConfigError where its environment is missing."""
    if backend == "embedded":
        return (sys.executable, "-m", "training.serve")
    if not vllm_python().exists():
        raise ConfigError(
            f"vLLM's environment is missing ({vllm_python()}): run `make vllm-env`, or "
            f"`openforge engine start MODEL --backend vllm`, which does; or set {PYTHON_VARIABLE}"
        )
    return (str(vllm_python()), "-m", "training.vllm_serve")


def make_environment(backend: Backend) -> None:
    """Builds what the backend needs and has not, showing the builder's output. Raises ConfigError."""
    if backend == "embedded" or vllm_python().exists():
        return
    if os.environ.get(PYTHON_VARIABLE):
        raise ConfigError(f"{PYTHON_VARIABLE}={vllm_python()} is no interpreter; correct it or unset it")
    try:
        done = subprocess.run(["make", "vllm-env"], cwd=CODE_ROOT, check=False)
    except FileNotFoundError as error:
        raise ConfigError("`make` is missing, which builds vLLM's environment: apt-get install make") from error
    if done.returncode:
        raise ConfigError(f"`make vllm-env` ended with {done.returncode}; its output is above")
