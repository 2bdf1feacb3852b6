"""The local sandbox against hostile commands: what it shows, what it limits, what is left of it afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from rollout_servers import Hosted, hosted

from rollout.config import Home, open_home
from rollout.errors import SandboxError
from rollout.sandbox import bwrap, limits, tree
from rollout.sandbox.base import Command, Completed, Mount, SandboxSpec
from rollout.sandbox.limits import Cgroups
from rollout.sandbox.local import LocalSandbox, check_local, reap
from rollout.sandbox.runner_command import measure
from rollout.sandbox.state import Process, State, folder_of
from rollout.types import Resources

pytestmark = pytest.mark.sandbox


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return open_home(tmp_path / "home", min_free_mb=1)


def spec(name: str = "s1", **changes: object) -> SandboxSpec:
    return SandboxSpec(**{"id": name, "resources": Resources(), **changes})  # type: ignore[arg-type]


def bash(script: str, timeout: float = 20.0, **changes: object) -> Command:
    return Command(("bash", "-c", script), timeout=timeout, **changes)  # type: ignore[arg-type]


async def once(hosted: Hosted, command: Command, **changes: object) -> Completed:
    async with hosted.sandbox(spec(**changes)) as sandbox:
        return await sandbox.run(command)


def run(home: Home, script: str, timeout: float = 20.0, **changes: object) -> Completed:
    async def main() -> Completed:
        async with hosted(home) as host:
            return await once(host, bash(script, timeout), **changes)

    return asyncio.run(main())


# -- what it shows -------------------------------------------------------------------------------------


def test_a_command_gets_its_input_env_and_directory_and_returns_its_streams_and_code(home: Home) -> None:
    async def main() -> Completed:
        async with hosted(home) as host, host.sandbox(spec(files={"/workspace/é/a.txt": b"x"})) as sandbox:
            return await sandbox.run(
                bash(
                    'cat; echo "$K $PWD $(id -u)"; echo no >&2; exit 7',
                    env={"K": "ü"},
                    stdin=b"in ",
                    cwd="/workspace/é",
                )
            )

    done = asyncio.run(main())
    assert (done.returncode, done.stdout.decode(), done.stderr) == (7, "in ü /workspace/é 1000\n", b"no\n")
    assert not done.timed_out
    assert not done.truncated
    assert done.limit == ""


def test_the_network_and_the_host_are_out_of_reach(home: Home, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("host")
    script = f"""
    cat {tmp_path}/secret && echo LEAK
    for path in /root /home {Path.home()} {home.root} /var /sys /etc/shadow /etc/hostname /boot /opt /srv; do
        [ -e "$path" ] && echo "LEAK $path"
    done
    python3 - <<'P'
import socket
for address in (("1.1.1.1", 53), ("127.0.0.1", 22)):
    try:
        socket.create_connection(address, 2); print("LEAK", address)
    except OSError as e: pass
print(sorted(name for _, name in socket.if_nameindex()))
P
    find / -name runner.json -o -name state.json 2>/dev/null | grep -v ^/proc
    grep -c . /proc/net/route
    touch /x /usr/x /etc/x /dev/x /run/x 2>/dev/null && echo LEAK
    for path in /proc/sys/kernel/core_pattern /proc/sys/kernel/hostname /proc/sysrq-trigger /proc/sys/vm/drop_caches; do
        [ -w $path ] && echo "LEAK $path"
    done
    echo sandbox > /proc/sys/kernel/hostname 2>/dev/null && echo LEAK
    for path in null zero full random urandom tty; do chmod 644 /dev/$path; done 2> /workspace/said
    echo x > /dev/null || echo "LEAK null is broken"
    unshare -U true 2>/dev/null && echo LEAK
    mount -t tmpfs x /tmp 2>/dev/null && echo LEAK
    grep CapEff /proc/self/status; grep NoNewPrivs /proc/self/status; ls /proc | grep -c '^[0-9]'; hostname
    """
    modes = [Path("/dev", name).stat().st_mode for name in bwrap.DEVICES]
    done = run(home, script)
    assert modes == [Path("/dev", name).stat().st_mode for name in bwrap.DEVICES], "the host's device nodes changed"
    text = done.stdout.decode()
    assert "LEAK" not in text
    assert text.split()[:4] == ["['lo']", "1", "CapEff:", "0000000000000000"]
    assert "NoNewPrivs:\t1" in text
    assert text.rstrip().endswith("sandbox")
    assert int(text.split()[-2]) < 10, "processes of the host are visible"


def test_another_sandbox_and_the_runners_socket_are_invisible_while_both_run(home: Home) -> None:
    async def main() -> tuple[Completed, Completed]:
        async with hosted(home) as host:
            async with host.sandbox(spec("one")) as one, host.sandbox(spec("two")) as two:
                await one.run(bash("echo mine > /workspace/mine.txt; echo x > /tmp/x"))
                seen = await two.run(bash("ls -A /workspace /tmp /run /logs; ls -d /tests /solution /harness 2>&1"))
                return seen, await one.run(bash("cat /workspace/mine.txt; ls -A /tmp"))

    other, same = asyncio.run(main())
    listing = other.stdout.decode()
    assert "mine.txt" not in listing
    assert ".sock" not in listing
    assert listing.count("No such file") == 3
    assert same.stdout == b"mine\n", "the workspace stays from command to command, /tmp does not"


def test_the_proxys_socket_is_reached_and_found_again_after_a_restart(home: Home) -> None:
    call = """
import socket,sys
s=socket.socket(socket.AF_UNIX); s.connect("/run/proxy/proxy.sock"); print(s.recv(10).decode())
"""

    async def serve(answer: bytes) -> asyncio.Server:
        path = home.run / "proxy" / "proxy.sock"
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)

        async def reply(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(answer)
            await writer.drain()
            writer.close()

        return await asyncio.start_unix_server(reply, path)

    async def main() -> list[bytes]:
        command = Command(("/usr/bin/python3", "-I", "-S", "-c", call), timeout=20)
        async with hosted(home) as host:
            first = await serve(b"one")
            async with host.sandbox(spec(proxy=home.run / "proxy")) as sandbox:
                said = [(await sandbox.run(command)).stdout]
                first.close()
                second = await serve(b"two")
                said.append((await sandbox.run(command)).stdout)
                second.close()
            return said

    assert asyncio.run(main()) == [b"one\n", b"two\n"]


def test_mounts_are_read_only(home: Home, tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("print(1)")
    mounts = (Mount(tmp_path / "p.py", "/opt/x/p.py"),)
    done = run(home, "cat /opt/x/p.py; echo y > /opt/x/p.py || echo refused", mounts=mounts)
    assert done.stdout == b"print(1)refused\n"


def test_a_rollouts_key_stands_in_no_process_list(home: Home) -> None:
    async def main() -> str:
        async with hosted(home) as host, host.sandbox(spec()) as sandbox:
            task = asyncio.create_task(sandbox.run(bash("sleep 1.5", env={"OPENFORGE_KEY": "sk-hidden-777"})))
            await asyncio.sleep(0.7)
            listed = " ".join(" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))
            await task
            return listed

    listed = asyncio.run(main())
    assert "sleep 1.5" in listed
    assert "sk-hidden-777" not in listed


# -- limits --------------------------------------------------------------------------------------------


def needs_cgroups() -> None:
    if not limits.host_cgroups().version:
        pytest.skip("cgroups are not writable here")


def test_memory_beyond_the_limit_ends_as_a_memory_limit(home: Home) -> None:
    needs_cgroups()
    done = run(home, "python3 -c \"b = b'x' * (400 << 20)\"", resources=Resources(memory_mb=128))
    assert done.limit == "memory"
    assert done.returncode == 137


def test_shared_memory_and_tmp_are_bounded(home: Home) -> None:
    script = "for d in /tmp /dev/shm; do head -c 20000000 /dev/zero > $d/x; stat -c %s $d/x; done 2>/dev/null"
    done = run(home, script, resources=Resources(disk_mb=8, memory_mb=128))
    assert [int(size) for size in done.stdout.split()] == [8 << 20, 8 << 20]


def test_more_processes_than_allowed_end_as_a_pids_limit(home: Home) -> None:
    needs_cgroups()
    script = "for i in $(seq 40); do sleep 20 & done; wait"
    began = time.monotonic()
    done = run(home, script, timeout=30, resources=Resources(pids=20))
    assert done.limit == "pids"
    assert time.monotonic() - began < 29


@pytest.mark.parametrize(
    "script",
    [
        "head -c 50000000 /dev/zero > /workspace/one",
        "for i in $(seq 100); do head -c 1000000 /dev/zero > /logs/$i; done; sleep 15",
        "cd /workspace; for i in $(seq 20000); do echo > f$i; done; sleep 15",
        "cd /workspace; for i in $(seq 300); do mkdir d; cd d; done; sleep 15",
    ],
    ids=["one file", "many files", "many empty files", "deep folders"],
)
def test_too_much_on_disk_ends_as_a_disk_limit(home: Home, script: str) -> None:
    began = time.monotonic()
    done = run(home, script, resources=Resources(disk_mb=16))
    assert done.limit == "disk"
    assert time.monotonic() - began < 14, "it was not killed"
    assert not [p for p in home.sandboxes.iterdir() if not p.name.startswith(".")]


def test_bug_48_output_is_cut_at_the_source_and_says_so(home: Home) -> None:
    done = run(home, "seq 1 2000000; echo end >&2; exit 3", resources=Resources(output_kb=64))
    assert done.truncated
    assert done.returncode == 3
    assert done.stderr == b"end\n"
    assert 0 < len(done.stdout) <= 64 * 1024
    assert done.stdout.startswith(b"1\n2\n")


def test_an_endless_flood_is_killed_as_an_output_limit(home: Home) -> None:
    done = run(home, "yes", timeout=30, resources=Resources(output_kb=4))
    assert done.limit == "output"
    assert done.seconds < 25


@pytest.mark.parametrize("start", ["", "setsid "], ids=["ignoring TERM", "in its own session"])
def test_bug_50_a_timeout_takes_the_whole_tree(home: Home, start: str) -> None:
    loop = "trap '' TERM INT HUP; while :; do date >> /workspace/x; sleep 0.05; done"
    script = f'{start}bash -c "{loop}" & {start}bash -c "{loop}"; wait'

    async def main() -> tuple[Completed, bytes | None, bytes | None]:
        async with hosted(home) as host, host.sandbox(spec()) as sandbox:
            done = await sandbox.run(bash(script, timeout=1.0))
            first = await sandbox.get("/workspace/x", 1 << 20)
            await asyncio.sleep(0.4)
            return done, first, await sandbox.get("/workspace/x", 1 << 20)

    done, first, later = asyncio.run(main())
    assert done.timed_out
    assert done.returncode is None
    assert done.seconds < 4
    assert first
    assert first == later


def test_background_processes_end_with_the_command(home: Home) -> None:
    script = "setsid bash -c 'while :; do date >> /workspace/x; sleep 0.05; done' & sleep 0.5; exit 0"

    async def main() -> tuple[Completed, bytes | None, bytes | None]:
        async with hosted(home) as host, host.sandbox(spec()) as sandbox:
            done = await sandbox.run(bash(script))
            first = await sandbox.get("/workspace/x", 1 << 20)
            await asyncio.sleep(0.4)
            return done, first, await sandbox.get("/workspace/x", 1 << 20)

    done, first, later = asyncio.run(main())
    assert (done.returncode, done.timed_out) == (0, False)
    assert first
    assert first == later


def test_bug_51_a_busy_command_leaves_others_alone(home: Home) -> None:
    async def main() -> tuple[Completed, Completed]:
        async with hosted(home) as host:
            busy = asyncio.create_task(once(host, bash("while :; do :; done", timeout=3.0), name="busy"))
            await asyncio.sleep(0.3)
            quick = await asyncio.wait_for(once(host, bash("echo ok"), name="quick"), 2.5)
            return await busy, quick

    busy, quick = asyncio.run(main())
    assert busy.timed_out
    assert quick.stdout == b"ok\n"


# -- files ---------------------------------------------------------------------------------------------

LINKS = """
cd /workspace; mkdir d sub; echo in > d/f; echo deep > sub/g
ln -s /etc/passwd passwd; ln -s ../../../../../../etc/passwd climbing; ln -s d/f inner; ln -s ../d/f sub/up
ln -s /workspace here; ln -s here/../tests/expected sly; ln -s /tests/expected cheat; ln -s /workspace/d/f absolute
mkfifo fifo; printf '#!/bin/sh\\n' > run; chmod +x run; ln -s d dirlink
"""


def test_links_are_never_followed_out_and_never_carried_out(home: Home) -> None:
    async def main() -> None:
        async with hosted(home) as host, host.sandbox(spec()) as sandbox:
            await sandbox.run(bash(LINKS))
            for path in ("passwd", "climbing", "inner", "dirlink/f", "fifo", "d", "none", "here/d/f"):
                assert await sandbox.get(f"/workspace/{path}", 1000) is None, path
            assert await sandbox.get("/workspace/d/f", 1000) == b"in\n"
            assert await sandbox.get("/workspace/d/f", 2) == b"in"
            for path in ("/etc/passwd", "/workspace/../runner.json", "/workspacex", "/run/proxy"):
                with pytest.raises(SandboxError, match="outside"):
                    await sandbox.get(path, 1000)
            state = await sandbox.export(["/workspace"], 1 << 20)
            async with host.sandbox(spec("s2", state=state, files={"/tests/expected": b"right"})) as fresh:
                done = await fresh.run(
                    bash("cd /workspace; find . -mindepth 1 | sort | xargs; cat inner sub/up absolute")
                )
                listing, *contents = done.stdout.decode().split("\n")
                assert listing == "./absolute ./d ./d/f ./dirlink ./here ./inner ./run ./sub ./sub/g ./sub/up"
                assert contents == ["in", "in", "in", ""]
                assert (await fresh.run(bash("test -x /workspace/run"))).returncode == 0

    asyncio.run(main())


def test_an_export_keeps_to_its_budget_and_its_paths(home: Home) -> None:
    script = "cd /workspace; mkdir a b; head -c 900 /dev/zero > a/1; head -c 900 /dev/zero > a/2; echo b > b/3"

    async def main() -> tuple[bytes, bytes]:
        async with hosted(home) as host, host.sandbox(spec()) as sandbox:
            await sandbox.run(bash(script))
            return await sandbox.export(["/workspace"], 1000), await sandbox.export(
                ["/workspace/b", "/workspace/no"], 10
            )

    small, part = asyncio.run(main())
    assert names(small) == ["/workspace/a", "/workspace/a/1", "/workspace/b", "/workspace/b/3"]
    assert names(part) == ["/workspace/b", "/workspace/b/3"]


def names(tar: bytes) -> list[str]:
    import io
    import tarfile

    with tarfile.open(fileobj=io.BytesIO(tar)) as file:
        return [member.name if member.name.startswith("/") else f"/{member.name}" for member in file]


def test_files_outside_the_writable_directories_are_refused(home: Home) -> None:
    async def main(path: str) -> None:
        async with hosted(home) as host:
            with pytest.raises(SandboxError, match=r"outside|folder"):
                async with host.sandbox(spec(files={path: b"x"})):
                    pass

    for path in ("/etc/passwd", "/workspace/../../x", "relative", "/workspace", "/workspace/a/../b"):
        asyncio.run(main(path))
    assert [p.name for p in home.sandboxes.iterdir()] == [".etc"]


def test_a_link_that_climbs_is_told_from_one_that_stays() -> None:
    roots = ("/workspace",)
    inside = ["a", "./a", "../b", "/workspace/x", "..", "/workspace"]
    outside = ["../../tests/x", "/tests/x", "here/../../tests", "/workspace/../tests", "a/..", "../../workspacex"]
    assert all(tree.stays_inside("/workspace/d/link", target, roots) for target in inside)
    assert not any(tree.stays_inside("/workspace/d/link", target, roots) for target in outside)


def test_what_cannot_be_measured_counts_as_too_much(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 5000)
    assert measure([str(tmp_path)], 1 << 20) == 8192
    assert measure([str(tmp_path / "none")], 1 << 20) == 0
    assert measure([str(tmp_path / "f")], 1 << 20) == (1 << 20) + 1


# -- ends ----------------------------------------------------------------------------------------------


def test_killing_the_runner_kills_the_agents_tree(home: Home) -> None:
    script = "setsid bash -c 'while :; do sleep 0.1; done' & exec sleep 4321.5"

    async def main() -> None:
        async with hosted(home) as host, host.sandbox(spec()) as sandbox:
            task = asyncio.create_task(sandbox.run(bash(script, timeout=60)))
            inside = await found("sleep 4321.5")
            state = State.model_validate_json((folder_of(home, "s1") / "state.json").read_text())
            os.kill(state.runner.pid, signal.SIGKILL)
            with pytest.raises(SandboxError, match="runner ended with -9"):
                await task
            end = time.monotonic() + 5
            for _ in range(100):
                if time.monotonic() > end or not any(psutil.pid_exists(pid) for pid in inside):
                    break
                await asyncio.sleep(0.05)
            assert not [pid for pid in inside if psutil.pid_exists(pid)]
            with pytest.raises(SandboxError, match="gone"):
                await sandbox.run(bash("true"))

    asyncio.run(main())
    assert not left(home)


async def found(needle: str) -> list[int]:
    """Pids of a sandbox's processes, once its command runs."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        for process in psutil.process_iter(["pid", "cmdline"]):
            if " ".join(process.info["cmdline"] or ()) == needle:
                parent = process.parent()
                assert parent
                return [parent.pid, *(child.pid for child in parent.children(recursive=True))]
        await asyncio.sleep(0.05)
    raise AssertionError(f"{needle} never ran")


def left(home: Home) -> list[str]:
    return [p.name for p in home.sandboxes.glob("[!.]*")]


def test_stop_ends_a_running_command_and_may_be_called_again(home: Home) -> None:
    async def main() -> float:
        async with hosted(home) as host:
            sandbox = host.make()
            await sandbox.stop()
            await sandbox.start(spec())
            task = asyncio.create_task(sandbox.run(bash("trap '' TERM; sleep 4322.5", timeout=60)))
            await found("sleep 4322.5")
            began = time.monotonic()
            await sandbox.stop()
            await sandbox.stop()
            with pytest.raises(SandboxError, match=r"stopped|ended"):
                await task
            return time.monotonic() - began

    assert asyncio.run(main()) < 4
    assert not left(home)
    assert not [p for p in psutil.process_iter(["cmdline"]) if "4322.5" in " ".join(p.info["cmdline"] or ())]


def test_a_runner_survives_a_restarted_server_and_redelivers(home: Home) -> None:
    async def main() -> Completed:
        async with hosted(home) as host, host.sandbox(spec()) as sandbox:
            task = asyncio.create_task(sandbox.run(bash("sleep 1; echo done")))
            await asyncio.sleep(0.4)
            await host.restart(pause=1.5)
            return await asyncio.wait_for(task, 15)

    assert asyncio.run(main()).stdout == b"done\n"


def test_a_wrong_key_is_refused_and_an_unknown_sandbox_ends_its_runner(home: Home) -> None:
    async def main() -> None:
        async with hosted(home) as host, host.sandbox(spec()) as sandbox:
            assert await host.status("s1", "Bearer wrong") == 401
            assert await host.status("s1", "") == 401
            assert await host.status("s2", "Bearer x") == 404
            await sandbox.run(bash("true"))
            pid = State.model_validate_json((folder_of(home, "s1") / "state.json").read_text()).runner.pid
            host.hub.close("s1")
            for _ in range(250):
                if not psutil.pid_exists(pid):
                    break
                await asyncio.sleep(0.1)
            with pytest.raises(SandboxError, match="no longer knows"):
                await sandbox.run(bash("true"))

    asyncio.run(main())


def test_bug_52_sandboxes_of_a_dead_owner_are_reaped_and_those_of_a_live_one_kept(home: Home) -> None:
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    orphan = subprocess.Popen(["sleep", "61"], start_new_session=True)
    try:
        mine = Process(pid=stranger.pid, started=psutil.Process(stranger.pid).create_time())
        for name, owner, runner in (
            ("alive", mine, mine),
            ("dead", Process(pid=mine.pid, started=mine.started - 500), process_of(orphan.pid)),
            ("recycled", Process(pid=2**22 - 3, started=1.0), Process(pid=mine.pid, started=1.0)),
        ):
            folder = home.sandboxes / name / "root" / "workspace"
            folder.mkdir(parents=True)
            (folder / "f").write_text("x")
            state = State(owner=owner, runner=runner, groups=())
            (home.sandboxes / name / "state.json").write_text(state.model_dump_json())
        half = home.sandboxes / "half"
        half.mkdir()
        assert reap(home) == ["dead", "recycled"]
        os.utime(half, (1.0, 1.0))
        assert reap(home) == ["half"]
        assert left(home) == ["alive"]
        assert orphan.wait(5) == -signal.SIGKILL
        assert stranger.poll() is None, "a process with a recycled pid was killed"
    finally:
        for process in (stranger, orphan):
            with suppress(ProcessLookupError):
                process.kill()
            process.wait(5)


def test_a_left_over_that_cannot_be_removed_keeps_no_other(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = Process(pid=2**22 - 3, started=1.0)
    for name in ("one", "other"):
        (home.sandboxes / name).mkdir(parents=True)
        state = State(owner=gone, runner=gone, groups=())
        (home.sandboxes / name / "state.json").write_text(state.model_dump_json())
    (home.sandboxes / "one").rename(tmp_path / "elsewhere")
    (home.sandboxes / "one").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert reap(home) == ["other"]
    assert "one could not be removed" in caplog.text


def process_of(pid: int) -> Process:
    return Process(pid=pid, started=psutil.Process(pid).create_time())


def test_trees_that_resist_are_removed(tmp_path: Path) -> None:
    root = tmp_path / "t"
    root.mkdir()
    here = os.open(root, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    locked = root / "locked" / "x"
    locked.mkdir(parents=True)
    locked.parent.chmod(0)
    tree.remove(root)
    assert not root.exists()


def test_the_same_id_twice_is_refused_and_the_first_goes_on(home: Home) -> None:
    async def main() -> bytes:
        async with hosted(home) as host, host.sandbox(spec()) as first:
            with pytest.raises(SandboxError, match="runs already"):
                async with host.sandbox(spec()):
                    pass
            return (await first.run(bash("echo still"))).stdout

    assert asyncio.run(main()) == b"still\n"


def test_a_start_that_is_cancelled_leaves_nothing(home: Home) -> None:
    async def main() -> None:
        async with hosted(home) as host:
            for wait in (0.0, 0.001, 0.003, 0.01):
                sandbox = host.make()
                with suppress(TimeoutError):
                    await asyncio.wait_for(sandbox.start(spec()), wait)
                await sandbox.stop()
                assert not left(home)

    before = set(psutil.Process().children())
    asyncio.run(main())
    assert set(psutil.Process().children()) == before


def test_a_folder_left_behind_is_not_reused(home: Home) -> None:
    (home.sandboxes / "s1").mkdir(parents=True)
    with pytest.raises(SandboxError, match="run already"):
        run(home, "true")
    assert left(home) == ["s1"]


def test_a_task_that_needs_its_image_is_refused(home: Home) -> None:
    async def main() -> None:
        async with hosted(home) as host:
            await host.make().start(spec(needs_image=True))

    with pytest.raises(SandboxError, match="docker"):
        asyncio.run(main())


def test_without_bubblewrap_the_error_says_what_to_install(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert any("apt-get install bubblewrap" in problem for problem in check_local())

    async def main() -> None:
        async with hosted(home) as host:
            await host.make().start(spec())

    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        asyncio.run(main())


def test_without_user_namespaces_the_error_says_so(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.which("bwrap")
    fake = tmp_path / "bin" / "bwrap"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    assert real != shutil.which("bwrap")
    problems = check_local()
    assert len(problems) == 1
    assert "user namespace" in problems[0]
    with pytest.raises(SandboxError, match="user namespace"):
        run(home, "true")


def test_this_host_has_no_problems() -> None:
    assert check_local() == []


# -- limits as data ------------------------------------------------------------------------------------


def test_cgroup_v2_is_planned_beside_a_busy_group(tmp_path: Path) -> None:
    mount = tmp_path / "cg"
    (mount / "user" / "me").mkdir(parents=True)
    (mount / "user" / "cgroup.subtree_control").write_text("cpu memory pids")
    (mount / "user" / "me" / "cgroup.subtree_control").write_text("")
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text("0::/user/me\n")
    (proc / "mountinfo").write_text(f"30 24 0:26 / {mount} rw,nosuid - cgroup2 cgroup2 rw\n")
    found = limits.detect(proc)
    assert found == Cgroups(2, tuple((name, mount / "user") for name in ("memory", "pids", "cpu")))
    plan = limits.plan(Resources(memory_mb=100, pids=10, cpus=0.5), found, "openforge-x", 5.0)
    (group,) = plan.groups
    assert group.path == str(mount / "user" / "openforge-x")
    assert dict(group.writes) == {"memory.max": str(104 << 20), "pids.max": "12", "cpu.max": "50000 100000"}
    assert {limit for _, _, limit in group.counters} == {"memory", "pids"}


def test_without_cgroups_the_rlimits_take_over(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text("0::/\n")
    (proc / "mountinfo").write_text("")
    found = limits.detect(proc)
    assert found == Cgroups()
    plan = limits.plan(Resources(memory_mb=100, pids=10), found, "x", 5.0)
    assert plan.groups == ()
    assert plan.wrap[1] == "--nproc=12:12"
    assert 100 << 20 in dict(plan.rlimits).values()


# -- an unprivileged user ------------------------------------------------------------------------------

UNPRIVILEGED = """
import asyncio, json, os, sys
from pathlib import Path
sys.path[:0] = [sys.argv[2], sys.argv[3]]
from rollout.config import open_home
from rollout.sandbox.base import Command, SandboxSpec
from rollout.sandbox.local import check_local
from rollout.types import Resources
from rollout_servers import hosted

async def main():
    async with hosted(open_home(sys.argv[1], min_free_mb=1)) as host:
        async with host.sandbox(SandboxSpec(id="u", resources=Resources(pids=20, memory_mb=256))) as sandbox:
            run = lambda script: sandbox.run(Command(("bash", "-c", script), timeout=20))
            forks = await run("for i in $(seq 40); do sleep 3 & done; wait")
            out = await run("cd /workspace; echo hi > f; chmod 0 f; id -u; mkdir d; chmod 0 d")
            grown = await run("python3 -c 'bytes(400 << 20)'")
            return {
                "memory": [grown.returncode, grown.stderr.decode()],
                "uid": os.getuid(),
                "out": out.stdout.decode(),
                "forks": forks.stderr.decode(),
            }

print(json.dumps({"problems": check_local(), **asyncio.run(main())}))
"""


def test_it_works_for_an_unprivileged_user(tmp_path_factory: pytest.TempPathFactory) -> None:
    import sysconfig
    import tempfile

    root = Path(__file__).resolve().parents[2]
    site = sysconfig.get_path("purelib")
    drop = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"] if os.getuid() == 0 else []
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{root}:{site}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": folder,
        }
        for python in (sys.executable, "/usr/bin/python3"):
            probe = [
                *drop,
                python,
                "-c",
                "import os, subprocess, sys, pydantic, uvicorn, psutil; "
                "subprocess.run([os.path.realpath(sys.executable), '-c', ''], check=True)",
            ]
            with suppress(OSError):
                if subprocess.run(probe, env=env, cwd="/tmp", capture_output=True, timeout=60).returncode == 0:
                    break
        else:
            pytest.skip("no interpreter that an unprivileged user may run")
        argv = [*drop, python, "-c", UNPRIVILEGED, f"{folder}/home", str(root), str(root / "tests")]
        done = subprocess.run(argv, env=env, cwd="/tmp", capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert said["problems"] == []
        assert said["uid"] != 0
        assert said["out"] == "1000\n"
        assert "fork" in said["forks"], "the pid limit did not bind"
        code, stderr = said["memory"]
        assert code == 1
        assert "MemoryError" in stderr
        assert os.listdir(f"{folder}/home/sandboxes") == [".etc"]


def test_the_sandbox_is_cheap(home: Home) -> None:
    """A demo starts thousands: start + run(true) + stop within 150 ms of CPU (about 30 on the machine measured)."""

    async def main() -> float:
        async with hosted(home) as host:
            await once(host, Command(("true",), timeout=20), name="warm")
            before = os.times()
            for i in range(10):
                await once(host, Command(("true",), timeout=20), name=f"n{i}")
            after = os.times()
            return sum(after[:4]) - sum(before[:4])

    assert asyncio.run(main()) / 10 < 0.150


def test_sandbox_type() -> None:
    from rollout.sandbox.base import Sandbox

    made: type[Sandbox] = LocalSandbox
    assert made
