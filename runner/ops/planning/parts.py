"""Parts of a checkout that its commit only refers to: whether there are any, and whether they can be fetched."""

from __future__ import annotations

import re
from collections.abc import Collection

from runner.core.errors import BadUrl, Untrusted
from runner.core.model import Checkout
from runner.core.sanitize import sanitize
from runner.core.settings import Settings
from runner.git.parts import LIST, LIST_BYTES, links_of, resolve_link
from runner.git.remote import find_git_lfs, lfs_missing
from runner.ops.planning.facts import ATTRIBUTES, read_file_of
from runner.ports.git import Git
from runner.spec.checkout import uses_keys
from runner.spec.facts_request import FactsRequest
from runner.spec.model import PartsFact

_FILTER = re.compile(rb"\sfilter=lfs\b")


async def find_parts(
    want: FactsRequest, commit: str, git: Git, settings: Settings, there: Collection[str]
) -> PartsFact:
    """Return the parts of a commit, which may have the files ``there``.

    Raises for submodules that are asked for and may not be fetched. Those of a repository by path need no URL where the
    user has cloned them.
    """
    checkout = want.checkout
    assert checkout is not None  # there is a commit
    listed = await read_file_of(checkout, git, commit, LIST, LIST_BYTES) if LIST in there else None
    attributes = await read_file_of(checkout, git, commit, ATTRIBUTES, LIST_BYTES) if ATTRIBUTES in there else None
    links = links_of(listed or b"")
    names = tuple(sanitize(path.decode("utf-8", "replace")) for path in links)
    for name, link in zip(names, links.values(), strict=True) if checkout.submodules and checkout.url else ():
        try:
            url = resolve_link(link.url, checkout.url)
        except BadUrl as fault:
            raise BadUrl(f"submodule `{name}`: {fault.message}", hint=fault.hint) from None
        if want.untrusted and uses_keys(url, settings.git_credentials):
            message = f"an untrusted manifest may not reach submodule `{name}` with your keys"
            raise Untrusted(message, hint="apply it without --untrusted")
    return PartsFact(names, _FILTER.search(attributes or b"") is not None)


def require_git_lfs(checkout: Checkout, settings: Settings) -> None:
    """Raise ``UrlUnsupported`` on a host that lacks what fetches files of LFS by a URL."""
    if checkout.lfs and checkout.url is not None and find_git_lfs(settings.environment.get("PATH", "")) is None:
        raise lfs_missing(checkout.url)
