"""`openforge tasks list|show|validate`: task bundles on disk."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App
from rich.console import Console
from rich.markup import escape

from cli.table import print_rows
from rollout.config import open_home
from rollout.errors import ConfigError

app = App(name="tasks", help="Lists, shows and validates task bundles.")
console = Console(highlight=False)


@app.command(name="list")
def list_tasks(folder: str = "", /) -> int:
    """Lists the tasks of a folder, or of every batch of the home.

    Parameters
    ----------
    folder
        A folder of task bundles.
    """
    from rollout.bundle import load_tasks

    home = open_home()
    batches = [Path(folder)] if folder else sorted(p for p in home.tasks.glob("*") if p.is_dir())
    rows = []
    for batch in batches:
        for task in load_tasks(batch):
            family = task.provenance.family
            rows.append((task.id, task.split.value, family, ",".join(task.services), task.harness, batch.name))
    print_rows(console, ("id", "split", "family", "services", "harness", "batch"), rows)
    console.print(f"{len(rows)} tasks")
    return 0


@app.command
def show(task: str, /) -> int:
    """Prints one task: instruction, services, limits, provenance.

    Parameters
    ----------
    task
        A task bundle's folder, or a task id of the home.
    """
    from rollout.bundle import load_task

    spec = load_task(find_task(task))
    console.print(f"[bold]{escape(spec.id)}[/bold]  {spec.domain}/{spec.category}  split {spec.split}")
    console.print(f"bundle    {escape(spec.bundle)}\ndigest    {spec.digest}")
    console.print(f"harness   {spec.harness}\nservices  {', '.join(spec.services) or 'none'}")
    console.print(
        f"limits    {spec.resources.cpus:g} CPU, {spec.resources.memory_mb} MiB, agent {spec.timeouts.agent:g} s"
    )
    console.print(f"made by   {spec.provenance.author} {spec.provenance.family} {spec.provenance.batch}\n")
    console.print(spec.instruction, markup=False)
    return 0


@app.command
def validate(folder: str, /) -> int:
    """Checks a bundle, or every bundle of a folder: schema, instruction, verifier, digest.

    Parameters
    ----------
    folder
        A task bundle's folder, or a folder of them.
    """
    from rollout.bundle import load_task
    from rollout.harness import make_harness

    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"{folder} is no folder")
    bundles = [root] if (root / "task.toml").exists() else sorted(p.parent for p in root.glob("*/task.toml"))
    if not bundles:
        raise ConfigError(f"{folder} holds no task bundle: expected task.toml in it or in its folders")
    wrong = 0
    for bundle in bundles:
        try:
            spec = load_task(bundle)
            make_harness(spec.harness)
            console.print(f"ok     {spec.id}")
        except ConfigError as error:
            wrong += 1
            console.print(f"wrong  {bundle.name}: {error}", markup=False)
    if wrong:
        raise ConfigError(f"{wrong} of {len(bundles)} bundles are not valid")
    return 0


def find_task(task: str) -> Path:
    """Folder of a task given by folder or by id. Raises ConfigError."""
    if Path(task).is_dir():
        return Path(task).absolute()
    found = sorted(open_home().tasks.glob(f"*/{task}"))
    if not found:
        raise ConfigError(f"no task folder or id {task!r}; `openforge tasks list` shows them")
    return found[-1]
