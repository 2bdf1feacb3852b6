"""`openforge rollouts merge-report`: how many training rows a session yields, and what broke the calls that forked."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cli.table import print_rows
from rollout.config import Home, open_home
from rollout.errors import ConfigError

if TYPE_CHECKING:
    from rollout.proxy.mergeability import Decode, Fork, SessionReport
    from rollout.store import Store
    from rollout.types import Rollout

console = Console(highlight=False)
notes = Console(stderr=True, highlight=False)
SHOWN = 20


def merge_report(*names: str, json: Annotated[bool, Parameter(negative="")] = False, texts: int = SHOWN) -> int:
    """Reports, per harness, how many rows its sessions yield and why calls did not extend the one before.

    Parameters
    ----------
    names
        Stage runs or rollout ids; none: every rollout of this home that has calls.
    json
        The report as JSON instead.
    texts
        Of so many forks the two texts are shown side by side.
    """
    from rollout.proxy.mergeability import by_harness
    from rollout.store import open_store

    home = open_home()
    store = open_store(home)
    try:
        reports = list(_reports(home, store, names))
    finally:
        store.close()
    harnesses = by_harness(reports)
    if json:
        whole = {"harnesses": [h.model_dump() for h in harnesses], "sessions": [r.model_dump() for r in reports]}
        print(json_module.dumps(whole, ensure_ascii=False, indent=2))
        return 0
    rows = [(h.harness, h.sessions, h.calls, h.rows, f"{h.rows / max(1, h.sessions):.1f}") for h in harnesses]
    print_rows(console, ("harness", "sessions", "calls", "rows", "rows/session"), rows)
    for harness in harnesses:
        for reason, count in sorted(harness.reasons.items(), key=lambda item: -item[1]):
            console.print(f"{harness.harness}: {count} x {reason}", markup=False)
    forks = [(report, fork) for report in reports for fork in report.forks]
    for report, fork in forks[:texts]:
        _print_fork(report, fork)
    return 0


def _reports(home: Home, store: Store, names: tuple[str, ...]) -> Iterator[SessionReport]:
    from rollout.proxy.mergeability import session_report
    from rollout.types import Trajectory
    from training.samples import SampleRules, split_calls

    decoders: dict[str, Decode | None] = {}
    for rollout in _chosen(store, names):
        calls = store.calls.of(rollout.id)
        if not calls:
            continue
        split = split_calls(Trajectory(rollout=rollout, calls=tuple(calls)), SampleRules(logprobs=False))
        if rollout.model.name not in decoders:
            decoders[rollout.model.name] = _decoder(home, rollout.model.name)
        yield session_report(rollout, split.kept, dict(split.dropped), decoders[rollout.model.name])


def _chosen(store: Store, names: tuple[str, ...]) -> list[Rollout]:
    found: list[Rollout] = []
    for name in names:
        one = store.rollouts.get(name)
        some = [one] if one else store.rollouts.query(run=name)
        if not some:
            raise ConfigError(f"{name!r} is neither a rollout nor a run; `openforge rollouts list` shows both")
        found += some
    return found if names else store.rollouts.query()


def _decoder(home: Home, model: str) -> Decode | None:
    """None where the model's tokenizer is gone: the report then has no texts."""
    from rollout.inference.scripted import is_scripted, read_scripted
    from rollout.proxy.codecs import load_codec, model_folder, renderer_name

    try:
        folder = model_folder(home, read_scripted(model).student if is_scripted(model) else model)
        return load_codec(folder, renderer_name(folder)).decode
    except ConfigError as error:
        notes.print(f"no texts for {model}: {error}", markup=False)
        return None


def _print_fork(report: SessionReport, fork: Fork) -> None:
    place = f" at token {fork.token}" if fork.token is not None and " at token " not in fork.reason else ""
    title = f"{report.rollout} call {fork.index} ({fork.tag}, thread {fork.thread}): {fork.reason}{place}"
    console.print(title, markup=False, style="bold")
    if fork.earlier is None or not (fork.recorded or fork.rendered):
        return
    table = Table(f"recorded, call {fork.earlier}", f"rendered, call {fork.index}", expand=True)
    table.add_row(escape(fork.recorded), escape(fork.rendered))
    console.print(table)
