"""What bubblewrap says, and what we make of it."""

from __future__ import annotations

import pytest

from runner.core.errors import ProviderFailed
from runner.sandbox.bwrap import BwrapOptions, first_process, hint


@pytest.mark.parametrize(
    ("status", "pid"),
    [(b"", None), (b'{ "child-pid": 7, "mnt-namespace": 4 }\n{ "exit-code": 137 }\n', 7)],
    ids=["nothing", "started"],
)
def test_the_first_process_is_the_one_that_bubblewrap_names(status: bytes, pid: int | None) -> None:
    assert first_process(status) == pid


def test_a_host_that_forbids_user_namespaces_gets_the_command_that_allows_them() -> None:
    assert "the AppArmor profile that `runner doctor` prints" in (hint("setting up uid map: Permission denied") or "")
    assert hint("something else") is None


@pytest.mark.parametrize("env", [{"A": "x\0--bind\0/\0/tmp"}, {"A\0--bind": "x"}], ids=["value", "name"])
def test_a_nul_never_becomes_another_argument(env: dict[str, str]) -> None:
    with pytest.raises(ProviderFailed, match="NUL"):
        BwrapOptions(env, []).arguments(status=3, gate=4)
