"""What bubblewrap says, and what we make of it."""

from __future__ import annotations

import pytest

from runner.core.errors import ProviderFailed
from runner.sandbox.bwrap import BwrapOptions, BwrapStatus, command_not_started, hint, read_status


@pytest.mark.parametrize(
    ("text", "report"),
    [
        (b"", BwrapStatus(None, None)),
        (b'{ "child-pid": 7 }\n', BwrapStatus(7, None)),
        (b'{ "child-pid": 7, "mnt-namespace": 4 }\n{ "exit-code": 137 }\n', BwrapStatus(7, 137)),
    ],
    ids=["nothing", "started", "ended"],
)
def test_a_report_without_a_code_is_never_read_as_success(text: bytes, report: BwrapStatus) -> None:
    assert read_status(text) == report


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (b"bwrap: execvp x: No such file or directory\n", 127),
        (b"bwrap: execvp x: Permission denied\n", 126),
        (b"bwrap: Can't find source path /x: No such file or directory\n", None),
        (b"", None),
    ],
)
def test_only_a_command_that_cannot_be_executed_is_the_command_s_own_failure(words: bytes, code: int | None) -> None:
    assert command_not_started(words) == code


def test_a_host_that_forbids_user_namespaces_gets_the_command_that_allows_them() -> None:
    assert "the AppArmor profile that `runner doctor` prints" in (hint("setting up uid map: Permission denied") or "")
    assert hint("something else") is None


def test_a_command_s_own_environment_wins_over_the_opening_s() -> None:
    words = BwrapOptions({"A": "opening", "B": "opening"}, []).arguments(env={"A": "own"}, cwd="/w", status=3, gate=4)

    assert b"\0--setenv\0A\0own\0--setenv\0B\0opening\0" in words


@pytest.mark.parametrize(("env", "cwd"), [({"A": "x\0--bind\0/\0/tmp"}, "/w"), ({}, "/w\0--bind")])
def test_a_nul_never_becomes_another_argument(env: dict[str, str], cwd: str) -> None:
    with pytest.raises(ProviderFailed, match="NUL"):
        BwrapOptions({}, []).arguments(env=env, cwd=cwd, status=3, gate=4)
