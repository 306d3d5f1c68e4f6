"""A quarantine for bundles of an agent's commits.

Their objects are in a directory of their own, beside those of the private repository that they build on, until the
caller has judged the changes and accepts them. An agent's bundle is as hostile as a server: git checks the objects
with limits of memory and bytes, and the bundle's header is compared with its content.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.core.errors import HostileTree, RemoteOverLimit
from runner.core.ids import is_commit_id
from runner.core.patterns import pattern
from runner.core.sanitize import printable_path
from runner.git._run import ProcessLimits
from runner.git.commands import GitCommands
from runner.git.common import in_thread
from runner.git.tree import GITLINK, LINK, changes, check_names
from runner.ports.git import AgentCommit, Change, TreeEntry

MAX_COMMITS = 500
MAX_LINK_BYTES = 4096  # bytes of a link's
_MEMORY = 4 << 30
_LISTING = 64 << 20  # bytes that git may print of a tree, which can name itself many times
_PACK = 512 << 20
_HEADER = pattern(
    rb"# v(?:2|3) git bundle\n(?:@object-format=(?:sha1|sha256)\n)?(?:-[0-9a-f]{40,64} [^\n]*\n)*"
    rb"([0-9a-f]{40,64}) HEAD\n\n"
)


async def unpack(program: str, repository: Path, bundle: bytes, base: str, into: Path) -> list[AgentCommit]:
    """See ``Git.quarantine``."""
    header = _HEADER.match(bundle)
    if header is None or not is_commit_id(tip := header[1].decode()):
        raise HostileTree("the bundle has another ref than HEAD, or none")
    await in_thread(_init_quarantine, into, repository)
    packing = GitCommands(program, objects=into, limits=ProcessLimits(_MEMORY, _PACK))
    pack = bundle[header.end() :]
    packed = await packing.run_git(repository, "index-pack", "--stdin", "--fix-thin", "--strict", stdin=pack)
    if packed.code:
        raise HostileTree(f"git refuses objects of the bundle: {packed.stderr}")
    reading = GitCommands(program, objects=into, limits=ProcessLimits(_MEMORY, _LISTING))
    new, most = (tip, f"^{base}"), f"--max-count={MAX_COMMITS + 1}"
    await reading.git(repository, "rev-list", "--objects", "--quiet", *new)
    listed = await reading.git(repository, "rev-list", "--topo-order", "--reverse", "--parents", most, *new)
    descendants = await reading.git(repository, "rev-list", "--ancestry-path", most, *new)
    family = [line.decode().split() for line in listed.stdout.splitlines()]
    if len(family) > MAX_COMMITS:
        raise RemoteOverLimit(f"the agent made more than {MAX_COMMITS} commits")
    if {ids[0] for ids in family} != set(descendants.stdout.decode().split()):
        raise HostileTree(f"not all of the commits are built on {base[:12]}")
    return await _agent_commits(reading, repository, family)


async def accept(program: str, repository: Path, quarantine: Path, base: str, tip: str, *, to: Path) -> None:
    """See ``Git.accept``."""
    await in_thread(_move_packs, quarantine / "pack", repository / "objects" / "pack")
    version = b"# v2 git bundle\n" if len(tip) == 40 else b"# v3 git bundle\n@object-format=sha256\n"
    part = quarantine / "bundle"
    with part.open("xb") as file:
        file.write(b"%s-%s \n%s HEAD\n\n" % (version, base.encode(), tip.encode()))
        file.flush()
        words = ("pack-objects", "--stdout", "--revs", "--thin", "--delta-base-offset", "--quiet")
        await GitCommands(program).git(repository, *words, stdin=f"{tip}\n^{base}\n".encode(), stdout=file)
    await in_thread(part.replace, to)


def _init_quarantine(into: Path, repository: Path) -> None:
    (into / "info").mkdir(parents=True)
    (into / "info" / "alternates").write_text(f"{(repository / 'objects').absolute()}\n")


def _move_packs(packs: Path, into: Path) -> None:
    """Move packs and their indexes, an index last: without one a pack has no effect."""
    into.mkdir(exist_ok=True)
    for path in sorted(packs.iterdir(), key=lambda path: path.suffix == ".idx"):
        path.replace(into / path.name)


async def _agent_commits(git: GitCommands, repository: Path, family: Sequence[Sequence[str]]) -> list[AgentCommit]:
    """List the changes of each commit from all of its parents, which ``family`` names after it; the oldest first."""
    last = {parent: number for number, (_, *parents) in enumerate(family) for parent in parents}
    known: dict[str, list[TreeEntry]] = {}
    found = []
    for number, (commit, *parents) in enumerate(family):
        for parent in parents:
            known[parent] = known.get(parent) or await git.tree_entries(repository, parent)
        mine = known[commit] = await git.tree_entries(repository, commit)
        await in_thread(check_names, mine)
        first, *others = [await in_thread(changes, known[parent], mine) for parent in parents]
        paths = [{change.path for change in other} for other in others]
        own = [change for change in first if all(change.path in those for those in paths)]
        found.append(AgentCommit(commit, tuple(own), await _link_targets(git, repository, own)))
        known = {each: entries for each, entries in known.items() if last.get(each, -1) > number}
    return found


async def _link_targets(git: GitCommands, repository: Path, own: Sequence[Change]) -> tuple[tuple[bytes, bytes], ...]:
    new = [change.entry for change in own if change.entry is not None]
    for entry in new:
        if entry.mode == GITLINK or (entry.mode == LINK and entry.size > MAX_LINK_BYTES):
            what = "a submodule" if entry.mode == GITLINK else f"a link of {entry.size} bytes"
            raise HostileTree(f"`{printable_path(entry.path)}` is {what}")
    links = [entry for entry in new if entry.mode == LINK]
    if not links:
        return ()
    targets = await git.read_blobs(repository, [entry.id for entry in links])
    return tuple((entry.path, target) for entry, target in zip(links, targets, strict=True))
