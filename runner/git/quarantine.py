"""A bundle that an agent made, judged where nothing else can see it.

Its objects are in a directory of their own, beside those of the private repository that they build on, until the
caller has judged what they change and takes them over. An agent's bundle is as hostile as a server: git checks the
objects, has limits of memory and bytes, and what it says of itself is compared with what is there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from runner.core.errors import HostileTree, RemoteOverLimit
from runner.core.ids import is_commit_id
from runner.git.binary import Binary, _check
from runner.git.common import in_thread
from runner.git.tree import GITLINK, LINK, changes, check_names, shown
from runner.ports.git import Authored, Change, Entry

COMMITS = 500
TARGET = 4096  # bytes of a link's
_MEMORY = 4 << 30
_LISTING = 64 << 20  # bytes that git may say of a tree, which can name itself many times
_PACK = 512 << 20
_HEADER = re.compile(
    rb"# v(?:2|3) git bundle\n(?:@object-format=(?:sha1|sha256)\n)?(?:-[0-9a-f]{40,64} [^\n]*\n)*"
    rb"([0-9a-f]{40,64}) HEAD\n\n"
)


async def unpack(program: str, repository: Path, bundle: bytes, base: str, into: Path) -> list[Authored]:
    """See ``Git.quarantine``."""
    header = _HEADER.match(bundle)
    if header is None or not is_commit_id(tip := header[1].decode()):
        raise HostileTree("the bundle does not hold HEAD and nothing else")
    await in_thread(_make, into, repository)
    packing = Binary(program, objects=into, limits=(_MEMORY, _PACK))
    pack = bundle[header.end() :]
    ended = await packing.on(repository, "index-pack", "--stdin", "--fix-thin", "--strict", stdin=pack)
    if ended.code:
        raise HostileTree(f"git refuses the objects of the bundle: {ended.words}")
    reading = Binary(program, objects=into, limits=(_MEMORY, _LISTING))
    _check("rev-list", await reading.on(repository, "rev-list", "--objects", "--quiet", tip, f"^{base}"))
    walk = ("rev-list", "--topo-order", "--reverse", "--parents", f"--max-count={COMMITS + 1}")
    listed = _check("rev-list", await reading.on(repository, *walk, tip, f"^{base}"))
    below = await reading.on(repository, "rev-list", "--ancestry-path", f"--max-count={COMMITS + 1}", tip, f"^{base}")
    family = [line.decode().split() for line in listed.stdout.splitlines()]
    if len(family) > COMMITS:
        raise RemoteOverLimit(f"the agent made more than {COMMITS} commits")
    if {ids[0] for ids in family} != set(_check("rev-list", below).stdout.decode().split()):
        raise HostileTree(f"not all of the commits are built on {base[:12]}")
    return await _authored(reading, repository, family)


async def accept(program: str, repository: Path, quarantine: Path, base: str, tip: str, *, to: Path) -> None:
    """See ``Git.accept``."""
    await in_thread(_take_over, quarantine / "pack", repository / "objects" / "pack")
    version = b"# v2 git bundle\n" if len(tip) == 40 else b"# v3 git bundle\n@object-format=sha256\n"
    part = quarantine / "bundle"
    with part.open("xb") as file:
        file.write(b"%s-%s \n%s HEAD\n\n" % (version, base.encode(), tip.encode()))
        file.flush()
        words = ("pack-objects", "--stdout", "--revs", "--thin", "--delta-base-offset", "--quiet")
        _check(words[0], await Binary(program).on(repository, *words, stdin=f"{tip}\n^{base}\n".encode(), stdout=file))
    await in_thread(part.replace, to)


def _make(into: Path, repository: Path) -> None:
    (into / "info").mkdir(parents=True)
    (into / "info" / "alternates").write_text(f"{(repository / 'objects').absolute()}\n")


def _take_over(packs: Path, into: Path) -> None:
    """The index comes last: a pack without one is nothing."""
    into.mkdir(exist_ok=True)
    for path in sorted(packs.iterdir(), key=lambda path: path.suffix == ".idx"):
        path.replace(into / path.name)


async def _authored(git: Binary, repository: Path, family: Sequence[Sequence[str]]) -> list[Authored]:
    """What each commit has that none of its parents has; ``family`` names them after each commit, oldest first."""
    last = {parent: number for number, (_, *parents) in enumerate(family) for parent in parents}
    known: dict[str, list[Entry]] = {}
    found = []
    for number, (commit, *parents) in enumerate(family):
        for parent in parents:
            known[parent] = known.get(parent) or await git.leaves(repository, parent)
        mine = known[commit] = await git.leaves(repository, commit)
        await in_thread(check_names, mine)
        first, *others = [await in_thread(changes, known[parent], mine) for parent in parents]
        paths = [{change.path for change in other} for other in others]
        own = [change for change in first if all(change.path in those for those in paths)]
        found.append(Authored(commit, tuple(own), await _targets(git, repository, own)))
        known = {each: leaves for each, leaves in known.items() if last.get(each, -1) > number}
    return found


async def _targets(git: Binary, repository: Path, own: Sequence[Change]) -> tuple[tuple[bytes, bytes], ...]:
    new = [change.entry for change in own if change.entry is not None]
    for leaf in new:
        if leaf.mode == GITLINK or (leaf.mode == LINK and leaf.size > TARGET):
            what = "a submodule" if leaf.mode == GITLINK else f"a link of {leaf.size} bytes"
            raise HostileTree(f"`{shown(leaf.path)}` is {what}")
    links = [leaf for leaf in new if leaf.mode == LINK]
    if not links:
        return ()
    targets = await git.blobs(repository, [leaf.id for leaf in links])
    return tuple((leaf.path, target) for leaf, target in zip(links, targets, strict=True))
