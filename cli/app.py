"""The `openforge` command: parses, calls a flow, a stage or the store. Heavy imports wait inside the commands."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from importlib.metadata import version

from cyclopts import App

from cli import demo, doctor, engine, gc, harness, merge_report, models, report, rollouts, run, serve, stages, tasks, up
from rollout.errors import ConfigError, OpenForgeError

app = App(
    name="openforge",
    help="Synthesise agent tasks, distil a teacher, train with RL inside the real harness, evaluate.",
    version=lambda: version("openforge-rl"),
    version_flags="--version",
)
app.command(up.up)
app.command(up.down)
app.command(up.status)
app.command(serve.serve)
app.command(engine.app)
app.command(harness.app)
app.command(doctor.doctor)
app.command(demo.demo)
app.command(run.run)
app.command(models.app)
app.command(tasks.app)
for stage in (stages.synth, stages.distill, stages.sft, stages.rl, stages.evaluate, stages.pipeline):
    app.command(stage, name="eval" if stage is stages.evaluate else None)
app.command(rollouts.app)
rollouts.app.command(merge_report.merge_report)
app.command(report.report)
app.command(gc.gc)


def main(tokens: Sequence[str] | None = None) -> None:
    """Entry point. Exit code 2 for what the user can mend, 1 for a failure, 130 after Ctrl-C."""
    try:
        app(list(tokens) if tokens is not None else None)
    except ConfigError as error:
        _fail(str(error), 2)
    except OpenForgeError as error:
        _fail(f"{type(error).__name__}: {error}", 1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _fail(f"the disk is full ({error.filename or error}); free some space (`openforge gc`) and start again", 1)
    except KeyboardInterrupt:
        _fail("interrupted", 130)


def _fail(message: str, code: int) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
