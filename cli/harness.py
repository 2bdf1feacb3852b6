"""`openforge harness install|list`: the programs that rollouts run, installed once per version."""

from __future__ import annotations

import shutil

from cyclopts import App
from rich.console import Console

from cli.table import print_rows
from rollout.config import open_home
from rollout.errors import ConfigError

app = App(name="harness", help="Installs and lists harness programs.")
console = Console(highlight=False, soft_wrap=True)


@app.command
def install(*names: str) -> int:
    """Installs harnesses at their pinned versions; one that is there already is left as it is.

    Parameters
    ----------
    names
        Of `openforge harness list`; none: all that can be installed.
    """
    from rollout.harness import ADAPTERS
    from rollout.harness import install as installing

    home = open_home()
    recipes = {name: adapter.recipe for name, adapter in ADAPTERS.items() if adapter.recipe}
    unknown = [name for name in names if name not in recipes]
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is not installed from here; there are: {', '.join(recipes)}")
    for name in names or recipes:
        folder = installing.install(home, recipes[name], lambda line: console.print(line, markup=False))
        console.print(f"{name}  {folder}", markup=False)
    return 0


@app.command(name="list")
def list_harnesses() -> int:
    """Lists the harnesses, how a task's tools reach them, and what is installed in this home."""
    from rollout.harness import ADAPTERS
    from rollout.harness.install import find, folder_of

    home = open_home()
    rows: list[tuple[str, ...]] = [("react", "-", "registered", "part of openforge")]
    for name, adapter in ADAPTERS.items():
        recipe = adapter.recipe
        if recipe is None:
            where = shutil.which(name) or "not on PATH"
        else:
            where = str(folder_of(home, recipe)) if find(home, recipe) else "not installed"
        rows.append((name, recipe.version if recipe else "-", ", ".join(adapter.routes), where))
    print_rows(console, ("name", "version", "tools by", "where"), rows)
    return 0
