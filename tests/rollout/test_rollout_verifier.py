"""Fresh verification: only a finite number in [0, 1] that the verifier itself wrote is a reward."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_servers import hosted

from rollout.bundle import BundleSpec, write_bundle
from rollout.config import Home, open_home
from rollout.errors import FailureClass, SandboxError, VerifierError, classify
from rollout.sandbox.base import Command, SandboxSpec
from rollout.types import Resources, TaskSpec, Timeouts, Verdict, VerificationMode, VerifierSpec
from rollout.verifier import parse_json, parse_text, verify


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return open_home(tmp_path / "home", min_free_mb=1)


def a_task(home: Home, test: str, **changes: Any) -> TaskSpec:
    return write_bundle(BundleSpec(**{"id": "t", "instruction": "x", "test": test, **changes}), home.tasks / "t")


def judge(home: Home, task: TaskSpec, agent: str = "", services: Any = None) -> Verdict:
    """The verdict on what the commands of `agent` left behind in a sandbox of their own."""

    async def main() -> Verdict:
        async with hosted(home) as host:
            state = b""
            if agent:
                async with host.sandbox(SandboxSpec(id="r1", resources=task.resources)) as sandbox:
                    await sandbox.run(Command(("bash", "-c", agent), timeout=20))
                    state = await sandbox.export(task.verifier.state, task.resources.disk_mb << 20)
            return await verify(task, "r1.verify", host.make, json.dumps(services or {}).encode(), state)

    try:
        return asyncio.run(main())
    finally:
        assert [p.name for p in home.sandboxes.glob("[!.]*")] == []


@pytest.mark.sandbox
def test_the_verifier_sees_the_state_the_services_and_its_own_files(home: Home) -> None:
    test = """
cmp /tests/want.txt answer.txt && grep -q closed /logs/artifacts/services.json && [ ! -e /run/proxy ] && echo 1 > \
/logs/verifier/reward.txt; echo checked ü
"""
    task = a_task(home, test, tests={"want.txt": "ß\n".encode()})
    verdict = judge(home, task, "echo ß > answer.txt", {"helpdesk": "closed"})
    assert (verdict.reward, verdict.passed, verdict.source) == (1.0, True, "verifier")
    assert verdict.mode is VerificationMode.FRESH
    assert verdict.explanation == "checked ü"


@pytest.mark.sandbox
@pytest.mark.parametrize("word", ["1.0", "nan", "inf"])
def test_bug_54_what_the_agent_writes_as_its_reward_is_ignored(home: Home, word: str) -> None:
    agent = f"""
mkdir -p logs/verifier /logs/verifier
for name in reward.txt reward.json; do echo {word} > /logs/verifier/$name; echo {word} > logs/verifier/$name; done
ln -s /logs/verifier/reward.txt link; ln -s /workspace/logs /workspace/logs2
"""
    assert judge(home, a_task(home, "echo 0 > /logs/verifier/reward.txt"), agent).reward == 0.0
    with pytest.raises(VerifierError, match="wrote no"):
        judge(home, a_task(home, "true"), agent)


@pytest.mark.sandbox
def test_an_agents_link_to_the_expected_answer_earns_nothing(home: Home) -> None:
    test = "r=0; cmp -s /tests/want.txt /workspace/answer.txt && r=1; echo $r > /logs/verifier/reward.txt"
    task = a_task(home, test, tests={"want.txt": b"42"})
    assert judge(home, task, "printf 42 > answer.txt").reward == 1.0
    for agent in (
        "ln -s /tests/want.txt answer.txt",
        "ln -s ../tests/want.txt answer.txt",
        "ln -s /workspace here; ln -s here/../tests/want.txt answer.txt",
    ):
        assert judge(home, task, agent).reward == 0.0


@pytest.mark.sandbox
def test_only_the_declared_state_is_carried(home: Home) -> None:
    test = "ls -A /workspace /tmp | xargs; echo 1 > /logs/verifier/reward.txt"
    task = a_task(home, test, verifier=VerifierSpec(state=("/workspace/out",)))
    verdict = judge(home, task, "mkdir out; echo x > out/a; echo y > b; echo z > /tmp/c")
    assert verdict.explanation == "/tmp: /workspace: out"


@pytest.mark.sandbox
def test_a_full_workspace_does_not_stop_the_verifier(home: Home) -> None:
    task = a_task(home, "echo 0 > /logs/verifier/reward.txt", resources=Resources(disk_mb=4))
    assert judge(home, task, "head -c 3900000 /dev/zero > big; head -c 9000000 /dev/zero > more").reward == 0.0


@pytest.mark.sandbox
def test_the_exit_code_is_ignored_when_a_reward_was_written(home: Home) -> None:
    test = 'echo \'{"a": 1, "b": 0.5}\' > /logs/verifier/reward.json; echo 0 > /logs/verifier/reward.txt; exit 1'
    verdict = judge(home, a_task(home, test))
    assert (verdict.reward, verdict.passed, verdict.criteria) == (0.75, False, {"a": 1.0, "b": 0.5})


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("test", "words"),
    [
        ("echo nan > /logs/verifier/reward.txt", "nan, not a number in"),
        ("echo inf > /logs/verifier/reward.txt", "inf, not a number in"),
        ("echo 1.5 > /logs/verifier/reward.txt", r"1\.5, not a number in"),
        ("echo -3 > /logs/verifier/reward.txt", "-3"),
        (": > /logs/verifier/reward.txt", "holds ''"),
        ("echo '1 0' > /logs/verifier/reward.txt", "not one number"),
        ("echo 'import broken' >&2; exit 2", "wrote no .*ended with 2.*import broken"),
        ("kill -9 $$", "killed .137."),
        ("mkdir /logs/verifier/reward.txt", "wrote no"),
        ("ln -s /tests/test.sh /logs/verifier/reward.txt", "wrote no"),
        ("head -c 99999 /dev/zero > /logs/verifier/reward.txt", "larger than"),
        ("echo 1 > /logs/verifier/reward.txt; python3 -c 'x = bytearray(900 << 20); x[:] = x'", "memory limit|killed"),
    ],
    ids=str,
)
def test_anything_else_is_a_verifier_failure_and_never_a_reward_of_0(home: Home, test: str, words: str) -> None:
    from rollout.sandbox.limits import host_cgroups

    if "memory" in words and not host_cgroups().version:
        pytest.skip("cgroups are not writable here")
    with pytest.raises(VerifierError, match=words) as error:
        judge(home, a_task(home, test))
    assert classify(error.value) is FailureClass.VERIFIER


@pytest.mark.sandbox
def test_a_verifier_that_never_ends_is_a_verifier_failure(home: Home) -> None:
    test = "echo 1 > /logs/verifier/reward.txt; trap '' TERM; while :; do :; done"
    with pytest.raises(VerifierError, match="still running after 1 s"):
        judge(home, a_task(home, test, timeouts=Timeouts(verify=1.0)))


@pytest.mark.sandbox
def test_a_task_that_needs_its_image_is_no_verifier_failure(home: Home) -> None:
    with pytest.raises(SandboxError, match="docker"):
        judge(home, a_task(home, "true", needs_image=True))


def test_other_modes_are_refused(home: Home) -> None:
    task = a_task(home, "true", verifier=VerifierSpec(mode=VerificationMode.IN_PLACE))
    with pytest.raises(VerifierError, match="in-place"):
        judge(home, task)
    outside = a_task(home, "true").model_copy(update={"verifier": VerifierSpec(state=("/logs",))})
    with pytest.raises(VerifierError, match="/workspace"):
        judge(home, outside)


@given(value=st.floats(0, 1))
def test_every_reward_in_range_is_read_back(value: float) -> None:
    assert parse_text(f" {value!r}\n".encode()) == (value, {})
    assert parse_json(json.dumps({"reward": value, "x": 7}).encode()) == (value, {"x": 7.0})


@given(value=st.floats().filter(lambda v: not 0 <= v <= 1))
def test_no_reward_out_of_range_is_read(value: float) -> None:
    for read, data in ((parse_text, repr(value)), (parse_json, json.dumps({"reward": value}))):
        with pytest.raises(ValueError, match=r"number"):
            read(data.encode())


BAD_JSON = ["", "1", "[]", "{}", '{"reward": true}', '{"reward": "1"}', '{"reward": null}', '{"a": NaN}', '{"a": 3}']


@pytest.mark.parametrize("text", [*BAD_JSON, '{"reward": 1, "a": Infinity}', '{"a": 1' + "0" * 400 + "}", "[" * 60000])
def test_what_is_no_object_of_numbers_is_no_reward(text: str) -> None:
    with pytest.raises(ValueError, match=r"number|JSON"):
        parse_json(text.encode())


@given(data=st.binary(max_size=60))
def test_no_bytes_crash_the_reading(data: bytes) -> None:
    for read in (parse_text, parse_json):
        try:
            reward, _ = read(data)
        except ValueError:
            continue
        assert 0.0 <= reward <= 1.0
