"""gc keeps what is needed: the last two checkpoints and the best, and everything in a dry run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from cli.gc import gc
from rollout.config import Home, open_home


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("OPENFORGE_HOME", str(tmp_path))
    return open_home()


def _steps(home: Home, count: int) -> list[Path]:
    folders = []
    for n in range(count):
        folder = home.checkpoints / "demo-rl.work" / f"step-{n:04d}"
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"x" * 1000)
        os.utime(folder, (1000.0 + n, 1000.0 + n))
        folders.append(folder)
    return folders


def test_dry_run_removes_nothing(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    folders = _steps(home, 4)
    gc(dry_run=True)
    assert all(folder.exists() for folder in folders)
    assert "step-0000" in capsys.readouterr().out


def test_last_two_and_best_stay(home: Home) -> None:
    folders = _steps(home, 5)
    (folders[0].parent / "best").symlink_to(folders[1])
    gc()
    assert [folder.exists() for folder in folders] == [False, True, False, True, True]


def test_sandboxes_go_only_without_serve_and_logs_only_when_old(home: Home) -> None:
    (home.sandboxes / "left").mkdir(parents=True)
    old, new = home.logs / "old.log", home.logs / "new.log"
    for path in (old, new):
        path.write_text("x")
    os.utime(old, (time.time() - 30 * 86400,) * 2)
    gc()
    assert not (home.sandboxes / "left").exists()
    assert not old.exists()
    assert new.exists()


def test_records_stay(home: Home) -> None:
    from rollout.store import open_store

    open_store(home).close()
    before = sorted(p.name for p in home.root.glob("*.db"))
    gc()
    assert sorted(p.name for p in home.root.glob("*.db")) == before
