"""Verifier of a procedural task, copied into each bundle as tests/verify.py: stdlib only, run by `python3 -I -S`.

Reward 1 when the services ended in exactly the expected state, by exactly the expected writes, and the answer
says the expected word; else 0. It reads /logs/artifacts/services.json, /workspace/answer.txt and the
expected.json beside it, and writes /logs/verifier/reward.txt. A missing services.json is no answer of the policy:
the program then crashes and gives no reward. An argument puts another root before these paths.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ANSWER_MAX = 65536


def grade(final: dict[str, Any], answer: str, expected: dict[str, Any]) -> float:
    """0.0 or 1.0 for the services' final states and audit, and the answer's text."""
    writes = [
        [entry["service"], entry["tool"], entry["arguments"]]
        for entry in final["audit"]
        if entry["label"] == "write" and entry["status"] < 400
    ]
    said = re.search(r"(?<!\w)" + re.escape(expected["answer"]) + r"(?!\w)", answer, re.IGNORECASE)
    right = final["services"] == expected["services"] and writes == expected["writes"] and said
    return 1.0 if right else 0.0


def read_answer(path: str) -> str:
    """Text of a regular file, never through a link; empty when there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return ""
        return file.read(ANSWER_MAX).decode("utf-8", "replace")


def main(root: str = "") -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "expected.json"), encoding="utf-8") as file:
        expected = json.load(file)
    with open(root + "/logs/artifacts/services.json", encoding="utf-8") as file:
        final = json.load(file)
    reward = grade(final, read_answer(root + "/workspace/answer.txt"), expected)
    os.makedirs(root + "/logs/verifier", exist_ok=True)
    with open(root + "/logs/verifier/reward.txt", "w", encoding="utf-8") as file:
        file.write(str(reward) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:2])
