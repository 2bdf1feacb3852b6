"""Contacts: people whose entries may have been replaced by newer ones.

Trap: `get_contact` tells which entry is in force `now`; a replaced entry stays readable and writable.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from rollout.services.base import (
    ID_MAX,
    Args,
    IdArgs,
    NoArgs,
    Service,
    State,
    TextArgs,
    ToolError,
    check_links,
    in_force,
    next_id,
    pick,
    read,
    swap,
    write,
)
from rollout.types import Record


class Person(Record):
    id: int
    name: str = ""
    email: str = ""
    replaced_by: int | None = None


class ContactsState(State):
    people: tuple[Person, ...] = ()
    pinned: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _links(self) -> ContactsState:
        check_links(self.people, "replaced_by")
        return self


class AddArgs(Args):
    name: str = Field(min_length=1, max_length=200)
    email: str = Field(min_length=3, max_length=200)


class EmailArgs(Args):
    id: int = Field(ge=0, le=ID_MAX)
    email: str = Field(min_length=3, max_length=200)


Change = tuple[ContactsState, Any]
DONE = {"ok": True}


def get_contact(state: ContactsState, args: IdArgs) -> Any:
    pick(state.people, args.id, "contact")
    return {"id": args.id, "now": in_force({p.id: p.replaced_by for p in state.people}, args.id)}


def read_contact(state: ContactsState, args: IdArgs) -> Any:
    return pick(state.people, args.id, "contact").model_dump(mode="json")


def list_contacts(state: ContactsState, args: NoArgs) -> Any:
    return [{"id": p.id, "name": p.name} for p in state.people]


def find_contacts(state: ContactsState, args: TextArgs) -> Any:
    wanted = args.text.casefold()
    return [p.id for p in state.people if wanted in p.name.casefold() or wanted in p.email.casefold()]


def add_contact(state: ContactsState, args: AddArgs) -> Change:
    person = Person(id=next_id(state.people), name=args.name, email=args.email)
    return state.model_copy(update={"people": (*state.people, person)}), {"id": person.id}


def update_email(state: ContactsState, args: EmailArgs) -> Change:
    person = pick(state.people, args.id, "contact").model_copy(update={"email": args.email})
    return state.model_copy(update={"people": swap(state.people, person)}), DONE


def remove_contact(state: ContactsState, args: IdArgs) -> Change:
    pick(state.people, args.id, "contact")
    if any(p.replaced_by == args.id for p in state.people):
        raise ToolError(409, "conflict", f"contact {args.id} replaced another one")
    rest = tuple(p for p in state.people if p.id != args.id)
    return state.model_copy(update={"people": rest}), DONE


def pin_contact(state: ContactsState, args: IdArgs) -> Change:
    pick(state.people, args.id, "contact")
    return state.model_copy(update={"pinned": (*state.pinned, args.id)}), DONE


CONTACTS = Service(
    "contacts",
    ContactsState,
    (
        read("get_contact", "Look up contact", IdArgs, get_contact),
        read("read_contact", "Read whole contact", IdArgs, read_contact),
        read("list_contacts", "List contacts", NoArgs, list_contacts),
        read("find_contacts", "Find contacts by text", TextArgs, find_contacts),
        write("add_contact", "Add contact", AddArgs, add_contact),
        write("update_email", "Change a contact's address", EmailArgs, update_email),
        write("remove_contact", "Remove contact", IdArgs, remove_contact),
        write("pin_contact", "Pin contact", IdArgs, pin_contact),
    ),
)
