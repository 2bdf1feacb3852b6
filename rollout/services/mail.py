"""Mail: an inbox whose later messages may move a meeting, and what was sent.

Trap: `get_notice` tells the slot of a meeting after the last mail about it; the first mail alone is out of date.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rollout.services.base import (
    TEXT_MAX,
    Args,
    IdArgs,
    NoArgs,
    Service,
    State,
    TextArgs,
    ToolError,
    check_links,
    pick,
    read,
    swap,
    write,
)
from rollout.types import Record


class Message(Record):
    id: int
    sender: str = ""
    subject: str = ""
    body: str = ""
    meeting: int | None = None
    """Slot under which the meeting was first announced."""
    slot: int | None = None
    """Slot that this message gives the meeting."""
    reply_to: int | None = None
    seen: bool = False


class Sent(Record):
    kind: Literal["ticket", "contact", "mail"]
    id: int = 0
    """Ticket or contact number; 0 for a free mail."""
    to: str = ""
    subject: str = ""
    body: str = ""


class MailState(State):
    messages: tuple[Message, ...] = ()
    """Oldest first."""
    tickets: tuple[int, ...] = ()
    """Tickets with a mail thread."""
    contacts: tuple[int, ...] = ()
    """Contacts with an address."""
    sent: tuple[Sent, ...] = ()

    @model_validator(mode="after")
    def _links(self) -> MailState:
        check_links(self.messages, "reply_to")
        return self


class SendArgs(Args):
    to: str = Field(min_length=3, max_length=200)
    subject: str = Field(max_length=200)
    body: str = Field(max_length=TEXT_MAX)


Change = tuple[MailState, Any]
DONE = {"ok": True}


def get_notice(state: MailState, args: IdArgs) -> Any:
    slots = [m.slot for m in state.messages if m.meeting == args.id and m.slot is not None]
    if not slots:
        raise ToolError(404, "unknown_id", f"no meeting {args.id}")
    return {"id": args.id, "now": slots[-1]}


def list_mails(state: MailState, args: NoArgs) -> Any:
    return [{"id": m.id, "subject": m.subject, "seen": m.seen} for m in state.messages]


def read_mail(state: MailState, args: IdArgs) -> Any:
    return pick(state.messages, args.id, "mail").model_dump(mode="json")


def find_mails(state: MailState, args: TextArgs) -> Any:
    wanted = args.text.casefold()
    return [m.id for m in state.messages if wanted in f"{m.sender}\n{m.subject}\n{m.body}".casefold()]


def _send(state: MailState, sent: Sent) -> Change:
    return state.model_copy(update={"sent": (*state.sent, sent)}), DONE


def reply_ticket(state: MailState, args: IdArgs) -> Change:
    if args.id not in state.tickets:
        raise ToolError(404, "unknown_id", f"no ticket {args.id}")
    return _send(state, Sent(kind="ticket", id=args.id))


def mail_contact(state: MailState, args: IdArgs) -> Change:
    if args.id not in state.contacts:
        raise ToolError(404, "unknown_id", f"no contact {args.id}")
    return _send(state, Sent(kind="contact", id=args.id))


def send_mail(state: MailState, args: SendArgs) -> Change:
    return _send(state, Sent(kind="mail", to=args.to, subject=args.subject, body=args.body))


def mark_seen(state: MailState, args: IdArgs) -> Change:
    message = pick(state.messages, args.id, "mail").model_copy(update={"seen": True})
    return state.model_copy(update={"messages": swap(state.messages, message)}), DONE


def delete_mail(state: MailState, args: IdArgs) -> Change:
    pick(state.messages, args.id, "mail")
    if any(m.reply_to == args.id for m in state.messages):
        raise ToolError(409, "conflict", f"mail {args.id} has replies")
    rest = tuple(m for m in state.messages if m.id != args.id)
    return state.model_copy(update={"messages": rest}), DONE


MAIL = Service(
    "mail",
    MailState,
    (
        read("get_notice", "Look up meeting slot", IdArgs, get_notice),
        read("list_mails", "List mails", NoArgs, list_mails),
        read("read_mail", "Read whole mail", IdArgs, read_mail),
        read("find_mails", "Find mails by text", TextArgs, find_mails),
        write("reply_ticket", "Reply to ticket", IdArgs, reply_ticket),
        write("mail_contact", "Mail contact", IdArgs, mail_contact),
        write("send_mail", "Send mail", SendArgs, send_mail),
        write("mark_seen", "Mark mail as seen", IdArgs, mark_seen),
        write("delete_mail", "Delete mail", IdArgs, delete_mail),
    ),
)
