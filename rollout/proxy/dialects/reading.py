"""What the dialects read alike: content parts, pictures, arguments, limits. A refusal always names the field."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.proxy.dialects.base import Refused, Schema, dump_arguments, read_value
from rollout.proxy.messages import Image

_TEXT = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
"""Kind of a part that is text -> the field that holds it."""
_DATA_URL = re.compile(r"data:(image/[a-z0-9.+-]+);base64,", re.IGNORECASE)


@dataclass(frozen=True)
class Content:
    text: str = ""
    images: tuple[Image, ...] = ()


def read_content(value: Any, at: str) -> Content:
    """Text parts are joined by newlines, as vLLM does for templates that take a string; pictures leave placeholders."""
    if value is None:
        return Content()
    if isinstance(value, str):
        return Content(value)
    if not isinstance(value, list):
        raise bad(at, f"{at} must be text, a list of parts or null")
    parts = [read_part(part, f"{at}[{i}]") for i, part in enumerate(value)]
    return Content("\n".join(part.text for part in parts), tuple(i for part in parts for i in part.images))


def read_part(part: Any, at: str) -> Content:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in _TEXT and isinstance(part.get(_TEXT[kind]), str):
        return Content(part[_TEXT[kind]])
    if kind == "tool_reference" and isinstance(part.get("tool_name"), str):
        return Content(f"The tool {part['tool_name']} is available now.")
    if kind == "document" and isinstance(text := _text_of_document(part), str):
        return Content(text)
    if kind in ("image_url", "input_image", "image"):
        image = read_image(part, at)
        return Content(image.placeholder, (image,))
    raise bad(at, f"{at} of type {show(kind)} cannot be shown to this model; send text parts")


def _text_of_document(part: Mapping[str, Any]) -> Any:
    source = part.get("source")
    return source.get("data") if isinstance(source, dict) and source.get("type") == "text" else None


def read_image(part: Mapping[str, Any], at: str) -> Image:
    """A picture that the request itself carries; nothing is fetched for a client."""
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, dict) else url
    source = part.get("source")
    if isinstance(source, dict) and source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    found = _DATA_URL.match(url) if isinstance(url, str) else None
    if not isinstance(url, str) or found is None:
        raise bad(at, f"{at} must carry its picture as base64 data; it is not fetched from elsewhere")
    try:
        raw = base64.b64decode(url[found.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad(at, f"{at} holds no valid base64: {error}") from error
    return Image(found[1].lower(), hashlib.sha256(raw).hexdigest(), url, at)


# -- calls ---------------------------------------------------------------------------------------------


def read_arguments(value: Any) -> dict[str, Any] | None:
    """A call's arguments as an object; None when they are none."""
    if isinstance(value, str):
        try:
            value = read_value(value or "{}")
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def call_text(name: str, arguments: Any) -> str:
    """A call that cannot be rendered as one, as text without the control tokens of a call."""
    shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": "{name}", "arguments": {shown}}}'


def free_text(arguments: Mapping[str, Any]) -> str:
    """What a call of a custom tool says: its `input`, or else all that the model gave."""
    text = arguments.get("input")
    return text if isinstance(text, str) and len(arguments) == 1 else dump_arguments(arguments)


def joined(*texts: str) -> str:
    return "\n".join(text for text in texts if text)


# -- fields --------------------------------------------------------------------------------------------


def refuse_unless_neutral(data: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises Refused for a field that changes what an answer means; `neutral` lists the values that do not."""
    for name, values in neutral.items():
        if data.get(name) is not None and data[name] not in values:
            raise bad(name, f"{name}={show(data[name])} cannot be honoured here; leave it out")


def read_schema(value: Any, name: str) -> Schema | None:
    """Reads {type: text | json_object | json_schema, ...}; the schema stands beside the type or under `json_schema`."""
    if value is None or value == {"type": "text"}:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    inner = value.get("json_schema", value) if isinstance(value, dict) else {}
    schema = {"type": "object"} if kind == "json_object" else inner.get("schema") if isinstance(inner, dict) else None
    if kind not in ("json_object", "json_schema") or not isinstance(schema, dict):
        raise bad(name, f"{name}={show(value)} cannot be honoured here; use text, json_object or json_schema")
    return Schema(schema, name)


def least(data: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """The smallest of the limits given. Raises Refused for what is no whole number of at least 1."""
    limits = []
    for name in names:
        value = data.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise bad(name, f"{name}={show(value)} must be a whole number of at least 1")
        limits.append(value)
    return min(limits, default=None)


def flag(data: Mapping[str, Any], name: str) -> bool:
    value = data.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad(name, f"{name} must be true or false")
    return bool(value)


def an_object(value: Any, at: str) -> dict[str, Any]:
    """`value`, or an empty object for null."""
    if value is not None and not isinstance(value, dict):
        raise bad(at, f"{at} must be an object")
    return value or {}


def a_list(value: Any, at: str) -> Sequence[Any]:
    """`value`, or an empty list for null."""
    if value is not None and not isinstance(value, list):
        raise bad(at, f"{at} must be a list")
    return value or []


def text_of(row: Mapping[str, Any], name: str, at: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise bad(f"{at}.{name}", f"{at}.{name} must be text")
    return value


def bad(name: str, message: str) -> Refused:
    return Refused(400, "unsupported_value", message, name)


def show(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True)[:80]
