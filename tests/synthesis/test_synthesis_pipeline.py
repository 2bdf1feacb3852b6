"""The five stages over one ledger: what is kept and dropped, asked again, killed, run twice, and given broken tasks."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout.bundle import load_task, load_tasks
from rollout.client import seed_of
from rollout.config import load_preset, open_home
from rollout.errors import Cancelled, ConfigError, FailureClass, PhaseTimeout
from rollout.store import Store, open_store
from rollout.types import Resources, Rollout, Split, StageRecord, Timeouts
from synthesis.build import build
from synthesis.config import Checks, Counts, SynthConfig
from synthesis.folders import draft_folder, task_folder
from synthesis.ledger import Ledger, Query
from synthesis.pipeline import STAGES, synthesise
from synthesis.procedural import lucky
from synthesis.propose import Draw, Group, proposal_of, propose
from synthesis.prune import prune, select
from synthesis.refine import refine
from synthesis.trial import trial
from synthesis.types import Proposal, Stage, State


def quiet(label: str, done: int, total: int) -> None:
    assert 0 <= done <= total


def run(store: Store, ledger: Ledger, config: SynthConfig) -> list[StageRecord]:
    return synthesise(store, ledger, config, "r", quiet)


def accepted(ledger: Ledger) -> dict[str, tuple[str, str]]:
    return {p.id: (p.identity, p.digest) for p in ledger.all(Query("b", (State.ACCEPTED,)))}


def until_built(store: Store, ledger: Ledger, config: SynthConfig) -> list[Proposal]:
    """RL-mode proposals, built."""
    for stage in (propose, prune, build):
        stage(store, ledger, config, "r", quiet)
    return ledger.all(Query("b", (State.BUILT,)))


def test_all_stages_give_the_wanted_tasks(store: Store, ledger: Ledger, config: SynthConfig, serve: Any) -> None:
    records = {r.stage: r for r in run(store, ledger, config)}
    tasks = load_tasks(store.home.tasks / "b")
    assert Counter(t.split for t in tasks) == {Split.SFT: 8, Split.RL: 4, Split.VALIDATION: 4, Split.HELDOUT: 6}
    assert {t.id: (t.provenance.identity, t.digest) for t in tasks} == accepted(ledger)
    assert all(t.bundle == str(store.home.tasks / "b" / t.id) for t in tasks)
    assert Counter(t.provenance.family for t in tasks if t.split is Split.HELDOUT)["replaced_room"] == 2
    assert not [t for t in tasks if t.split is not Split.HELDOUT and t.provenance.family == "replaced_room"]
    assert records["propose"].kept == ledger.count(Query("b")) > 22
    assert records["prune"].kept == 22
    assert records["prune"].dropped == {"surplus": records["propose"].kept - 22}
    assert (records["build"].kept, records["trial"].kept, records["refine"].kept) == (22, 14, 14)
    assert records["trial"].rollouts == 14
    assert records["trial"].tokens == 14 * 7
    assert records["refine"].rollouts == 14 * (2 + 1 + 3)
    assert all(len(t.tools) == 3 for t in tasks)


def test_outcomes_and_costs_stand_beside_the_proposal(
    store: Store, ledger: Ledger, config: SynthConfig, serve: Any
) -> None:
    run(store, ledger, config)
    for proposal in ledger.all(Query("b", (State.ACCEPTED,), (Split.RL,))):
        found = {o.script: o for o in ledger.outcomes(proposal.id)}
        lazy_succeeds = proposal.slots.luck or proposal.family == "exact_note"
        assert found["trial"].reward == (1.0 if lazy_succeeds else 0.0), "a failed trial rejects nothing"
        assert {s: o.reward for s, o in found.items() if s != "trial"} == {
            "solve": 1.0,
            "idle": 0.0,
            "wrong/off-target": 0.0,
            "wrong/twice": 0.0,
            "wrong/silent": 0.0,
        }
        assert {c.stage for c in ledger.costs(proposal.id)} == {Stage.BUILD, Stage.TRIAL, Stage.REFINE}


def test_asked_again_nothing_is_done_twice(store: Store, ledger: Ledger, small: SynthConfig, serve: Any) -> None:
    first = run(store, ledger, small)
    ran = list(serve.ran)
    before = accepted(ledger)
    assert run(store, ledger, small) == first
    assert serve.ran == ran
    assert accepted(ledger) == before


class Killed(BaseException):
    """Stands for the end of the process: nothing may catch it."""


@pytest.mark.parametrize("kill_at", [0, 1, 2, 5, 9])
def test_killed_at_any_progress_and_asked_again_the_end_is_the_same(
    tmp_path: Path, store: Store, ledger: Ledger, config: SynthConfig, serve: Any, kill_at: int
) -> None:
    calls = 0

    def killing(label: str, done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == kill_at + 1:
            raise Killed

    small = config.model_copy(update={"counts": Counts(sft=4, rl=4, validation=0, heldout=0, heldout_family=0)})
    with contextlib.suppress(Killed):
        synthesise(store, ledger, small, "r", killing)
    records = synthesise(store, ledger, small, "r", quiet)
    assert [r.stage for r in records] == [s.value for s in STAGES]
    assert {p.id for p in ledger.all(Query("b", (State.ACCEPTED,)))} == {
        t.id for t in load_tasks(store.home.tasks / "b")
    }
    assert len(serve.ran) == len(set(serve.ran))
    assert accepted(ledger) == unkilled(tmp_path, small)


def unkilled(tmp_path: Path, config: SynthConfig) -> dict[str, tuple[str, str]]:
    """The accepted identities and digests of an undisturbed run, up to build: the rest changes neither."""
    store = open_store(open_home(tmp_path / "other"))
    ledger = Ledger.open(store.home)
    try:
        built = until_built(store, ledger, config) + ledger.all(Query("b", (State.ACCEPTED,)))
        return {p.id: (p.identity, p.digest) for p in built}
    finally:
        ledger.close()
        store.close()


def test_two_runs_of_the_same_stages_at_once_share_the_work(
    store: Store, ledger: Ledger, config: SynthConfig, serve: Any
) -> None:
    other = Ledger.open(store.home)
    thread = threading.Thread(target=synthesise, args=(store, other, config, "r", quiet))
    thread.start()
    run(store, ledger, config)
    thread.join(timeout=60)
    other.close()
    assert not thread.is_alive()
    assert ledger.states("b")[State.ACCEPTED] == 22
    assert len(serve.ran) == len(set(serve.ran))


def test_a_second_batch_holds_no_twin_of_the_first(store: Store, ledger: Ledger, config: SynthConfig) -> None:
    first = propose(store, ledger, config, "r", quiet)
    second = propose(store, ledger, config.model_copy(update={"batch": "c"}), "r2", quiet)
    assert second.kept == first.kept
    assert second.dropped["twin"] >= first.kept
    rows = ledger.all(Query("b")) + ledger.all(Query("c"))
    assert len({p.identity for p in rows}) == len(rows)


def test_more_tasks_than_a_family_has_is_a_clear_error(store: Store, ledger: Ledger, config: SynthConfig) -> None:
    counts = Counts(sft=0, rl=0, validation=0, heldout=0, heldout_family=2)
    stuck = config.model_copy(update={"counts": counts, "batch": "x", "oversample": 10.0})
    for number in range(20 * 20):
        drawn = Draw(seed_of(stuck.seed, number), lucky(number, stuck.luck_rate))
        ledger.add([proposal_of(f"t-{number}", "taken", Group(Split.HELDOUT, "replaced_room", 1), drawn)])
    with pytest.raises(ConfigError, match="gave only 0 of 20"):
        propose(store, ledger, stuck, "r", quiet)


# -- prune


def test_prune_keeps_the_luck_rate_and_spreads_ids(store: Store, ledger: Ledger) -> None:
    config = SynthConfig(batch="b", counts=Counts(sft=160, rl=64, validation=24, heldout=48, heldout_family=12))
    propose(store, ledger, config, "r", quiet)
    prune(store, ledger, config, "r", quiet)
    for split, n in ((Split.SFT, 160), (Split.RL, 64), (Split.VALIDATION, 24), (Split.HELDOUT, 60)):
        rows = ledger.all(Query("b", (State.SELECTED,), (split,)))
        assert len(rows) == n
        assert abs(sum(p.slots.luck for p in rows) / n - 0.35) < 0.06
        families = Counter(p.family for p in rows)
        assert {families[f] for f in config.families} == {(n - families["replaced_room"]) // 4}
    every = ledger.all(Query("b", splits=(Split.SFT,)))
    group = [p for p in every if p.family == "new_address"]
    chosen = select(group, 40, 0.35)
    assert len({p.slots.asked for p in chosen}) >= len({p.slots.asked for p in sorted(group, key=lambda p: p.id)[:40]})
    assert max(Counter(p.slots.template for p in chosen).values()) <= 12


def test_selected_and_held_out_tasks_share_no_number(store: Store, ledger: Ledger, config: SynthConfig) -> None:
    until_built(store, ledger, config)
    rows = ledger.all(Query("b"))
    held = {n for p in rows if p.split is Split.HELDOUT for n in p.slots.numbers}
    trained = {n for p in rows if p.split is not Split.HELDOUT for n in p.slots.numbers}
    assert held
    assert trained
    assert not held & trained


# -- trial


@pytest.mark.parametrize("kind", [FailureClass.INFRASTRUCTURE, FailureClass.HARNESS, FailureClass.VERIFIER])
def test_a_trial_that_ends_in_a_failure_rejects_the_task(
    store: Store, ledger: Ledger, small: SynthConfig, serve: Any, kind: FailureClass
) -> None:
    target = until_built(store, ledger, small)[0].id
    serve.breaks = lambda r: kind if r.task_id == target and "-trial-" in r.run else None
    record = trial(store, ledger, small, "r", quiet)
    assert record.dropped == {kind.value: 1}
    assert record.kept == 3
    row = ledger.get(target)
    assert row is not None
    assert (row.state, row.stage, row.reason) == (State.REJECTED, "trial", kind.value)
    refine(store, ledger, small, "r", quiet)
    assert target not in {t.id for t in load_tasks(store.home.tasks / "b")}


def test_a_trial_that_times_out_is_shown_and_rejects_nothing(
    store: Store, ledger: Ledger, small: SynthConfig, serve: Any
) -> None:
    until_built(store, ledger, small)
    serve.breaks = lambda r: FailureClass.TIMEOUT
    assert trial(store, ledger, small, "r", quiet).kept == 4
    [outcome] = ledger.outcomes(ledger.all(Query("b", (State.TRIALLED,)))[0].id)
    assert (outcome.reward, outcome.failure) == (None, "timeout")


def test_a_cancelled_trial_leaves_its_tasks_built(store: Store, ledger: Ledger, small: SynthConfig, serve: Any) -> None:
    built = until_built(store, ledger, small)
    serve.breaks = lambda r: FailureClass.CANCELLED
    with pytest.raises(Cancelled):
        trial(store, ledger, small, "r", quiet)
    assert ledger.all(Query("b", (State.BUILT,))) == built


def test_bug_57_a_trial_that_never_ends_is_named(store: Store, ledger: Ledger, small: SynthConfig, serve: Any) -> None:
    until_built(store, ledger, small)
    serve.stop.set()
    with pytest.raises(PhaseTimeout, match="did not end"):
        trial(store, ledger, small.model_copy(update={"deadline_s": 0.5}), "r", quiet)


# -- refine

Break = Callable[[Path], None]


def _verifier(text: str) -> Break:
    def change(bundle: Path) -> None:
        (bundle / "tests" / "verify.py").write_text(text)

    return change


WRITES = (
    "import os, sys\nos.makedirs(sys.argv[1] + '/logs/verifier')\n"
    "open(sys.argv[1] + '/logs/verifier/reward.txt', 'w').write({!r})\n"
)
BROKEN: dict[str, tuple[Break, str]] = {
    "no verifier program": (lambda b: (b / "tests" / "verify.py").unlink(), "verifier"),
    "no test.sh": (lambda b: (b / "tests" / "test.sh").unlink(), "bundle"),
    "crash": (_verifier("raise SystemExit(3)\n"), "verifier"),
    "nan": (_verifier(WRITES.format("nan")), "verifier"),
    "1.5": (_verifier(WRITES.format("1.5")), "verifier"),
    "nothing": (_verifier("pass\n"), "verifier"),
    "no number": (_verifier(WRITES.format("größer ✓")), "verifier"),
    "plan is no plan": (lambda b: (b / "solution" / "plan.json").write_text('{"oracle": [1]}'), "bundle"),
    "no plan for a wrong solution": (lambda b: (b / "solution" / "wrong" / "late.sh").write_text("exit 0\n"), "bundle"),
    "no graded facts": (
        lambda b: (b / "task.toml").write_text((b / "task.toml").read_text().replace("graded = [", "other = [")),
        "bundle",
    ),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_bundle_is_rejected_with_the_reason(
    store: Store, ledger: Ledger, small: SynthConfig, serve: Any, name: str
) -> None:
    change, reason = BROKEN[name]
    built = until_built(store, ledger, small)
    trial(store, ledger, small, "r", quiet)
    change(draft_folder(store.home, built[0]))
    record = refine(store, ledger, small, "r", quiet)
    assert record.dropped == {reason: 1}
    row = ledger.get(built[0].id)
    assert row is not None
    assert (row.state, row.stage, row.reason) == (State.REJECTED, "refine", reason)
    assert row.detail
    assert record.kept == 3
    assert not task_folder(store.home, built[0]).exists()


def _always_right(bundle: Path) -> None:
    (bundle / "tests" / "verify.py").write_text(WRITES.format("1"))


def _unnamed(bundle: Path) -> None:
    (bundle / "instruction.md").write_text("Bitte erledigen.")


def _lenient(bundle: Path) -> None:
    """Takes any right write: acting twice scores 1."""
    file = bundle / "tests" / "expected.json"
    program = bundle / "tests" / "verify.py"
    text = program.read_text().replace('final["services"] == expected["services"] and writes == ', "writes[:1] == ")
    assert text != program.read_text()
    program.write_text(text)
    assert json.loads(file.read_text())["writes"]


PATCHED = {"always 1": (_always_right, "idle"), "unnamed": (_unnamed, "instruction"), "lenient": (_lenient, "wrong")}


@pytest.mark.parametrize("name", list(PATCHED))
def test_a_task_that_fails_a_check_is_written_anew_and_accepted(
    store: Store, ledger: Ledger, small: SynthConfig, serve: Any, name: str
) -> None:
    change, reason = PATCHED[name]
    built = until_built(store, ledger, small)
    trial(store, ledger, small, "r", quiet)
    change(draft_folder(store.home, built[0]))
    record = refine(store, ledger, small, "r", quiet)
    row = ledger.get(built[0].id)
    assert row is not None
    assert (row.state, row.round) == (State.ACCEPTED, 1)
    assert row.detail.startswith(reason)
    assert row.identity != built[0].identity
    assert (record.kept, record.dropped, record.details["patched"]) == (4, {}, 1)
    assert {o.round for o in ledger.outcomes(row.id) if o.script == "trial"} == {0, 1}


def test_a_wrong_solution_that_runs_in_no_sandbox_is_played_in_process(
    store: Store, ledger: Ledger, small: SynthConfig, serve: Any
) -> None:
    none = small.model_copy(update={"checks": Checks(wrong=0, determinism_runs=1), "rounds": 0})
    built = until_built(store, ledger, none)
    trial(store, ledger, none, "r", quiet)
    _lenient(draft_folder(store.home, built[0]))
    assert refine(store, ledger, none, "r", quiet).dropped == {"wrong": 1}
    row = ledger.get(built[0].id)
    assert row is not None
    assert row.detail == "wrong/twice scores 1 instead of 0 in process"


def test_built_tasks_have_the_limits_of_the_settings(store: Store, ledger: Ledger, small: SynthConfig) -> None:
    limits = {"resources": Resources(cpus=2.0, memory_mb=6144), "timeouts": Timeouts(agent=77.0)}
    built = until_built(store, ledger, small.model_copy(update=limits))
    task = load_task(draft_folder(store.home, built[0]))
    assert (task.resources, task.timeouts) == (limits["resources"], limits["timeouts"])


@pytest.mark.parametrize("name", list(PATCHED))
def test_without_rounds_it_is_rejected(store: Store, ledger: Ledger, small: SynthConfig, serve: Any, name: str) -> None:
    change, reason = PATCHED[name]
    built = until_built(store, ledger, small)
    trial(store, ledger, small, "r", quiet)
    change(draft_folder(store.home, built[0]))
    record = refine(store, ledger, small.model_copy(update={"rounds": 0}), "r", quiet)
    assert record.dropped == {reason: 1}


def test_an_oracle_that_does_not_always_score_one_is_seen(
    store: Store, ledger: Ledger, small: SynthConfig, serve: Any
) -> None:
    until_built(store, ledger, small)
    trial(store, ledger, small, "r", quiet)
    target = ledger.all(Query("b", (State.TRIALLED,)))[0].id

    def sometimes(rollout: Rollout) -> FailureClass | None:
        broken = rollout.task_id == target and rollout.harness == "solution:solve" and rollout.start_index == 1
        return FailureClass.HARNESS if broken else None

    serve.breaks = sometimes
    twice = small.model_copy(update={"rounds": 1, "checks": Checks(determinism_runs=2)})
    record = refine(store, ledger, twice, "r", quiet)
    assert record.dropped == {"oracle": 1}


def test_fewer_checks_take_the_wrong_solutions_in_turn(
    store: Store, ledger: Ledger, config: SynthConfig, serve: Any
) -> None:
    few = config.model_copy(update={"checks": Checks(wrong=1, determinism_runs=1)})
    record = run(store, ledger, few)[-1]
    assert record.rollouts == 14 * 3
    scripts = Counter(o.script for p in ledger.all(Query("b")) for o in ledger.outcomes(p.id))
    assert {scripts[f"wrong/{name}"] for name in ("off-target", "twice", "silent")} <= {4, 5}


# -- settings


def test_the_preset_section_reads_and_names_an_unknown_key(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text('batch = "x"\n[checks]\nwrong = 2\n[counts]\nsft = 3\n')
    config = load_preset(SynthConfig, str(file))
    assert (config.batch, config.checks.wrong, config.counts.sft) == ("x", 2, 3)
    file.write_text("luckrate = 0.2\n")
    with pytest.raises(ConfigError, match="luck_rate"):
        load_preset(SynthConfig, str(file))
    file.write_text('families = ["merged_ticket", "tickets"]\n')
    with pytest.raises(ConfigError, match="no task family 'tickets'"):
        load_preset(SynthConfig, str(file))
