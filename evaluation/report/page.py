"""Renders the page: jinja with autoescape for what stands in it, inert JSON and base64 for what the script shows.

Nothing is loaded from outside, and a content security policy with the script's hash forbids every other script and
every request, so that a model's output cannot do more than be read.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from evaluation.report import curves, ledger, tables
from evaluation.report.collect import RunData, collect, compared
from evaluation.report.tokens import Tokenizers
from evaluation.report.trajectories import Packed, pack
from rollout.store import Store

HERE = Path(__file__).parent
SCRIPTS = ("page.js", "trajectory.js")
CAP = 150


def write_report(store: Store, *, runs: Sequence[str], out: Path, cap: int = CAP) -> Path:
    """Writes the report of `runs` to `out` and returns it; at most `cap` trajectories of each model are embedded.

    Raises ConfigError when the store holds nothing of these runs, OSError when `out` cannot be written.
    """
    data = collect(store, runs)
    tokenizers = Tokenizers(store.home)
    packed = pack(store, data, tokenizers.pieces, cap)
    html = render(data, packed, sorted(tokenizers.missing))
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.{os.getpid()}")
    part.write_text(html, encoding="utf-8", errors="replace")
    part.replace(out)
    return out


def render(data: RunData, packed: Packed, without_tokenizer: Sequence[str] = ()) -> str:
    rows = tables.model_rows(data.results)
    main = compared(data.results)
    main_rows = tables.model_rows(main)
    script = "\n".join((HERE / "assets" / name).read_text(encoding="utf-8") for name in SCRIPTS)
    return _template().render(
        headline=tables.headline(main_rows),
        runs=data.runs,
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        first=data.results[0].result if data.results else None,
        rows=rows,
        main_rows=main_rows,
        rows_apart=tables.model_rows(data.results, apart=True),
        overall=tables.overall(main),
        families=tables.family_rows(data.results),
        families_apart=tables.family_rows(data.results, apart=True),
        matrix=tables.matrix(data.results),
        charts=curves.charts(data.steps, data.spreads),
        stages=ledger.stage_rows(data.stages),
        costs=ledger.costs(data.stages),
        index=inert_json([asdict(row) for row in packed.index]),
        picks=packed.index,
        chunks=packed.chunks,
        cap_notes=packed.notes,
        without_tokenizer=without_tokenizer,
        css=Markup((HERE / "assets" / "report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        plot=curves,
    )


def inert_json(value: Any) -> Markup:
    """JSON for a `<script type="application/json">`: no character that could end the element or start another."""
    text = json.dumps(value, separators=(",", ":"))
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


def _template() -> jinja2.Template:
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters.update(percent=tables.percent, signed=tables.signed, duration=ledger.duration, grouped=ledger.grouped)
    return env.get_template("template.html.jinja")
