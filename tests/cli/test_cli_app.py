"""The command as a whole: quick to ask, clear when asked wrongly, never a traceback for what a user can mend."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def openforge(home: Path, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OPENFORGE_HOME": str(home), "COLUMNS": "200"}
    argv = [sys.executable, "-m", "cli.app", *arguments]
    return subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")
    return done.stderr


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    heavy = ("torch", "prefect", "transformers", "sqlalchemy")
    code = f"import sys, cli.app; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"
    help_argv = [sys.executable, "-m", "cli.app", "--help"]
    seconds = []
    for _ in range(5):
        before = os.times()
        subprocess.run(help_argv, cwd=ROOT, capture_output=True, check=True, timeout=60)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(seconds) < 1.0


def test_unknown_preset_key_names_the_nearest(tmp_path: Path) -> None:
    assert "did you mean 'rl.steps'" in refused(openforge(tmp_path, "rl", "--set", "rl.stepz=3"))


def test_unknown_preset_names_those_there_are(tmp_path: Path) -> None:
    assert "smoke" in refused(openforge(tmp_path, "synth", "--preset", "smoka"))


def test_value_out_of_bounds_says_what_came(tmp_path: Path) -> None:
    assert "rl.group" in refused(openforge(tmp_path, "rl", "--set", "rl.group=0"))


def test_set_without_equals_sign(tmp_path: Path) -> None:
    assert "section.key=value" in refused(openforge(tmp_path, "rl", "--set", "rl.group"))


def test_run_name_that_cannot_be_one(tmp_path: Path) -> None:
    assert "run" in refused(openforge(tmp_path, "rl", "--run", "Ä b"))


def test_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        told = refused(openforge(tmp_path, "up", "--port", str(taken.getsockname()[1])))
    assert "--port" in told


def test_home_of_a_newer_version(tmp_path: Path) -> None:
    (tmp_path / "home.json").write_text('{"version": 99}')
    assert "newer" in refused(openforge(tmp_path, "status"))


def test_home_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "OPENFORGE_HOME" in refused(openforge(tmp_path / "file" / "home", "status"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("rollouts", "show", "nothing"),
        ("rollouts", "list", "--state", "sleeping"),
        ("rollouts", "cancel"),
        ("tasks", "show", "nothing"),
        ("tasks", "validate", "/nonexistent"),
        ("engine", "stop", "nothing"),
        ("report", "--run", "nothing"),
        ("models", "add", "/nonexistent"),
    ],
    ids=" ".join,
)
def test_what_is_not_there_is_said(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    refused(openforge(tmp_path, *arguments))


def test_status_and_down_of_a_fresh_home(tmp_path: Path) -> None:
    assert "up          no" in openforge(tmp_path, "status").stdout
    assert "nothing was up" in openforge(tmp_path, "down").stdout


def test_two_demos_in_one_home(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom cli.lock import only_one\nfrom rollout.config import open_home\n"
        "with only_one(open_home(), 'demo'):\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    env = {**os.environ, "OPENFORGE_HOME": str(tmp_path)}
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert str(holder.pid) in refused(openforge(tmp_path, "demo", "--preset", "smoke"))
    finally:
        holder.kill()
        holder.wait(10)
        assert holder.stdout is not None
        holder.stdout.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("up", "--port", "99999"), "no port"),
        (("serve", "--port", "70000"), "no port"),
        (("synth", "--preset", "/tmp"), "/tmp"),
        (("sft", "--model", "scripted:bogus"), "real model"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_used_is_said(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    assert says in refused(openforge(tmp_path, *arguments))


def test_a_home_that_is_too_deep_for_sockets_is_refused(tmp_path: Path) -> None:
    assert "shorter path" in refused(openforge(tmp_path / ("deep" * 30), "serve"))


def test_a_damaged_store_is_named(tmp_path: Path) -> None:
    assert openforge(tmp_path, "rollouts", "list").returncode == 0
    for file in tmp_path.glob("rollouts.db*"):
        file.write_bytes(b"garbage" * 2000)
    done = openforge(tmp_path, "rollouts", "list")
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert len(done.stderr.splitlines()) == 1
    assert "rollouts.db" in done.stderr
    assert "damaged" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    code = "import cli.app; cli.app.app = lambda _: open(sys.argv[1], 'w', buffering=1).write('x\\n'); cli.app.main()"
    argv = [sys.executable, "-c", f"import sys; {code}", "/dev/full"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the disk is full" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_task_for_an_unknown_harness_is_not_valid(tmp_path: Path) -> None:
    bundle = tmp_path / "set" / "one"
    (bundle / "tests").mkdir(parents=True)
    (bundle / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    (bundle / "instruction.md").write_text("Do nothing.\n")
    (bundle / "task.toml").write_text('[task]\nname = "a/one"\n[metadata.openforge]\nharness = "kodex"\n')
    done = openforge(tmp_path / "home", "tasks", "validate", str(tmp_path / "set"))
    assert "1 of 1" in refused(done)
    assert "no harness 'kodex'" in done.stdout


def test_tasks_validate_counts_the_wrong_ones(tmp_path: Path) -> None:
    (tmp_path / "set" / "broken").mkdir(parents=True)
    (tmp_path / "set" / "broken" / "task.toml").write_text("not = [toml")
    done = openforge(tmp_path / "home", "tasks", "validate", str(tmp_path / "set"))
    assert "1 of 1" in refused(done)
    assert "broken" in done.stdout
