"""Progress reaches another process through a file, whatever Prefect does."""

from __future__ import annotations

from pathlib import Path

from rollout.config import open_home
from rollout.types import StageRecord
from tasks.progress import StageProgress, markdown
from tasks.progress_file import progress_file, read_progress


def test_each_stage_has_its_latest_line(tmp_path: Path) -> None:
    home = open_home(tmp_path)
    first = StageProgress(home, "demo", "trial")
    first("trial", 1, 4)
    first("trial", 4, 4)
    first.end()
    StageProgress(home, "demo", "sft")("step", 2, 8)
    lines = read_progress(home, "demo")
    assert list(lines) == ["trial", "sft"]
    assert (lines["trial"].done, lines["trial"].total, lines["trial"].ended) == (4, 4, True)
    assert (lines["sft"].label, lines["sft"].done, lines["sft"].ended) == ("step", 2, False)


def test_calls_in_quick_succession_are_not_all_written(tmp_path: Path) -> None:
    home = open_home(tmp_path)
    progress = StageProgress(home, "demo", "trial")
    progress("trial", 0, 10_000)
    written = progress_file(home, "demo").stat().st_mtime_ns
    for done in range(1, 500):
        progress("trial", done, 10_000)
    assert progress_file(home, "demo").stat().st_mtime_ns == written
    progress("trial", 10_000, 10_000)
    assert read_progress(home, "demo")["trial"].done == 10_000


def test_a_half_written_file_is_no_progress(tmp_path: Path) -> None:
    home = open_home(tmp_path)
    StageProgress(home, "demo", "trial")
    progress_file(home, "demo").write_text('{"trial": ')
    assert read_progress(home, "demo") == {}
    assert read_progress(home, "never") == {}


def test_result_tells_what_was_dropped_and_why() -> None:
    record = StageRecord(run="demo", stage="refine", kept=3, dropped={"oracle": 2}, details={"batch": "b", "x": {}})
    text = markdown(record)
    assert "| dropped: oracle | 2 |" in text
    assert "| batch | b |" in text
    assert "| x |" not in text
