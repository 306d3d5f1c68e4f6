"""Artifacts in a folder, such as a mounted share that all hosts have.

The folder has to be there: a share that is not mounted is not made anew on the disk below it.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

from runner.artifacts.stores import FORM, check_options
from runner.core.errors import (
    ArtifactsDamaged,
    ArtifactsMissing,
    ArtifactsRefused,
    ArtifactsUnreachable,
    BadArtifactsUrl,
    RunnerError,
)
from runner.core.sanitize import excerpt
from runner.ports.artifacts import MAX_OBJECT, ArtifactStore, StoredObject, is_name
from runner.safefs.safe_open import read_beneath

_PASSES = {errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT, errno.EIO, errno.EHOSTDOWN, errno.ENOTCONN}
_STRANGE = {errno.EFBIG, errno.EINVAL, errno.ELOOP, errno.ENOTDIR, errno.EISDIR}  # what is there is no object


def open_store(host: str, path: str, options: Mapping[str, str]) -> ArtifactStore:
    check_options(options, {})
    folder = unquote(path)
    if host or not folder.startswith("/") or not folder.strip("/") or "\0" in folder:
        raise BadArtifactsUrl("`RUNNER_ARTIFACTS` does not name a folder of this host", hint=FORM)
    return FolderStore(Path(folder))


class FolderStore:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.url = f"file://{folder}"

    def put(self, name: str, content: bytes) -> None:
        assert is_name(name), name
        path = self._folder / name
        part = path.with_name(f".part-{secrets.token_hex(8)}")  # a name that no object has
        try:
            self._require_folder()
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                part.replace(path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise self._fault(error) from error

    def get(self, name: str) -> bytes:
        assert is_name(name), name
        try:
            self._require_folder()
            return read_beneath(self._folder, name, MAX_OBJECT)
        except FileNotFoundError as error:
            raise ArtifactsMissing(f"`{name}` is not in {self.url}") from error
        except OSError as error:
            raise self._fault(error, name) from error

    def list(self, prefix: str, after: str = "") -> Iterator[StoredObject]:
        try:
            self._require_folder()
            found = sorted(one for one in self._walk(prefix) if one.name > after)
        except OSError as error:
            raise self._fault(error) from error
        yield from found

    def folders(self, prefix: str) -> Iterator[str]:
        try:
            self._require_folder()
            with suppress(FileNotFoundError), os.scandir(self._folder / prefix) as entries:
                found = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False) and is_name(e.name))
                yield from found
        except OSError as error:
            raise self._fault(error) from error

    def remove(self, names: Iterable[str]) -> None:
        try:
            self._require_folder()
            for name in names:
                path = self._folder / name
                path.unlink(missing_ok=True)
                with suppress(OSError):  # up to a folder that is not empty
                    for above in path.relative_to(self._folder).parents[:-1]:
                        (self._folder / above).rmdir()
        except OSError as error:
            raise self._fault(error) from error

    def check(self) -> None:
        name = f"check/{secrets.token_hex(8)}"
        self.put(name, b"runner")
        try:
            if self.get(name) != b"runner":
                raise ArtifactsDamaged(f"{self.url} returns another content than was written")
        finally:
            self.remove([name])

    def _require_folder(self) -> None:
        if not self._folder.is_dir():
            hint = f"mount it, or make it: mkdir -m 700 {self._folder}"
            raise ArtifactsRefused(f"{self.url} is not there", hint=hint)

    def _walk(self, prefix: str) -> Iterator[StoredObject]:
        with suppress(FileNotFoundError), os.scandir(self._folder / prefix) as entries:
            for entry in entries:
                name = f"{prefix}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    yield from self._walk(f"{name}/")
                elif entry.is_file(follow_symlinks=False) and is_name(name):
                    yield StoredObject(name, entry.stat(follow_symlinks=False).st_size)

    def _fault(self, error: OSError, name: str = "") -> RunnerError:
        if name and error.errno in _STRANGE:
            return ArtifactsDamaged(f"`{name}` of {self.url} is no object: {error.strerror}")
        what = f"{self.url}: {excerpt(error.strerror or str(error))}"
        if error.errno in _PASSES:
            return ArtifactsUnreachable(what, hint="look at the mount")
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return ArtifactsRefused(what, hint="make room there" if full else "let this user write there")
