"""Help desk: tickets that may have been merged into others, notes on contacts, and bookings of rooms.

Trap: `get_ticket` tells which ticket is in force `now`; writes take any ticket that exists, merged or not.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rollout.services.base import (
    ID_MAX,
    TEXT_MAX,
    Args,
    IdArgs,
    NoArgs,
    Service,
    State,
    TextArgs,
    ToolError,
    check_links,
    in_force,
    pick,
    read,
    swap,
    write,
)
from rollout.types import Record


class Ticket(Record):
    id: int
    subject: str = ""
    status: Literal["open", "closed"] = "open"
    merged_into: int | None = None
    assignee: int | None = None
    comments: tuple[str, ...] = ()


class HelpdeskState(State):
    tickets: tuple[Ticket, ...] = ()
    contacts: tuple[int, ...] = ()
    """Numbers that notes can be added to."""
    rooms: tuple[int, ...] = ()
    """Rooms that can be booked."""
    notes: tuple[int, ...] = ()
    """Contact number of each note, oldest first."""
    bookings: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _links(self) -> HelpdeskState:
        check_links(self.tickets, "merged_into")
        return self


class AssignArgs(Args):
    id: int = Field(ge=0, le=ID_MAX)
    contact: int = Field(ge=0, le=ID_MAX)


class CommentArgs(Args):
    id: int = Field(ge=0, le=ID_MAX)
    text: str = Field(min_length=1, max_length=TEXT_MAX)


Change = tuple[HelpdeskState, Any]
DONE = {"ok": True}


def get_ticket(state: HelpdeskState, args: IdArgs) -> Any:
    pick(state.tickets, args.id, "ticket")
    return {"id": args.id, "now": in_force({t.id: t.merged_into for t in state.tickets}, args.id)}


def read_ticket(state: HelpdeskState, args: IdArgs) -> Any:
    return pick(state.tickets, args.id, "ticket").model_dump(mode="json")


def list_tickets(state: HelpdeskState, args: NoArgs) -> Any:
    return [{"id": t.id, "status": t.status} for t in state.tickets]


def find_tickets(state: HelpdeskState, args: TextArgs) -> Any:
    return [t.id for t in state.tickets if args.text.casefold() in t.subject.casefold()]


def _update(state: HelpdeskState, ticket: Ticket, **changes: Any) -> Change:
    rows = swap(state.tickets, ticket.model_copy(update=changes))
    return state.model_copy(update={"tickets": rows}), DONE


def _set_status(state: HelpdeskState, ticket_id: int, status: str) -> Change:
    ticket = pick(state.tickets, ticket_id, "ticket")
    if ticket.status == status:
        raise ToolError(409, "conflict", f"ticket {ticket_id} is {status}")
    return _update(state, ticket, status=status)


def close_ticket(state: HelpdeskState, args: IdArgs) -> Change:
    return _set_status(state, args.id, "closed")


def reopen_ticket(state: HelpdeskState, args: IdArgs) -> Change:
    return _set_status(state, args.id, "open")


def assign_ticket(state: HelpdeskState, args: AssignArgs) -> Change:
    _known(state.contacts, args.contact, "contact")
    return _update(state, pick(state.tickets, args.id, "ticket"), assignee=args.contact)


def comment_ticket(state: HelpdeskState, args: CommentArgs) -> Change:
    ticket = pick(state.tickets, args.id, "ticket")
    return _update(state, ticket, comments=(*ticket.comments, args.text))


def add_note(state: HelpdeskState, args: IdArgs) -> Change:
    _known(state.contacts, args.id, "contact")
    return state.model_copy(update={"notes": (*state.notes, args.id)}), DONE


def book_room(state: HelpdeskState, args: IdArgs) -> Change:
    _known(state.rooms, args.id, "room")
    return state.model_copy(update={"bookings": (*state.bookings, args.id)}), DONE


def _known(ids: tuple[int, ...], wanted: int, noun: str) -> None:
    if wanted not in ids:
        raise ToolError(404, "unknown_id", f"no {noun} {wanted}")


HELPDESK = Service(
    "helpdesk",
    HelpdeskState,
    (
        read("get_ticket", "Look up ticket", IdArgs, get_ticket),
        read("read_ticket", "Read whole ticket", IdArgs, read_ticket),
        read("list_tickets", "List tickets", NoArgs, list_tickets),
        read("find_tickets", "Find tickets by subject", TextArgs, find_tickets),
        write("close_ticket", "Close ticket", IdArgs, close_ticket),
        write("reopen_ticket", "Reopen ticket", IdArgs, reopen_ticket),
        write("assign_ticket", "Assign ticket to contact", AssignArgs, assign_ticket),
        write("comment_ticket", "Comment on ticket", CommentArgs, comment_ticket),
        write("add_note", "Note on contact", IdArgs, add_note),
        write("book_room", "Book room", IdArgs, book_room),
    ),
)
