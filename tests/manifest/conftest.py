from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture
def ordinary_user() -> Iterator[None]:
    """File permissions hold, also when the tests run as root."""
    me = os.geteuid()
    if me == 0:
        os.seteuid(65534)
    yield
    os.seteuid(me)
