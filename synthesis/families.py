"""The task families: what is looked up, what is done, and the trap between the two.

A family pairs a look-up in one service with an action in another. The look-up answers `{"id": asked, "now": ...}`.
In the families that `follow`, the action belongs on what is in force now, so acting at once on the asked id fails
unless nothing was replaced (luck, which the prompt does not show). In `exact_note` the asked number itself is
right and following the look-up misleads, so that "always check" is no answer. Content is easy to copy; the choice
of behaviour is all there is to learn.

Numbers and names of held-out tasks never occur in a training task: the pools below are disjoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.errors import ConfigError
from rollout.types import Record, Split


@dataclass(frozen=True)
class Pool:
    """What the slots of a split are drawn from. Two-digit numbers: each digit is a token of its own."""

    numbers: tuple[int, ...]
    names: tuple[str, ...]


_TRAIN_NAMES = """
    Ana Ben Carla David Eva Felix Gina Hugo Ida Jonas Kira Leo Mia Nils Olga Paul Rosa Sven Tina Uwe
"""
_HELDOUT_NAMES = "Alma Boris Clara Dora Emil Frida Georg Hanna Ivan Zoë"
TRAIN = Pool(tuple(n for n in range(10, 100) if n % 3), tuple(_TRAIN_NAMES.split()))
HELDOUT = Pool(tuple(n for n in range(10, 100) if n % 3 == 0), tuple(_HELDOUT_NAMES.split()))


def pool_of(split: Split) -> Pool:
    return HELDOUT if split is Split.HELDOUT else TRAIN


class Slots(Record):
    """All that varies between two tasks of a family."""

    asked: int
    now: int
    """In force in place of `asked`; equal to it in a lucky instance."""
    others: tuple[int, ...]
    """Further entries of the fixture; the last of them replaced the first."""
    name: str
    template: int
    decoy: str
    """The third tool of the task, of no use."""

    @property
    def luck(self) -> bool:
        return self.asked == self.now

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((self.asked, self.now, *self.others)))

    @property
    def links(self) -> dict[int, int]:
        """Replaced entry -> the entry in force."""
        moved = {self.others[0]: self.others[-1]} if len(self.others) > 1 else {}
        return moved if self.luck else {**moved, self.asked: self.now}


class GradedFact(Record):
    """Something that the verifier grades, and the words of which the instruction must hold at least one."""

    fact: str
    any_of: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    name: str
    services: tuple[str, ...]
    lookup: str
    action: str
    decoys: tuple[str, ...]
    """Writes of no use; never the action of another family, so that families do not undo each other in training."""
    verbs: tuple[str, ...]
    """Words for the action."""
    noun: str
    condition: tuple[str, ...]
    """Words for what happened to a replaced entry."""
    templates: tuple[str, ...]
    follow: bool = True
    """The action belongs on what is in force now; else on the asked id."""

    def target(self, slots: Slots) -> int:
        return slots.now if self.follow else slots.asked

    def graded(self, slots: Slots) -> tuple[GradedFact, ...]:
        which = "what is in force now" if self.follow else "the asked number, replaced or not"
        return (
            GradedFact(fact=f"exactly one write: {self.action}", any_of=self.verbs),
            GradedFact(fact=f"its kind of id: {self.noun}", any_of=(self.noun,)),
            GradedFact(fact="its id", any_of=(str(slots.asked),)),
            GradedFact(fact=f"which id counts: {which}", any_of=self.condition),
            GradedFact(fact="the final answer says done", any_of=("done",)),
        )


FAMILIES = (
    Family(
        name="merged_ticket",
        services=("helpdesk", "mail"),
        lookup="get_ticket",
        action="reply_ticket",
        decoys=("close_ticket",),
        verbs=("reply", "answer"),
        noun="ticket",
        condition=("merged",),
        templates=(
            "Reply to ticket {asked}. If it was merged into another ticket, reply to that one. Then say done.",
            "Answer ticket {asked}; if it was merged, answer the ticket it went into. Say done at the end.",
            "Ticket {asked} from {name} needs a reply. If it was merged, reply where it went. Then say done.",
            "Please reply to ticket {asked}, or to the one it was merged into. Finish with done.",
        ),
    ),
    Family(
        name="new_address",
        services=("contacts", "mail"),
        lookup="get_contact",
        action="mail_contact",
        decoys=("pin_contact",),
        verbs=("mail", "write"),
        noun="contact",
        condition=("replaced",),
        templates=(
            "Mail contact {asked}. If the entry was replaced, mail the new one. Then say done.",
            "Write to {name}, contact {asked}; if that was replaced, write to the newer entry. Say done at the end.",
            "Contact {asked} needs a mail. If it was replaced, mail its new entry. Then say done.",
            "Please mail contact {asked}, or the entry by which it was replaced. Finish with done.",
        ),
    ),
    Family(
        name="moved_meeting",
        services=("mail", "calendar"),
        lookup="get_notice",
        action="confirm_slot",
        decoys=("cancel_slot",),
        verbs=("confirm", "confirmation"),
        noun="slot",
        condition=("moved",),
        templates=(
            "Confirm meeting slot {asked}. If a later mail moved it, confirm the new slot. Then say done.",
            "Confirm the meeting in slot {asked}; if it was moved by mail, confirm its new slot. Say done at the end.",
            "Slot {asked} with {name} needs a confirmation. If mail moved it, confirm the new slot. Then say done.",
            "Please confirm slot {asked}, or the slot it was moved to by mail. Finish with done.",
        ),
    ),
    Family(
        name="exact_note",
        services=("contacts", "helpdesk"),
        lookup="get_contact",
        action="add_note",
        decoys=("close_ticket",),
        verbs=("note",),
        noun="contact",
        condition=("replaced",),
        templates=(
            "Add a note to contact {asked}, exactly that number, even if it was replaced. Then say done.",
            "Note on contact {asked}: use this very number, replaced or not. Say done at the end.",
            "Contact {asked} of {name} needs a note, on just that number even when replaced. Then say done.",
            "Please put a note on contact {asked} itself, also if it was replaced. Finish with done.",
        ),
        follow=False,
    ),
)
HELDOUT_FAMILIES = (
    Family(
        name="replaced_room",
        services=("calendar", "helpdesk"),
        lookup="get_room",
        action="book_room",
        decoys=("cancel_slot",),
        verbs=("book", "booking"),
        noun="room",
        condition=("replaced",),
        templates=(
            "Book room {asked}. If it was replaced, book the new one. Then say done.",
            "Book room {asked}; if that was replaced, book the newer room. Say done at the end.",
            "Room {asked} needs a booking for {name}. If it was replaced, book its new room. Then say done.",
            "Please book room {asked}, or the room by which it was replaced. Finish with done.",
        ),
    ),
)


def family_named(name: str) -> Family:
    for family in (*FAMILIES, *HELDOUT_FAMILIES):
        if family.name == name:
            return family
    raise ConfigError(
        f"no task family {name!r}; there are: {', '.join(f.name for f in (*FAMILIES, *HELDOUT_FAMILIES))}"
    )


# -- fixtures: the seed state of each service for a family's slots


def fixture(family: Family, slots: Slots) -> dict[str, Any]:
    """Service name -> seed state. Every number can be acted on, so that a wrong act succeeds and is seen."""
    return {name: _SEEDS[name](slots.numbers, slots.links, slots.name) for name in family.services}


def _mail(numbers: Sequence[int], links: Mapping[int, int], name: str) -> dict[str, Any]:
    sender = f"{name.lower()}@example.org"
    first = [
        {"id": n, "sender": sender, "subject": f"Meeting in slot {n}", "meeting": n, "slot": n}
        for n in numbers
        if n not in links.values()
    ]
    later = [
        {"id": new, "sender": sender, "subject": f"Moved to slot {new}", "meeting": old, "slot": new, "reply_to": old}
        for old, new in links.items()
    ]
    return {"messages": first + later, "tickets": list(numbers), "contacts": list(numbers)}


def _calendar(numbers: Sequence[int], links: Mapping[int, int], name: str) -> dict[str, Any]:
    slots = [{"id": n, "title": f"Meeting with {name}"} for n in numbers]
    rooms = [{"id": n, "name": f"Room {n}", "replaced_by": links.get(n)} for n in numbers]
    return {"slots": slots, "rooms": rooms}


def _contacts(numbers: Sequence[int], links: Mapping[int, int], name: str) -> dict[str, Any]:
    return {
        "people": [
            {"id": n, "name": name, "email": f"{name.lower()}{n}@example.org", "replaced_by": links.get(n)}
            for n in numbers
        ]
    }


def _helpdesk(numbers: Sequence[int], links: Mapping[int, int], name: str) -> dict[str, Any]:
    tickets = [{"id": n, "subject": f"Question from {name}", "merged_into": links.get(n)} for n in numbers]
    return {"tickets": tickets, "contacts": list(numbers), "rooms": list(numbers)}


_SEEDS: dict[str, Callable[[Sequence[int], Mapping[int, int], str], dict[str, Any]]] = {
    "mail": _mail,
    "calendar": _calendar,
    "contacts": _contacts,
    "helpdesk": _helpdesk,
}
