"""The mock services as state machines: garbage never crashes them, errors change nothing, the audit replays."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import ConfigError, InfrastructureError
from rollout.services import ServiceHost, catalog, find_tool
from rollout.services.catalog import SERVICES
from rollout.services.host import BYTES_MAX, CALLS_MAX

SEEDS: dict[str, Any] = {
    "helpdesk": {
        "tickets": [{"id": 47, "subject": "Drücker", "merged_into": 52}, {"id": 52, "merged_into": 61}, {"id": 61}],
        "contacts": [47, 52],
        "rooms": [47, 52],
    },
    "contacts": {"people": [{"id": 47, "name": "Zoë", "replaced_by": 52}, {"id": 52, "name": "Łukasz"}]},
    "mail": {
        "messages": [{"id": 1, "meeting": 47, "slot": 47}, {"id": 2, "meeting": 47, "slot": 52, "reply_to": 1}],
        "tickets": [47, 52],
        "contacts": [47, 52],
    },
    "calendar": {"slots": [{"id": 47}, {"id": 52}], "rooms": [{"id": 47, "replaced_by": 52}, {"id": 52}]},
}
SPECS = catalog(list(SEEDS))

ids = st.sampled_from([1, 2, 47, 52, 61, 99])
text = st.text(max_size=8)
sensible = st.fixed_dictionaries(
    {},
    optional={
        "id": ids,
        "contact": ids,
        "text": text,
        "to": text,
        "subject": text,
        "body": text,
        "name": text,
        "email": text,
        "title": text,
        "minutes": st.integers(-1, 50),
    },
)
junk_text = st.text(st.characters(), max_size=6)  # lone surrogates included
garbage = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | junk_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(junk_text, inner, max_size=3),
    max_leaves=6,
)
fitting = st.sampled_from(SPECS).flatmap(
    lambda spec: st.tuples(
        st.just(spec.service),
        st.just(spec.name),
        st.fixed_dictionaries(
            {
                name: st.integers(1, 60)
                if part["type"] == "integer" and name != "id" and name != "contact"
                else ids
                if part["type"] == "integer"
                else st.text(min_size=3, max_size=8)
                for name, part in spec.parameters["properties"].items()
            }
        ),
    )
)
anything = st.tuples(
    st.sampled_from([*SEEDS, "nope"]), st.sampled_from([s.name for s in SPECS] + ["nope"]), sensible | garbage
)


def opened(**options: Any) -> ServiceHost:
    host = ServiceHost()
    host.open("r", SEEDS, **options)
    return host


@settings(max_examples=150, deadline=None)
@given(st.lists(fitting | anything, max_size=12), st.sampled_from([0.0, 0.3]))
def test_the_audit_replays_to_the_same_final_state(calls: list[tuple[str, str, Any]], rate: float) -> None:
    host = opened(error_rate=rate, error_seed=7)
    results = [host.call("r", *call) for call in calls]
    final = host.final("r")
    written = json.dumps(final, ensure_ascii=False).encode()
    again = opened()
    for entry in json.loads(written)["audit"]:
        if entry["status"] < 400:
            result = again.call("r", entry["service"], entry["tool"], entry["arguments"])
            assert (result.status, result.body) == (entry["status"], entry["result"])
    assert again.final("r")["services"] == final["services"]
    for result in results:
        json.dumps(result.envelope(), ensure_ascii=False).encode()
        assert result.ok or set(result.body) == {"code", "message"}


@settings(max_examples=100, deadline=None)
@given(fitting | anything)
def test_reads_and_refusals_leave_the_state_alone(call: tuple[str, str, Any]) -> None:
    host = opened()
    before = host.final("r")["services"]
    result = host.call("r", *call)
    if not result.ok or find_tool(call[1]).label == "read":
        assert host.final("r")["services"] == before
    else:
        assert host.final("r")["services"] != before or call[1] in ("update_email", "rename_slot", "mark_seen")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 99), st.lists(fitting, min_size=1, max_size=10))
def test_injected_errors_depend_on_the_seed_alone(seed: int, calls: list[tuple[str, str, Any]]) -> None:
    def statuses() -> list[int]:
        host = opened(error_rate=0.5, error_seed=seed)
        return [host.call("r", *call).status for call in calls]

    assert statuses() == statuses()


def test_the_error_switch_hits_at_its_rate() -> None:
    host = opened(error_rate=0.25, error_seed=1)
    statuses = [host.call("r", "mail", "reply_ticket", {"id": 47}).status for _ in range(400)]
    busy, down = statuses.count(429), statuses.count(503)
    assert 0.15 < (busy + down) / 400 < 0.35
    assert min(busy, down) > 25
    assert len(host.final("r")["services"]["mail"]["sent"]) == statuses.count(200) == 400 - busy - down
    assert opened(error_rate=1.0).call("r", "mail", "list_mails", {}).status in (429, 503)


@pytest.mark.parametrize(
    ("service", "tool", "now"),
    [
        ("helpdesk", "get_ticket", 61),
        ("contacts", "get_contact", 52),
        ("mail", "get_notice", 52),
        ("calendar", "get_room", 52),
    ],
)
def test_look_ups_tell_what_is_in_force_now(service: str, tool: str, now: int) -> None:
    assert opened().call("r", service, tool, {"id": 47}).body == {"id": 47, "now": now}


@pytest.mark.parametrize("value", ["47", 47.0, True, None, [47], 10**400, -1])
def test_an_argument_of_the_wrong_type_is_a_typed_error(value: Any) -> None:
    result = opened().call("r", "helpdesk", "get_ticket", {"id": value})
    assert (result.status, result.body["code"]) == (400, "bad_arguments")


def test_tools_that_a_task_does_not_offer_are_unknown() -> None:
    host = opened(tools=["get_ticket", "reply_ticket"])
    assert host.call("r", "helpdesk", "get_ticket", {"id": 47}).ok
    refused = host.call("r", "helpdesk", "close_ticket", {"id": 47})
    assert (refused.status, refused.body["code"]) == (404, "unknown_tool")
    assert [entry["tool"] for entry in host.final("r")["audit"]] == ["get_ticket"]


def test_a_policy_that_never_stops_fills_no_memory() -> None:
    host = opened()
    results = [host.call("r", "mail", "mail_contact", {"id": 47}) for _ in range(CALLS_MAX + 50)]
    assert results[-1].status == 429
    assert len(host.final("r")["audit"]) == CALLS_MAX
    deep: Any = {}
    for _ in range(100_000):
        deep = {"id": deep}
    other = opened()
    assert other.call("r", "mail", "mail_contact", deep).status == 400
    assert other.call("r", "mail", "mail_contact", {"id": "x" * 10**6}).status == 400
    assert len(json.dumps(other.final("r"))) < 5000


def test_rollouts_do_not_see_each_other() -> None:
    host = opened()
    host.open("other", SEEDS)
    host.call("r", "calendar", "confirm_slot", {"id": 47})
    assert host.final("other")["audit"] == []
    assert host.final("other")["services"]["calendar"]["confirmed"] == []
    host.close("r")
    host.close("r")
    with pytest.raises(InfrastructureError, match="not open"):
        host.call("r", "calendar", "confirm_slot", {"id": 47})


@pytest.mark.parametrize(
    "seeds",
    [
        {"nope": {}},
        {"mail": {"inbox": []}},
        {"mail": []},
        {"helpdesk": {"tickets": [{"id": 1, "merged_into": 2}, {"id": 2, "merged_into": 1}]}},
        {"helpdesk": {"tickets": [{"id": 1, "merged_into": 3}]}},
        {"contacts": {"people": [{"id": 1}, {"id": 1}]}},
    ],
)
def test_a_wrong_seed_is_a_config_error(seeds: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServiceHost().open("r", seeds)


def test_the_catalogue_is_typed_and_its_names_unique() -> None:
    assert len({spec.name for spec in SPECS}) == len(SPECS) == sum(len(s.tools) for s in SERVICES.values())
    assert {spec.label for spec in SPECS} == {"read", "write"}
    short = find_tool("get_ticket").function()
    assert short == {
        "type": "function",
        "function": {
            "name": "get_ticket",
            "description": "Look up ticket",
            "parameters": {"type": "object", "properties": {"id": {"type": "integer"}}},
        },
    }
    assert find_tool("send_mail").parameters["required"] == ["to", "subject", "body"]
    assert [s.name for s in catalog(["mail", "helpdesk"], ["reply_ticket", "get_ticket"])] == [
        "reply_ticket",
        "get_ticket",
    ]
    with pytest.raises(ConfigError, match="no tool"):
        catalog(["mail"], ["get_ticket"])
    with pytest.raises(ConfigError, match="no service"):
        catalog(["fax"])


def test_the_final_state_stays_small_whatever_is_sent() -> None:
    """A verifier that cannot hold services.json would drop a rollout that the policy spoilt."""
    host = ServiceHost()
    host.open("r", SEEDS)
    mail = {"to": "a@b.c", "subject": "y", "body": "ü" * 1_500}
    junk = {"to": "a@b.c", "subject": "y", "body": "ü" * 30_000}
    answers = [host.call("r", "mail", "send_mail", (mail, junk)[i % 2]).status for i in range(CALLS_MAX)]
    assert answers[-1] == 413
    assert set(answers) == {200, 400, 413}
    assert len(json.dumps(host.final("r"), ensure_ascii=False).encode()) < 2 * BYTES_MAX
