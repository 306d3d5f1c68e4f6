"""The files that dependencies are made from, as the run will have them."""

from __future__ import annotations

from contextlib import suppress
from hashlib import sha256

from runner.core.errors import BadValue
from runner.git import source
from runner.ops.planning.facts import read_file_of
from runner.ops.planning.host_paths import require_ignored
from runner.ports.git import Git
from runner.safefs.safe_open import read_beneath
from runner.spec.facts_request import FactsRequest
from runner.spec.model import MAX_LOCK_FILE


async def hash_lock_files(want: FactsRequest, commit: str, git: Git) -> dict[str, str]:
    """Hash the files that dependencies are made from.

    Raises ``BadValue`` for a missing one and for directories that git would take for work, and what git raises.
    """
    checkout, found = want.checkout, dict[str, str]()
    assert checkout is not None  # there is a commit
    if checkout.path is not None:
        place = source.find_repository(checkout.path, within=checkout.within)
        require_ignored(place, [path for one in want.dependency_commands for path in one.keep])
    for name in dict.fromkeys(name for one in want.dependency_commands for name in one.files):
        content: bytes | None = None
        if checkout.path is not None and checkout.include_dirty:
            with suppress(FileNotFoundError):
                content = read_beneath(place.top, name, MAX_LOCK_FILE)
        else:
            content = await read_file_of(checkout, git, commit, name, MAX_LOCK_FILE)
        if content is None:
            raise BadValue(f"`{name}` is not a file of the repository", hint="commit it, or remove it from `from`")
        found[name] = sha256(content).hexdigest()
    return found
