"""`python -m flows NAME PARAMS_JSON [RESULT_FILE]`: one flow in this process, against PREFECT_API_URL.

This is how the `openforge` command runs a stage: Prefect stays in a process of its own. The result file says how
it ended; the exit code is 2 for what the user can mend, else 1.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from rollout.errors import ConfigError, OpenForgeError

NAMES = ("synth", "propose", "prune", "build", "trial", "refine", "distill", "sft", "rl", "eval", "pipeline")


def main(arguments: Sequence[str]) -> int:
    name, body, *rest = arguments
    if name not in NAMES:
        raise ConfigError(f"no flow {name!r}; there are: {', '.join(NAMES)}")
    flow = getattr(importlib.import_module(f"flows.{name}"), name)
    error, code = "", 1
    try:
        flow(**json.loads(body))
        code = 0
    except ConfigError as raised:
        error, code = str(raised), 2
    except OpenForgeError as raised:
        error = f"{type(raised).__name__}: {raised}"
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
        traceback.print_exc()
    if rest:
        Path(rest[0]).write_text(json.dumps({"error": error, "code": code}))
    if error:
        print(f"error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
