"""Content-addressed blobs: screenshots, large arrays; read alike: request and response bytes, which calls.db holds.

A blob's name is the sha256 of its bytes; it is stored zstd-compressed under `<root>/ab/<digest>.zst` and never
changes. `root` is anything fsspec can open, a directory or a bucket.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import fsspec
import zstandard


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Blobs:
    def __init__(self, root: str | Path, beside: Callable[[str], bytes | None] | None = None) -> None:
        """`beside` finds bytes that are kept elsewhere (those of recorded calls); None for an unknown digest."""
        self._beside = beside
        self._fs, self._root = fsspec.core.url_to_fs(str(root))
        self._known: set[str] = set()
        self._lock = threading.Lock()  # guards _known only

    def _path(self, digest: str) -> str:
        return f"{self._root}/{digest[:2]}/{digest}.zst"

    def put(self, data: bytes) -> str:
        """Stores `data` once and returns its digest. Raises OSError when the disk refuses."""
        digest = digest_of(data)
        with self._lock:
            if digest in self._known:
                return digest
        path = self._path(digest)
        if not self._fs.exists(path):
            self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            part = f"{path}.{os.getpid()}.{threading.get_ident()}.part"
            with self._fs.open(part, "wb") as file:
                file.write(zstandard.compress(data, 3))
            self._fs.mv(part, path)
        with self._lock:
            self._known.add(digest)
        return digest

    def get(self, digest: str) -> bytes:
        """Raises FileNotFoundError for an unknown digest, ValueError for a damaged blob."""
        data = self._find(digest)
        if digest_of(data) != digest:
            raise ValueError(f"blob {digest} is damaged: its bytes hash to {digest_of(data)}")
        return data

    def _find(self, digest: str) -> bytes:
        try:
            with self._fs.open(self._path(digest), "rb") as file:
                return zstandard.decompress(file.read())
        except FileNotFoundError:
            found = self._beside(digest) if self._beside else None
            if found is None:
                raise
            return found

    def size(self, digest: str) -> int:
        """Bytes of its file; 0 where there is none."""
        path = self._path(digest)
        return int(self._fs.size(path) or 0) if self._fs.exists(path) else 0

    def remove(self, digest: str) -> None:
        """Removes a blob that nothing names any more; only while no other process puts any."""
        with self._lock:
            self._known.discard(digest)
        if self._fs.exists(path := self._path(digest)):
            self._fs.rm(path)
