"""Directories of an open sandbox that are mirrored here: its guest lists them, and packs the files that have changed.

The listing is the word of whoever runs in the sandbox. It decides only what is asked for: what comes is checked as any
archive is, names by names, and what is no longer listed is looked for here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import trio

from runner.core.errors import ProviderFailed, WorkspaceLost
from runner.core.nurseries import open_services, unwrapping_groups
from runner.guest.client import Guest
from runner.guest.framing import KEEP, Request
from runner.sandbox.container import GUEST
from runner.sandbox.tar_trees import HEAD, MAX_ENTRIES, Packed, blocks, names_below, read_packed, remove_all_but

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS = 900.0  # for the files of a workspace
SILENCE = 30.0  # seconds, after which a daemon has hung
_LISTED = 256 << 20  # bytes of a listing
_DIRECTORY = "4"  # the beginning of its stamp, a mode
_MUCH = 4 << 20  # bytes that are worth a connection of their own
_CHUNKS = 64  # that wait to be written

Stamps = Mapping[str, str]


@runtime_checkable
class FilesProgram(Protocol):
    """The guest's program where no guest runs any more."""

    async def run_files(self, words: Sequence[str], stdin: bytes, receive: Callable[[bytes], Awaitable[None]]) -> None:
        """Run it with words of files.h. Raises ``ProviderFailed``, ``WorkspaceLost``."""


class GuestFiles:
    """``roots`` maps directories of the sandbox to those of this host; ``skipped`` paths of the first are left alone.

    ``most`` is for the bytes that are fetched at a time.
    """

    def __init__(self, roots: Mapping[str, Path], skipped: Sequence[str], most: int) -> None:
        self._roots = roots
        self._skipped = [f"-{path}" for path in skipped]
        self._most = most
        self.guest: Guest | None = None
        self.program: FilesProgram | None = None  # in the guest's place
        self.packer: FilesProgram | None = None  # beside the guest, for much at a time
        self._known: dict[str, Stamps] = {root: {} for root in roots}

    async def begin(self, guest: Guest) -> None:
        """Take the directories to be the same here and there, at this moment."""
        self.guest = guest
        with suppress(ProviderFailed, WorkspaceLost), unwrapping_groups():
            self._known.update(await self._list([*self._roots]))

    def begin_behind(self) -> None:
        """Take everything here to be older than what is there. Blocking."""
        self._known = {root: dict.fromkeys(names_below(here), "") for root, here in self._roots.items()}

    async def fetch(self, roots: Sequence[str]) -> bool:
        """Make directories here like those of the sandbox; tell whether that could be done."""
        with trio.move_on_after(SECONDS), suppress(ProviderFailed, WorkspaceLost, OSError), unwrapping_groups():
            for root, found in (await self._list(roots)).items():
                known, self._known[root] = self._known[root], {}
                await self._fetch(root, known, found)
                self._known[root] = found
            return True
        return False

    async def measure(self, roots: Sequence[str]) -> int:
        """Return the bytes that directories of the sandbox take. Raises ``ProviderFailed``, ``WorkspaceLost``."""
        with unwrapping_groups():
            found = await self._list(roots)
        return await trio.to_thread.run_sync(lambda: sum(map(_bytes_of, found.values())))

    @property
    def _there(self) -> Guest | FilesProgram:
        found = self.program or self.guest
        assert found is not None
        return found

    async def _list(self, roots: Sequence[str]) -> dict[str, Stamps]:
        return await list_files(self._there, roots, self._skipped if roots[0] == next(iter(self._roots)) else ())

    async def _fetch(self, root: str, known: Stamps, found: Stamps) -> None:
        to = self._roots[root]
        changed = sorted(name for name, stamp in found.items() if known.get(name) != stamp)
        if changed:
            much = self.packer is not None and _bytes_of({name: found[name] for name in changed}) >= _MUCH
            there = self.packer if self.packer is not None and much else self._there
            await fetch_files(there, root, changed, found, to=to, most=self._most)
        if known.keys() - found.keys():
            await trio.to_thread.run_sync(remove_all_but, to, found.keys())


async def list_files(
    guest: Guest | FilesProgram, roots: Sequence[str], skipped: Sequence[str] = ()
) -> dict[str, Stamps]:
    """List directories of the sandbox. Raises ``ProviderFailed``, ``WorkspaceLost``."""
    text = bytearray()

    async def receive(chunk: bytes) -> None:
        text.extend(chunk)
        if len(text) > _LISTED:
            raise ProviderFailed("a workspace holds too many files and directories to be listed")

    await _run(guest, ["list", *skipped, *roots], b"", receive)
    found = await trio.to_thread.run_sync(_parse, text)
    if len(found) != len(roots):
        raise ProviderFailed("the files of a workspace are missing")
    return dict(zip(roots, found, strict=True))


async def fetch_files(
    guest: Guest | FilesProgram, root: str, changed: Sequence[str], found: Stamps, *, to: Path, most: int
) -> set[str]:
    """Fetch files of a directory that was ``found`` so, with the directories above them; return what has come.

    Raises as ``read_tar``.
    """
    names, links = _wanted(changed, found)
    send, received = trio.open_memory_channel[bytes](_CHUNKS)
    async with open_services() as nursery:
        nursery.start_soon(_pack, guest, root, names, send)
        pulled = _Pulled(received)
        return await trio.to_thread.run_sync(lambda: read_packed(pulled.entries(), to, most=most, links=links))


async def remove_files(guest: Guest, root: str, names: Sequence[str]) -> None:
    """Remove files of a directory, each after those below it. Directories that have others stay."""
    await _run(guest, ["remove", root], _words(names), _ignore)


async def _ignore(_: bytes) -> None:
    await trio.lowlevel.checkpoint()


def _words(names: Sequence[str]) -> bytes:
    return "".join(f"{name}\0" for name in names).encode(errors="surrogateescape")


async def _pack(
    guest: Guest | FilesProgram, root: str, names: Sequence[str], send: trio.MemorySendChannel[bytes]
) -> None:
    async with send:
        with suppress(trio.BrokenResourceError):  # who reads has refused something, and says so
            await _run(guest, ["pack", root], _words(names), send.send)


async def _run(
    guest: Guest | FilesProgram, words: Sequence[str], stdin: bytes, receive: Callable[[bytes], Awaitable[None]]
) -> None:
    if isinstance(guest, FilesProgram):
        await guest.run_files(words, stdin, receive)
        return
    request = Request(argv=[GUEST, *words], env={}, cwd="/", uid=KEEP, gid=KEEP)
    async with guest.exec(request, grace=0) as command, open_services() as nursery:

        async def feed() -> None:
            with suppress(trio.BrokenResourceError):
                await command.stdin.send_all(stdin)
            await command.stdin.aclose()

        nursery.start_soon(feed)
        while chunk := await _heard(command.stdout.receive_some):
            await receive(chunk)
        if not (await command.wait()).ok:
            raise ProviderFailed("the files of a workspace cannot be read")


async def _heard(receive_some: Callable[[int], Awaitable[bytes]]) -> bytes:
    with trio.move_on_after(SILENCE):
        return await receive_some(1 << 16)
    raise WorkspaceLost(f"the guest has said nothing of its files for {SILENCE:.0f}s")


class _Pulled:
    """Entries out of a stream of chunks, for a thread."""

    def __init__(self, chunks: trio.MemoryReceiveChannel[bytes]) -> None:
        self._chunks = chunks
        self._held = bytearray()

    def entries(self) -> Iterator[Packed]:
        while head := self._read(HEAD.size):
            if len(head) < HEAD.size:
                raise ProviderFailed("the files of a workspace end too early")
            size, seconds, mode, name, target = HEAD.unpack(head)
            words = self._read(name + target)
            texts = [word.decode(errors="surrogateescape") for word in (words[:name], words[name:])]
            yield Packed(name=texts[0], target=texts[1], mode=mode, seconds=seconds, size=size, read=self._read)

    def _read(self, size: int) -> bytes:
        while len(self._held) < size:
            try:
                self._held += trio.from_thread.run(self._take)
            except trio.EndOfChannel:
                break
        found = bytes(memoryview(self._held)[:size])
        del self._held[:size]
        return found

    async def _take(self) -> bytes:
        parts = [await self._chunks.receive()]
        with suppress(trio.WouldBlock, trio.EndOfChannel):
            while True:
                parts.append(self._chunks.receive_nowait())
        return b"".join(parts)


def _parse(text: bytearray) -> list[Stamps]:
    if text.count(b"\0") > MAX_ENTRIES:
        raise ProviderFailed(f"a workspace holds more than {MAX_ENTRIES:,} files and directories")
    found: list[dict[str, str]] = [{}]
    for record in text.decode(errors="surrogateescape").split("\0")[:-1]:
        if record:
            stamp, _, name = record.partition(" ")
            found[-1][name] = stamp
        else:
            found.append({})
    return [*found[:-1]]


def _bytes_of(found: Stamps) -> int:
    """Add up what stamps tell of sizes; files with several names have one stamp."""
    sizes = (stamp.split(",")[2:3] for stamp in {*found.values()})
    try:
        return sum(blocks(int(size[0], 16)) for size in sizes if size)
    except ValueError as error:
        raise ProviderFailed(f"the files of a workspace cannot be measured: {error}") from error


def _wanted(changed: Sequence[str], found: Stamps) -> tuple[list[str], dict[str, str]]:
    """Choose what to ask for: one name of each file, with the directories above; the others are links to it."""
    first: dict[str, str] = {}
    links = {}
    names = set()
    for name in changed:
        stamp = found[name]
        if stamp.startswith(_DIRECTORY) or first.setdefault(stamp, name) == name:
            names.add(name)
        else:
            links[name] = first[stamp]
        above = name
        while above := above.rpartition("/")[0]:
            if above in names:
                break
            names.add(above)
    return sorted(names), links
