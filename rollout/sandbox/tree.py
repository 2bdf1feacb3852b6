"""A sandbox's directories seen from the host: written, packed and removed without ever following a link.

What an agent left behind is hostile input. Every component is opened with O_NOFOLLOW from a directory
descriptor; a packed tree holds regular files, folders and links that stay inside the packed paths. A link that
leads out is left out: in the verifier's sandbox it could name the expected answer.
"""

from __future__ import annotations

import io
import os
import posixpath
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rollout.errors import SandboxError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
MAX_DEPTH = 100
REMOVE_S = 60.0
FILE_MODE, RUN_MODE = 0o644, 0o755


@dataclass(frozen=True)
class Roots:
    """Writable directories of one sandbox: place inside, e.g. `/workspace` -> host folder."""

    folders: Mapping[str, Path]

    def split(self, path: str) -> tuple[str, str]:
        """`/workspace/a/b` -> (`/workspace`, `a/b`). Raises SandboxError outside the writable directories."""
        clean = posixpath.normpath(path)
        for root in self.folders:
            if clean == root or clean.startswith(root + "/"):
                if ".." in path.split("/"):
                    break
                return root, clean[len(root) + 1 :]
        raise SandboxError(f"{path} is outside of {', '.join(self.folders)}")


@contextmanager
def _folder(root: Path, parts: Sequence[str], *, make: bool) -> Iterator[int]:
    """A descriptor of `root`/parts, no component a link. Raises OSError."""
    fd = os.open(root, _FOLDER)
    try:
        for part in parts:
            if make:
                with suppress(FileExistsError):  # a link or file in its place fails in the next line
                    os.mkdir(part, 0o755, dir_fd=fd)
            inner = os.open(part, _FOLDER, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def write(roots: Roots, path: str, data: bytes, *, executable: bool = False) -> None:
    """Writes one file, with its folders. Raises SandboxError outside the writable directories, OSError."""
    root, inner = roots.split(path)
    *parents, name = inner.split("/")
    if not name:
        raise SandboxError(f"{path} is a folder, not a file")
    with _folder(roots.folders[root], parents, make=True) as folder:
        mode = RUN_MODE if executable else FILE_MODE
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode, dir_fd=folder)
        with os.fdopen(fd, "wb") as file:
            file.write(data)


# -- packing -------------------------------------------------------------------------------------------


class _Packer:
    def __init__(self, tar: tarfile.TarFile, paths: Sequence[str], max_bytes: int) -> None:
        self._tar = tar
        self._paths = tuple(posixpath.normpath(p) for p in paths)
        self._left = max_bytes

    def children(self, folder: int, path: str, depth: int) -> None:
        for name in sorted(os.listdir(folder)):
            try:
                self.entry(folder, name, f"{path}/{name}", depth)
            except PermissionError:
                continue  # made unreadable by the agent: as good as not there

    def entry(self, folder: int, name: str, path: str, depth: int) -> None:
        """One directory entry, whatever it is; what is neither file, folder nor inner link is left out."""
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        member = tarfile.TarInfo(path)
        member.mtime = int(info.st_mtime)
        member.mode = RUN_MODE if info.st_mode & stat.S_IXUSR else FILE_MODE
        if stat.S_ISDIR(info.st_mode) and depth < MAX_DEPTH:
            member.type, member.mode = tarfile.DIRTYPE, RUN_MODE
            self._tar.addfile(member)
            with _opened(name, _FOLDER, folder) as inner:
                self.children(inner, path, depth + 1)
        elif stat.S_ISLNK(info.st_mode):
            target = os.readlink(name, dir_fd=folder)
            if stays_inside(path, target, self._paths):
                member.type, member.linkname = tarfile.SYMTYPE, target
                self._tar.addfile(member)
        elif stat.S_ISREG(info.st_mode) and info.st_size <= self._left:
            self._file(folder, name, member)

    def _file(self, folder: int, name: str, member: tarfile.TarInfo) -> None:
        with _opened(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, folder) as fd:
            with os.fdopen(os.dup(fd), "rb") as file:
                data = file.read(self._left)
        member.size = len(data)
        self._left -= len(data)
        self._tar.addfile(member, io.BytesIO(data))


@contextmanager
def _opened(name: str, flags: int, folder: int) -> Iterator[int]:
    fd = os.open(name, flags, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)


def stays_inside(path: str, target: str, roots: Sequence[str]) -> bool:
    """Whether a link at `path` (in real folders) ends below `roots` whatever links lie on its way.

    Leading `..` climb real folders and are safe to count; a later one may climb out of a link's target.
    """
    parts = [p for p in target.split("/") if p not in ("", ".")]
    if target.startswith("/"):
        base = "/"
    else:
        base = posixpath.dirname(path)
        while parts and parts[0] == "..":
            base, parts = posixpath.dirname(base), parts[1:]
    if ".." in parts:
        return False
    end = posixpath.join(base, *parts)
    return any(end == root or end.startswith(root + "/") for root in roots)


def pack(roots: Roots, paths: Sequence[str], max_bytes: int) -> bytes:
    """A tar of what lies below `paths` (absolute, inside). Files beyond `max_bytes` in all are left out."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        packer = _Packer(tar, paths, max_bytes)
        for path in paths:
            root, inner = roots.split(path)
            clean = posixpath.normpath(path)
            *parents, name = inner.split("/")
            try:
                with _folder(roots.folders[root], parents, make=False) as fd:
                    if name:
                        packer.entry(fd, name, clean, 0)
                    else:
                        packer.children(fd, clean, 0)
            except OSError:
                continue  # the agent removed or replaced it: the verifier sees that it is missing
    return buffer.getvalue()


def unpack(roots: Roots, data: bytes) -> None:
    """Lays out what `pack` returned. Raises SandboxError for anything that leaves the writable directories."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            root, inner = roots.split(member.name)
            if member.isreg():
                source = tar.extractfile(member)
                content = source.read() if source else b""
                write(roots, member.name, content, executable=bool(member.mode & stat.S_IXUSR))
            elif member.isdir():
                with _folder(roots.folders[root], inner.split("/"), make=True):
                    pass
            elif member.issym():
                *parents, name = inner.split("/")
                with _folder(roots.folders[root], parents, make=True) as folder:
                    os.symlink(member.linkname, name, dir_fd=folder)


# -- removing ------------------------------------------------------------------------------------------


def remove(folder: Path) -> None:
    """Removes a tree with whatever an agent made of it: unreadable or very deep folders, odd names.

    Raises SandboxError when something is left.
    """
    try:
        shutil.rmtree(folder)
        return
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        pass  # an agent's tree; the tools below walk it without recursion and open it first
    subprocess.run(["chmod", "-R", "u+rwx", "--", str(folder)], capture_output=True, timeout=REMOVE_S)
    done = subprocess.run(["rm", "-rf", "--", str(folder)], capture_output=True, timeout=REMOVE_S)
    if folder.exists():
        raise SandboxError(f"{folder} could not be removed: {done.stderr.decode(errors='replace')[-500:]}")
