"""The report: one self-contained HTML file, made from the records in the store alone.

collect        records of the named runs -> `RunData`
tables         headline, model rows, families, task matrix
curves         steps -> charts as SVG geometry
ledger         what each stage kept, dropped and cost
tokens         completion ids -> the text of each token
trajectories   which rollouts are embedded, and their compressed chunks
page           all of it -> the file
"""

from __future__ import annotations

from evaluation.report.page import write_report

__all__ = ["write_report"]
