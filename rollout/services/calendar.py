"""Calendar: slots that can be confirmed or cancelled, and rooms that may have been replaced.

Trap: `get_room` tells which room is in force `now`; a stale slot can still be confirmed.
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
    check_links,
    in_force,
    next_id,
    pick,
    read,
    swap,
    write,
)
from rollout.types import Record


class Slot(Record):
    id: int
    title: str = ""
    minutes: int = 30


class Room(Record):
    id: int
    name: str = ""
    replaced_by: int | None = None


class CalendarState(State):
    slots: tuple[Slot, ...] = ()
    rooms: tuple[Room, ...] = ()
    confirmed: tuple[int, ...] = ()
    """Slot of each confirmation sent, oldest first."""
    cancelled: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _links(self) -> CalendarState:
        check_links(self.rooms, "replaced_by")
        if len({s.id for s in self.slots}) != len(self.slots):
            raise ValueError("a slot's id occurs twice")
        return self


class CreateArgs(Args):
    title: str = Field(min_length=1, max_length=200)
    minutes: int = Field(ge=1, le=1440)


class RenameArgs(Args):
    id: int = Field(ge=0, le=ID_MAX)
    title: str = Field(min_length=1, max_length=200)


Change = tuple[CalendarState, Any]
DONE = {"ok": True}


def get_room(state: CalendarState, args: IdArgs) -> Any:
    pick(state.rooms, args.id, "room")
    return {"id": args.id, "now": in_force({r.id: r.replaced_by for r in state.rooms}, args.id)}


def list_rooms(state: CalendarState, args: NoArgs) -> Any:
    return [{"id": r.id, "name": r.name} for r in state.rooms]


def list_slots(state: CalendarState, args: NoArgs) -> Any:
    return [{"id": s.id, "title": s.title} for s in state.slots]


def read_slot(state: CalendarState, args: IdArgs) -> Any:
    slot = pick(state.slots, args.id, "slot")
    marks = {"confirmed": slot.id in state.confirmed, "cancelled": slot.id in state.cancelled}
    return {**slot.model_dump(mode="json"), **marks}


def find_slots(state: CalendarState, args: TextArgs) -> Any:
    return [s.id for s in state.slots if args.text.casefold() in s.title.casefold()]


def confirm_slot(state: CalendarState, args: IdArgs) -> Change:
    pick(state.slots, args.id, "slot")
    return state.model_copy(update={"confirmed": (*state.confirmed, args.id)}), DONE


def cancel_slot(state: CalendarState, args: IdArgs) -> Change:
    pick(state.slots, args.id, "slot")
    return state.model_copy(update={"cancelled": (*state.cancelled, args.id)}), DONE


def create_slot(state: CalendarState, args: CreateArgs) -> Change:
    slot = Slot(id=next_id(state.slots), title=args.title, minutes=args.minutes)
    return state.model_copy(update={"slots": (*state.slots, slot)}), {"id": slot.id}


def rename_slot(state: CalendarState, args: RenameArgs) -> Change:
    slot = pick(state.slots, args.id, "slot").model_copy(update={"title": args.title})
    return state.model_copy(update={"slots": swap(state.slots, slot)}), DONE


CALENDAR = Service(
    "calendar",
    CalendarState,
    (
        read("get_room", "Look up room", IdArgs, get_room),
        read("list_rooms", "List rooms", NoArgs, list_rooms),
        read("list_slots", "List slots", NoArgs, list_slots),
        read("read_slot", "Read whole slot", IdArgs, read_slot),
        read("find_slots", "Find slots by title", TextArgs, find_slots),
        write("confirm_slot", "Confirm slot", IdArgs, confirm_slot),
        write("cancel_slot", "Cancel slot", IdArgs, cancel_slot),
        write("create_slot", "Create slot", CreateArgs, create_slot),
        write("rename_slot", "Rename slot", RenameArgs, rename_slot),
    ),
)
