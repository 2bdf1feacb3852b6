"""The store under many writers, restarts and wrong transitions."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from rollout.blobs import Blobs
from rollout.config import open_home
from rollout.errors import FailureClass, NewerHomeError, StoreError
from rollout.store import Store, open_store
from rollout.types import (
    TERMINAL,
    TRANSITIONS,
    EngineRecord,
    Failure,
    ModelCall,
    ModelRef,
    Purpose,
    Rollout,
    RolloutState,
    StageRecord,
    TaskSpec,
)

TASK = TaskSpec(id="t", instruction="x", bundle="/x", digest="d")


def rollout(name: str, **changes: object) -> Rollout:
    base = Rollout(
        id=name, run="r", task_id="t", group_id="g", model=ModelRef(name="m"), purpose=Purpose.RUN, task=TASK
    )
    return base.model_copy(update=changes)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(open_home(tmp_path))
    yield opened
    opened.close()


def test_enqueue_twice_adds_once(store: Store) -> None:
    items = [rollout(f"r{i}") for i in range(10)]
    assert store.rollouts.enqueue(items) == 10
    assert store.rollouts.enqueue(items) == 0


def test_two_owners_never_claim_one_rollout(tmp_path: Path) -> None:
    home = open_home(tmp_path)
    one, two = open_store(home), open_store(home)
    one.rollouts.enqueue([rollout(f"r{i}") for i in range(60)])
    claimed: list[str] = []

    def claim(store: Store, owner: str) -> None:
        for _ in range(20):
            claimed.extend(r.id for r in store.rollouts.claim(owner, 4, 60))

    threads = [threading.Thread(target=claim, args=(s, o)) for s, o in ((one, "a"), (two, "b"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == sorted(f"r{i}" for i in range(60))
    one.close()
    two.close()


def test_advance_is_compare_and_set(store: Store) -> None:
    store.rollouts.enqueue([rollout("a")])
    (starting,) = store.rollouts.claim("me", 1, 60)
    assert store.rollouts.advance(starting, state=RolloutState.RUNNING)
    assert store.rollouts.advance(starting, state=RolloutState.RUNNING) is None
    with pytest.raises(ValueError, match="no transition"):
        store.rollouts.advance(starting, state=RolloutState.SUCCEEDED)


def test_what_the_proxy_notes_survives_an_advance(store: Store) -> None:
    store.rollouts.enqueue([rollout("a")])
    (starting,) = store.rollouts.claim("me", 1, 60)
    store.rollouts.note_call("a", 7, 3)
    store.rollouts.note_call("a", 5, 4)
    store.rollouts.note_end("a", "call_cap")
    store.rollouts.note_end("a", "token_cap")
    store.rollouts.advance(starting, state=RolloutState.RUNNING)
    found = store.rollouts.get("a")
    assert found is not None
    assert (found.end_reason, found.weight_version, found.calls, found.tokens) == ("call_cap", 3, 2, 12)


def test_retry_is_a_new_rollout_and_stops_after_three(store: Store) -> None:
    store.rollouts.enqueue([rollout("a")])
    failure = Failure(kind=FailureClass.INFRASTRUCTURE, message="engine gone")
    for _ in range(5):
        for claimed in store.rollouts.claim("me", 9, 60):
            store.rollouts.finish(claimed, RolloutState.FAILED, failure, retry=True)
    assert [r.id for r in store.rollouts.query(run="r")] == ["a", "a.r1", "a.r2"]
    assert store.rollouts.latest(["a"])["a"].id == "a.r2"
    assert store.rollouts.states(["a"]) == {"a": RolloutState.FAILED}


def test_bug_56_late_result_of_an_ended_attempt_is_ignored(store: Store) -> None:
    store.rollouts.enqueue([rollout("a")])
    (first,) = store.rollouts.claim("me", 1, 60)
    store.rollouts.finish(first, RolloutState.FAILED, None, retry=True)
    assert store.rollouts.advance(first, state=RolloutState.RUNNING) is None
    assert store.rollouts.finish(first, RolloutState.CANCELLED, None) is None
    assert store.rollouts.states(["a"]) == {"a": RolloutState.QUEUED}


def test_a_cancelled_rollout_is_not_tried_again(store: Store) -> None:
    store.rollouts.enqueue([rollout("a")])
    (claimed,) = store.rollouts.claim("me", 1, 60)
    store.rollouts.cancel(ids=["a"])
    failure = Failure(kind=FailureClass.INFRASTRUCTURE, phase="agent", message="engine gone")
    ended = store.rollouts.finish(claimed, RolloutState.FAILED, failure, retry=True)
    assert ended
    assert ended.failure
    assert (ended.state, ended.failure.kind, ended.failure.phase) == (
        RolloutState.CANCELLED,
        FailureClass.CANCELLED,
        "agent",
    )
    assert "engine gone" in ended.failure.message
    assert store.rollouts.states(["a"]) == {"a": RolloutState.CANCELLED}


def test_only_the_rollouts_named_keep_their_lease(store: Store) -> None:
    store.rollouts.enqueue([rollout("a"), rollout("b")])
    store.rollouts.claim("me", 2, -1)
    assert store.rollouts.renew("me", ["a"], 60) == 1
    assert store.rollouts.renew("other", ["b"], 60) == 0
    assert [r.id for r in store.rollouts.orphans()] == ["b"]


def test_a_write_after_the_end_is_refused_at_once(store: Store) -> None:
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.rollouts.enqueue([rollout("a")])
    with pytest.raises(StoreError, match="is closed"):
        asyncio.run(store.calls.append(ModelCall(rollout_id="a", index=0)))


def test_a_cancelled_write_leaves_the_writer_alive(store: Store) -> None:
    async def cancelled() -> None:
        busy, held = threading.Event(), threading.Event()
        store.databases[1].submit(lambda c: (busy.set(), held.wait(10)))
        assert busy.wait(10)
        task = asyncio.create_task(store.calls.append(ModelCall(rollout_id="a", index=0)))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.sleep(0)
        held.set()

    asyncio.run(cancelled())
    asyncio.run(asyncio.wait_for(store.calls.append(ModelCall(rollout_id="b", index=0)), 10))
    assert store.calls.count() == 1


def test_keys_are_hashed_and_revocable(store: Store) -> None:
    store.rollouts.enqueue([rollout("a")])
    key = store.rollouts.issue_key("a", "agent")
    assert store.rollouts.rollout_of_key(key) == ("a", "agent")
    assert store.rollouts.rollout_of_key(key + "x") is None
    database = (store.home.root / "rollouts.db").read_bytes() + (store.home.root / "rollouts.db-wal").read_bytes()
    assert key.encode() not in database
    store.rollouts.revoke_keys("a")
    assert store.rollouts.rollout_of_key(key) is None


def test_a_key_ends_with_its_rollout(store: Store) -> None:
    """Also when the process that had to revoke it could not."""
    store.rollouts.enqueue([rollout("a")])
    (started,) = store.rollouts.claim("me", 1, 60)
    key = store.rollouts.issue_key("a", "agent")
    assert store.rollouts.rollout_of_key(key) == ("a", "agent")
    store.rollouts.finish(started, RolloutState.FAILED, None)
    assert store.rollouts.rollout_of_key(key) is None


def test_a_failed_write_spoils_no_other_of_its_group(store: Store) -> None:
    async def both() -> list[object]:
        call = ModelCall(rollout_id="a", index=0, completion_ids=(1, 2))
        other = ModelCall(rollout_id="b", index=0)
        work = (store.calls.append(call), store.calls.append(call), store.calls.append(other))
        return await asyncio.gather(*work, return_exceptions=True)

    results = asyncio.run(both())
    assert [isinstance(r, sa.exc.IntegrityError) for r in results] == [False, True, False]
    assert [c.completion_ids for c in store.calls.of("a")] == [(1, 2)]
    assert store.calls.count() == 2


def test_engine_routing_keeps_training_weights_apart(store: Store) -> None:
    common = {"model": "m", "path": "/m", "url": "u", "pid": 1, "process_started": 0.0}
    store.engines.put(EngineRecord(id="shared", **common))
    store.engines.put(EngineRecord(id="mine", exclusive="rl-1", **common))
    found = [store.engines.routes("m", run) for run in ("rl-1", "eval-1")]
    assert [[e.id for e in some] for some in found] == [["mine"], ["shared"]]
    store.engines.remove("shared")
    assert store.engines.routes("m", "eval-1") == []


def test_records_are_replaced(store: Store) -> None:
    for kept in (1, 2):
        store.records.put(StageRecord(run="r", stage="build", kept=kept), run="r", key="build")
    assert [r.kept for r in store.records.all(StageRecord, run="r")] == [2]
    assert store.records.all(StageRecord, run="other") == []


def test_newer_schema_is_refused(tmp_path: Path) -> None:
    home = open_home(tmp_path)
    open_store(home).close()
    engine = sa.create_engine(home.database_url("calls"))
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE version_calls SET version_num = '99'"))
    engine.dispose()
    with pytest.raises(NewerHomeError, match="schema version 99"):
        open_store(home)


WRITER = """
import sys
from rollout.config import open_home
from rollout.store import open_store
from rollout.types import StageRecord
store = open_store(open_home(sys.argv[1]))
for i in range(int(sys.argv[3])):
    store.records.put(StageRecord(run=sys.argv[2], stage=str(i)), run=sys.argv[2], key=str(i))
    store.records.get(StageRecord, run=sys.argv[2], key=str(i))
store.close()
"""


def test_bug_62_63_many_processes_write_without_a_busy_error(tmp_path: Path) -> None:
    open_store(open_home(tmp_path)).close()
    jobs = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), f"w{n}", "60"], stderr=subprocess.PIPE)
        for n in range(8)
    ]
    errors = [job.communicate(timeout=120)[1].decode() for job in jobs]
    assert [job.returncode for job in jobs] == [0] * 8, errors
    store = open_store(open_home(tmp_path))
    assert len(store.records.all(StageRecord)) == 480
    store.close()


@settings(max_examples=50, deadline=None)
@given(data=st.binary(max_size=4096))
def test_blobs_round_trip(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    blobs = Blobs(tmp_path_factory.mktemp("blobs"))
    assert blobs.get(blobs.put(data)) == data


def test_a_damaged_blob_is_named(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    digest, other = blobs.put(b"x" * 100), blobs.put(b"y")
    paths = {d: tmp_path / d[:2] / f"{d}.zst" for d in (digest, other)}
    paths[digest].write_bytes(paths[other].read_bytes())
    with pytest.raises(ValueError, match="damaged"):
        Blobs(tmp_path).get(digest)


class RolloutMachine(RuleBasedStateMachine):
    """Any mix of claims, advances and ends leaves every attempt with at most one end and one live attempt a root."""

    roots = Bundle("roots")

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.store = open_store(open_home(self.folder.name))
        self.ends: dict[str, RolloutState] = {}
        self.count = 0

    @rule(target=roots)
    def enqueue(self) -> str:
        self.count += 1
        self.store.rollouts.enqueue([rollout(f"r{self.count}")])
        return f"r{self.count}"

    @rule(n=st.integers(1, 3))
    def claim(self, n: int) -> None:
        for item in self.store.rollouts.claim("me", n, 60):
            assert item.state is RolloutState.STARTING

    @rule(root=roots, state=st.sampled_from(list(RolloutState)))
    def advance(self, root: str, state: RolloutState) -> None:
        item = self.store.rollouts.latest([root])[root]
        if state in TRANSITIONS.get(item.state, frozenset()):
            assert self.store.rollouts.advance(item, state=state)

    @rule(root=roots, state=st.sampled_from(sorted(TERMINAL)), retry=st.booleans())
    def finish(self, root: str, state: RolloutState, retry: bool) -> None:
        item = self.store.rollouts.latest([root])[root]
        ended = self.store.rollouts.finish(item, state, None, retry=retry)
        assert (ended is None) == item.state.terminal

    @invariant()
    def each_id_ends_once(self) -> None:
        live: dict[str, int] = {}
        for item in self.store.rollouts.query(run="r"):
            if item.id in self.ends:
                assert item.state is self.ends[item.id]
            elif item.state.terminal:
                self.ends[item.id] = item.state
            live[item.retry_of or item.id] = live.get(item.retry_of or item.id, 0) + (not item.state.terminal)
        assert all(n <= 1 for n in live.values())

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()


TestRolloutMachine = RolloutMachine.TestCase
TestRolloutMachine.settings = settings(max_examples=8, stateful_step_count=15, deadline=None)
