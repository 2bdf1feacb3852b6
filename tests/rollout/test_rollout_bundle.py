"""Task bundles: what is refused and with which words, what is read, and that writing loses nothing."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.bundle import BundleSpec, digest_bundle, load_task, load_tasks, read_bundle, write_bundle
from rollout.errors import ConfigError
from rollout.types import Domain, Provenance, Resources, Split, Timeouts, VerificationMode, VerifierSpec

FULL = BundleSpec(
    id="task-1",
    instruction="Schließe Ticket 7. 東京",
    test="#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n",
    description='Ünïcode "quoted" \\ tab\t del\x7f',
    keywords=("a", "ö"),
    domain=Domain.BROWSER_USE,
    category="support",
    split=Split.HELDOUT,
    harness="codex",
    services={"mail": {"inbox": [{"id": 1, "subject": "Grüße"}]}, "helpdesk": {}},
    tools=("get_ticket", "close_ticket"),
    files={"ä/b.txt": "ß".encode(), "bin": b"\x00\xff"},
    tests={"expected.json": b"{}", "deep/er.py": b"pass"},
    solve="#!/bin/bash\ntrue\n",
    wrong={"off-target": "false\n", "ünd": "x"},
    plan={"oracle": [{"final": "fertig ✓"}]},
    error_rate=0.05,
    verifier=VerifierSpec(state=("/workspace/out",)),
    resources=Resources(cpus=0.5, memory_mb=256, pids=32, disk_mb=8, output_kb=16),
    timeouts=Timeouts(setup=1.5, agent=2.5, verify=3.5),
    provenance=Provenance(author="procedural", family="follow", batch="b", seed=2**70, identity="i", difficulty="hard"),
    metadata={"graded": [{"fact": "the end", "any_of": ["x", "y"]}], "weight": 0.5, "n": 3, "ok": True, "k é": "v"},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "task-1"
    write_bundle(BundleSpec(id="task-1", instruction="Do it.", test="exit 0\n"), root)
    return root


def test_writing_and_reading_give_every_part_back(tmp_path: Path) -> None:
    task = write_bundle(FULL, tmp_path / "x")
    assert task == load_task(tmp_path / "x")
    assert read_bundle(tmp_path / "x") == FULL
    assert (task.id, task.services, task.tools) == ("task-1", ("helpdesk", "mail"), ("get_ticket", "close_ticket"))
    assert task.bundle == str(tmp_path / "x")
    assert task.resources == FULL.resources
    assert task.timeouts == FULL.timeouts
    assert task.provenance == FULL.provenance
    assert (tmp_path / "x" / "tests" / "test.sh").stat().st_mode & 0o111


TEXT = st.text(st.characters(codec="utf-8"), max_size=40)
LINE = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40).filter(str.strip)
NAME = st.text("abcäß0 -_'\"", min_size=1, max_size=12)
FILES = st.dictionaries(NAME, st.binary(max_size=40), max_size=3)
TOML = st.recursive(
    TEXT | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def bundles(draw: st.DrawFn) -> BundleSpec:
    return BundleSpec(
        id=draw(st.from_regex(r"[a-z0-9][a-z0-9._-]{0,40}", fullmatch=True).filter(lambda s: ".." not in s)),
        instruction=draw(LINE).strip(),
        test=draw(LINE),
        description=draw(TEXT),
        keywords=tuple(draw(st.lists(TEXT, max_size=3))),
        domain=draw(st.sampled_from(Domain)),
        category=draw(TEXT),
        split=draw(st.sampled_from(Split)),
        services=draw(st.dictionaries(TEXT, JSON, max_size=3)),
        files=draw(FILES),
        tests=draw(FILES),
        solve=draw(TEXT),
        wrong=draw(st.dictionaries(NAME, TEXT, max_size=2)),
        plan=draw(st.dictionaries(TEXT, JSON, max_size=2)),
        needs_image=draw(st.booleans()),
        error_rate=draw(st.floats(0, 0.99)),
        verifier=VerifierSpec(mode=draw(st.sampled_from(VerificationMode))),
        resources=Resources(cpus=draw(st.floats(0.01, 1e6)), memory_mb=draw(st.integers(32, 2**40))),
        timeouts=Timeouts(agent=draw(st.floats(1e-9, 1e300))),
        provenance=Provenance(family=draw(TEXT), identity=draw(TEXT), seed=draw(st.integers())),
        metadata=draw(st.dictionaries(TEXT.map(lambda t: f"x{t}"), TOML, max_size=3)),
    )


@settings(max_examples=60, deadline=None)
@given(spec=bundles())
def test_any_bundle_survives_the_round_trip(tmp_path_factory: pytest.TempPathFactory, spec: BundleSpec) -> None:
    root = tmp_path_factory.mktemp("bundle") / "b"
    task = write_bundle(spec, root)
    assert load_task(root) == task
    assert read_bundle(root) == spec
    assert digest_bundle(root) == task.digest


# -- Harbor --------------------------------------------------------------------------------------------


def test_the_fields_are_harbors_and_ours_stand_in_metadata(tmp_path: Path) -> None:
    """Names from Harbor 0.26's config models: its lint refuses unknown fields outside of [metadata]."""
    write_bundle(FULL, tmp_path / "x")
    config = tomllib.loads((tmp_path / "x" / "task.toml").read_text(encoding="utf-8"))
    known: dict[str, set[str]] = {
        "task": {"name", "description", "keywords"},
        "agent": {"timeout_sec"},
        "verifier": {"timeout_sec", "environment_mode"},
        "environment": {"cpus", "memory_mb", "storage_mb", "network_mode"},
    }
    assert set(config) == {"schema_version", "artifacts", "metadata", *known}
    for table, fields in known.items():
        assert set(config[table]) == fields
    assert config["task"]["name"] == "openforge/task-1"
    assert config["verifier"]["environment_mode"] == "separate"
    assert config["artifacts"] == ["/workspace/out"]


def test_a_task_of_the_ecosystem_is_read(tmp_path: Path) -> None:
    root = tmp_path / "Hello-World"
    (root / "tests").mkdir(parents=True)
    (root / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt")
    (root / "instruction.md").write_text("Say hello.\n")
    (root / "task.toml").write_text(
        'version = "1.0"\n[metadata]\ndomain = "math"\nsplit = "train"\n[agent]\ntimeout_sec = 12\n'
        "[environment]\nmemory_mb = 2048\nallow_internet = true\n"
    )
    task = load_task(root)
    assert (task.id, task.domain, task.split, task.harness) == ("hello-world", Domain.CLAW, Split.RL, "react")
    assert (task.timeouts.agent, task.resources.memory_mb, task.needs_image) == (12.0, 2048, False)


@pytest.mark.parametrize(
    ("dockerfile", "needs"),
    [
        ("FROM python:3.11-slim\nWORKDIR /workspace\nCOPY files/ /workspace/\n", False),
        ("# RUN apt\nFROM docker.io/library/debian:12\n", False),
        ("FROM python:3.11\nRUN apt-get install -y gimp\n", True),
        ("FROM python:3.11\nENV A=1 \\\n RUN=2\n", False),
        ("FROM ghcr.io/x/desktop:1\n", True),
    ],
)
def test_an_environment_beyond_the_plain_base_needs_its_image(folder: Path, dockerfile: str, needs: bool) -> None:
    config = (folder / "task.toml").read_text().replace("needs_image = false\n", "")
    (folder / "task.toml").write_text(config)
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    assert load_task(folder).needs_image is needs


def test_the_flag_wins_over_the_dockerfile(folder: Path) -> None:
    (folder / "environment" / "Dockerfile").write_text("FROM python:3\nRUN true\n")
    assert load_task(folder).needs_image is False


def test_our_table_is_read_at_the_top_level_too(folder: Path) -> None:
    text = (folder / "task.toml").read_text()
    (folder / "task.toml").write_text(text.replace("[metadata.openforge]", "[openforge]"))
    assert load_task(folder).harness == "react"
    (folder / "task.toml").write_text(text.replace("[metadata.openforge]", "[openforge]").replace("react", "codex"))
    assert load_task(folder).harness == "codex"


# -- refusals ------------------------------------------------------------------------------------------


def _edit(name: str, old: str, new: str) -> Any:
    def change(root: Path) -> None:
        path = root / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return change


def _write(name: str, data: bytes) -> Any:
    def change(root: Path) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)

    return change


REFUSED = {
    "no toml": (lambda r: (r / "task.toml").unlink(), r"task\.toml cannot be read"),
    "bad toml": (_edit("task.toml", "[agent]", "[agent"), r"task\.toml is not valid TOML: .*line \d+"),
    "not a table": (_write("task.toml", b"agent = 3"), "agent must be a table"),
    "unknown key": (_edit("task.toml", "pids = ", "pidz = "), r"openforge\]: pidz.*the keys are .*pids"),
    "bad number": (_edit("task.toml", "pids = 64", 'pids = "many"'), "pids"),
    "bad rate": (_edit("task.toml", "pids = 64", "error_rate = 1.0"), "error_rate"),
    "bad memory": (_edit("task.toml", "memory_mb = 512", "memory_mb = 1"), "memory_mb"),
    "bad timeout": (_edit("task.toml", "timeout_sec = 900.0", "timeout_sec = -1"), "agent"),
    "bad split": (_edit("task.toml", 'split = "rl"', 'split = "train"'), "split"),
    "bad mode": (_edit("task.toml", 'mode = "fresh"', 'mode = "stale"'), "mode"),
    "bad id": (_edit("task.toml", "openforge/task-1", "openforge/a b"), "id"),
    "state outside": (_edit("task.toml", 'state = ["/workspace"]', 'state = ["/logs"]'), "/logs.*not below /workspace"),
    "state climbs": (_edit("task.toml", 'state = ["/workspace"]', 'state = ["/workspace/../logs"]'), "not below"),
    "no instruction": (lambda r: (r / "instruction.md").unlink(), r"instruction\.md cannot be read"),
    "empty instruction": (_write("instruction.md", b" \n"), "empty"),
    "1 MB instruction": (_write("instruction.md", b"x" * 10**6), "1000000 bytes; .* at most 65536"),
    "70 kB instruction": (_write("instruction.md", b"x" * 70000), "at most 65536"),
    "not UTF-8": (_write("instruction.md", b"caf\xe9"), "not UTF-8"),
    "no test.sh": (lambda r: (r / "tests" / "test.sh").unlink(), r"tests/test\.sh is missing"),
    "empty test.sh": (_write("tests/test.sh", b""), "missing or empty"),
    "bad services": (_write("environment/services.json", b"{"), r"services\.json is not valid JSON"),
    "services a list": (_write("environment/services.json", b"[]"), "must hold a JSON object"),
    "unnamed service": (_write("environment/services.json", b'{"mail": {}}'), "must be the same"),
    "a link": (lambda r: (r / "tests" / "l").symlink_to("/etc/passwd"), "neither a file nor a folder"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_bundle_is_refused_with_the_file_and_the_reason(folder: Path, name: str) -> None:
    change, words = REFUSED[name]
    change(folder)
    with pytest.raises(ConfigError, match=words) as error:
        load_task(folder)
    assert str(folder) in str(error.value)


def test_an_instruction_may_hold_65536_characters_of_any_script(folder: Path) -> None:
    (folder / "instruction.md").write_text("東" * 65536, encoding="utf-8")
    assert len(load_task(folder).instruction) == 65536


def test_a_set_without_bundles_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no task set"):
        load_tasks(tmp_path / "none")
    with pytest.raises(ConfigError, match="no task bundle"):
        load_tasks(tmp_path)


def test_a_set_is_read_by_name_and_half_written_bundles_are_not(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_bundle(BundleSpec(id=name, instruction="x", test="y"), tmp_path / name)
    (tmp_path / ".c.1.part").mkdir()
    (tmp_path / ".c.1.part" / "task.toml").write_text("")
    assert [task.id for task in load_tasks(tmp_path)] == ["a", "b"]


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "a..b"},
        {"id": "A b"},
        {"instruction": ""},
        {"test": ""},
        {"files": {"../x": b""}},
        {"files": {"/x": b""}},
        {"files": {"a": b"", "a/b": b""}},
        {"metadata": {"x": None}},
        {"metadata": {"openforge": 1}},
        {"services": {"mail": float("nan")}},
        {"description": "\ud800"},
    ],
    ids=str,
)
def test_what_could_not_be_read_again_is_not_written(tmp_path: Path, changes: dict[str, Any]) -> None:
    root = tmp_path / "x"
    good = {"id": "x", "instruction": "y", "test": "z"}
    write_bundle(BundleSpec(**good), root)  # type: ignore[arg-type]
    before = digest_bundle(root)
    with pytest.raises(ConfigError):
        write_bundle(BundleSpec(**{**good, **changes}), root)
    assert digest_bundle(root) == before
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_bundle_is_replaced_whole(tmp_path: Path) -> None:
    first = write_bundle(FULL, tmp_path / "x")
    second = write_bundle(BundleSpec(id="task-1", instruction="y", test="z"), tmp_path / "x")
    assert first.digest != second.digest
    assert read_bundle(tmp_path / "x").files == {}
    assert not (tmp_path / "x" / "solution").exists()


def test_the_digest_names_paths_and_contents(tmp_path: Path) -> None:
    def digest(files: dict[str, bytes]) -> str:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        return write_bundle(BundleSpec(id="x", instruction="y", test="z", files=files), root).digest

    kinds = [digest(f) for f in ({"a": b"bc"}, {"ab": b"c"}, {"a": b"b", "c": b""}, {"a": b"bd"})]
    assert len(set(kinds)) == 4
    assert digest({"a": b"bc"}) == kinds[0]


def test_the_plan_is_plain_json(tmp_path: Path) -> None:
    write_bundle(FULL, tmp_path / "x")
    assert json.loads((tmp_path / "x" / "solution" / "plan.json").read_text(encoding="utf-8")) == FULL.plan
