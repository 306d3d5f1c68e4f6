"""Projects and adopted directories of our own providers: the shipped suite, and whose directories each adopts."""

from pathlib import Path

import pytest

from runner.core.errors import ProviderFailed
from runner.ports.provider import Provider
from runner.safefs import trees
from runner.testing.conformance.test_provider_projects import *
from runner.testing.conformance.test_provider_projects import Make
from tests.support.needs import USERS


@USERS.mark
async def test_a_directory_of_a_user_that_commands_do_not_run_as_is_refused(
    make: Make, provider: Provider, theirs: Path
) -> None:
    own_users = getattr(provider, "_own_users", True)
    trees.chown_tree(theirs, 0 if own_users else 4711)
    if lends(provider):
        theirs = Path("/usr/share")
    with pytest.raises(ProviderFailed, match="root" if own_users else "4711"):
        await make("default", shared=False, tree=theirs)


def lends(provider: Provider) -> bool:
    return getattr(provider, "_own_users", provider.name == "docker")
