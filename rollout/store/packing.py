"""How recorded bytes are kept small: token ids, log-probabilities, and texts told as the change of an earlier one.

Pure and without loss: what is unpacked equals what was packed, bit for bit. Numbers are written little-endian and
plane by plane (all first bytes, then all second bytes, ...), because the high bytes of ids and exponents repeat.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import zstandard

WIDTH = 4
"""Bytes of a token id."""
LEVEL, LARGE_LEVEL, LARGE = 9, 3, 2**20
BLOCK = 2**16
BEFORE = 2**16
"""Bytes before the first difference that the compressor is shown as well."""
AROUND = 8 * 2**20
_SMALL_DICT = 8
"""A shorter dictionary is refused by zstd."""


def pack_ids(ids: Sequence[int]) -> bytes | None:
    """`WIDTH` bytes an id; None when an id does not fit."""
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error:
        return None


def unpack_ids(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // WIDTH}I", data)


def pack_floats(values: Sequence[float]) -> bytes:
    """4 bytes a value where float32 holds every one exactly (engines sample in it), else 8; then compressed."""
    kind, raw = "d", struct.pack(f"<{len(values)}d", *values)
    try:
        short = struct.pack(f"<{len(values)}f", *values)
    except OverflowError:
        short = b""
    if struct.pack(f"<{len(short) // 4}d", *struct.unpack(f"<{len(short) // 4}f", short)) == raw:
        kind, raw = "f", short
    return kind.encode() + shrink(_planes(raw, 4 if kind == "f" else 8))


def unpack_floats(data: bytes) -> tuple[float, ...]:
    kind, width = ("f", 4) if data[:1] == b"f" else ("d", 8)
    raw = _joined(expand(data[1:]), width)
    return struct.unpack(f"<{len(raw) // width}{kind}", raw)


def shrink_ids(data: bytes) -> bytes:
    return shrink(_planes(data, WIDTH))


def expand_ids(data: bytes) -> bytes:
    return _joined(expand(data), WIDTH)


def shrink(data: bytes, near: bytes = b"") -> bytes:
    """Compressed; `near` is a text that it may quote."""
    level = LARGE_LEVEL if len(data) + len(near) > LARGE else LEVEL
    if len(near) < _SMALL_DICT:
        return zstandard.compress(data, level)
    bits = max(18, min(27, (len(data) + len(near)).bit_length()))
    reach = max(17, min(22, bits - 2))
    settings = zstandard.ZstdCompressionParameters.from_level(
        level, window_log=bits, hash_log=reach, chain_log=reach, write_content_size=True
    )
    return zstandard.ZstdCompressor(dict_data=_raw(near), compression_params=settings).compress(data)


def expand(data: bytes, near: bytes = b"") -> bytes:
    """Inverse of `shrink` with the same `near`. Raises zstandard.ZstdError for damaged data."""
    if len(near) < _SMALL_DICT:
        return zstandard.decompress(data)
    return zstandard.ZstdDecompressor(dict_data=_raw(near), max_window_size=2**31).decompress(data)


def around(base: bytes, head: int, tail: int) -> bytes:
    """What of `base` stands where a text that shares its first `head` and last `tail` bytes differs from it."""
    start = max(0, head - BEFORE)
    return base[start : min(len(base) - tail, start + AROUND)]


def common_head(a: bytes, b: bytes) -> int:
    """Length of the longest common beginning."""
    size = min(len(a), len(b))
    at = 0
    while at < size and a[at : at + BLOCK] == b[at : at + BLOCK]:
        at += BLOCK
    low, high = min(at, size), min(at + BLOCK, size)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def common_tail(a: bytes, b: bytes, most: int) -> int:
    """Length of the longest common end, at most `most`."""
    at = 0
    while at < most and a[len(a) - at - BLOCK : len(a) - at] == b[len(b) - at - BLOCK : len(b) - at]:
        if at + BLOCK > most:
            break
        at += BLOCK
    low, high = at, min(at + BLOCK, most)
    while low < high:
        middle = (low + high + 1) // 2
        same = a[len(a) - middle : len(a) - low] == b[len(b) - middle : len(b) - low]
        low, high = (middle, high) if same else (low, middle - 1)
    return low


def _raw(data: bytes) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(data, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def _planes(data: bytes, width: int) -> bytes:
    return b"".join(data[at::width] for at in range(width))


def _joined(planes: bytes, width: int) -> bytes:
    out, size = bytearray(len(planes)), len(planes) // width
    for at in range(width):
        out[at::width] = planes[at * size : (at + 1) * size]
    return bytes(out)
