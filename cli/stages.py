"""`openforge synth|distill|sft|rl|eval|pipeline`: one stage, or all, by the same flow that the Prefect UI runs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console

from cli.flow import FlowCall, prefect_api, run_flow
from cli.options import StageOptions
from cli.summary import stage_lines
from rollout.config import open_home

console = Console(highlight=False)
DEFAULTS = StageOptions()


def synth(*, options: StageOptions = DEFAULTS) -> int:
    """Synthesises tasks: propose, prune, build, trial, refine."""
    return _run("synth", options)


def distill(*, options: StageOptions = DEFAULTS) -> int:
    """Rolls the teacher out on the tasks and keeps its successes as a dataset."""
    return _run("distill", options)


def sft(*, options: StageOptions = DEFAULTS) -> int:
    """Fine-tunes the model on the distilled dataset."""
    return _run("sft", options)


def rl(*, options: StageOptions = DEFAULTS) -> int:
    """Trains with RL inside the harness, from the SFT checkpoint."""
    return _run("rl", options)


def evaluate(
    *,
    options: StageOptions = DEFAULTS,
    label: Literal["base", "sft", "rl", "latest"] = "latest",
    daily: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Evaluates a model on the held-out tasks.

    Parameters
    ----------
    label
        Which model of the run: base, sft, rl, or the latest that it has trained.
    daily
        Keep the result under today's date, so that each day counts anew.
    """
    return _run("eval", options, label=label, daily=daily)


def pipeline(*, options: StageOptions = DEFAULTS) -> int:
    """Runs the whole chain: synth, eval, distill, sft, eval, rl, eval, report."""
    return _run("pipeline", options)


def _run(name: str, options: StageOptions, **more: Any) -> int:
    from tasks.params import EvalParams, StageParams

    params = options.params() | more
    home = open_home()
    asked = (EvalParams if name == "eval" else StageParams).model_validate(params)
    run = asked.task_run if name == "synth" else asked.run_name
    with prefect_api(home, name, console) as url:
        run_flow(home, FlowCall(name, params, run), url, console)
    for line in stage_lines(home, run):
        console.print(line)
    return 0
