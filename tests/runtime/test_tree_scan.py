"""The scan, on real directories with what hostile agents leave in them."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.policy.paths import PathPolicy
from runner.runtime.tree_scan import ScanResult
from tests.policy.test_paths import DOCUMENTED
from tests.support.folder_contents import put
from tests.support.needs import ROOT

Scan = Callable[..., ScanResult]

POLICY = PathPolicy(("**",), DOCUMENTED, 10 << 20)


def tree(root: Path, *files: str) -> Path:
    for name in files:
        put(root / name, "x")
    return root


def found(result: ScanResult) -> list[str]:
    return [f"{v.path}: {v.rule}" for v in result.violations]


@pytest.mark.scenario("WSM-17")
def test_a_tree_of_normal_files_is_clean_and_counted(tmp_path: Path, scan: Scan) -> None:
    tree(tmp_path, "README.md", "src/a.py", "src/deep/b.py", ".github/c.yml", ".git/config")
    (tmp_path / "link").symlink_to("src/../README.md".removeprefix("src/../"))

    assert scan(tmp_path, POLICY) == ScanResult(
        files=4, directories=3, bytes=4, violations=(), truncated=False, offending=frozenset()
    )


@pytest.mark.scenario("WSM-19")
def test_the_scan_returns_the_whole_list_of_violations(tmp_path: Path, scan: Scan) -> None:
    tree(tmp_path, ".env", "a/b/c/d/.env", ".env.local", "secrets/a", "x/secrets/b/c", "x.pem", "k/ID.KEY")
    tree(tmp_path, "credentials.json", "z/service-account-1.json", "fine.txt", ".gitignore")
    (tmp_path / ".gitignore").write_text(".env\n")

    result = scan(tmp_path, POLICY)

    assert found(result) == [
        ".env: forbidden:**/.env",
        ".env.local: forbidden:**/.env.*",
        "a/b/c/d/.env: forbidden:**/.env",
        "credentials.json: forbidden:**/credentials.json",
        "k/ID.KEY: forbidden:**/*.key",
        "secrets: forbidden:**/secrets/**",
        "secrets/a: forbidden:**/secrets/**",
        "x.pem: forbidden:**/*.pem",
        "x/secrets: forbidden:**/secrets/**",
        "x/secrets/b: forbidden:**/secrets/**",
        "x/secrets/b/c: forbidden:**/secrets/**",
        "z/service-account-1.json: forbidden:**/service-account*.json",
    ]
    assert result.offending == {v.path.encode() for v in result.violations}


def test_directories_and_links_with_a_forbidden_name_are_caught(tmp_path: Path, scan: Scan) -> None:
    (tmp_path / ".env").mkdir()
    tree(tmp_path, "target/f", ".env/inside")
    (tmp_path / "secrets").symlink_to("target")
    (tmp_path / "x.pem").symlink_to("target")

    assert found(scan(tmp_path, POLICY)) == [
        ".env: forbidden:**/.env",
        ".env/inside: forbidden:**/.env",
        "secrets: forbidden:**/secrets/**",
        "x.pem: forbidden:**/*.pem",
    ]


def test_a_sparse_file_is_too_large_without_being_read(tmp_path: Path, scan: Scan) -> None:
    for name, size in (("exact", 10 << 20), ("over", (10 << 20) + 1), ("sparse", 1 << 40)):
        with open(tmp_path / name, "wb") as file:
            file.truncate(size)

    result = scan(tmp_path, POLICY)

    assert found(result) == ["over: max-file-size", "sparse: max-file-size"]
    assert result.violations[0].detail == "10485761 bytes, at most 10485760"


def test_special_files_and_setuid_are_violations_and_block_nothing(tmp_path: Path, scan: Scan) -> None:
    os.mkfifo(tmp_path / "fifo")
    tree(tmp_path, "suid", "sgid", "plain")
    (tmp_path / "suid").chmod(0o4755)
    (tmp_path / "sgid").chmod(0o2755)
    (tmp_path / "plain").chmod(0o1755)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "sock"))

        result = scan(tmp_path, POLICY)

    assert found(result) == ["fifo: special-file", "sgid: setuid", "sock: special-file", "suid: setuid"]
    assert [v.detail for v in result.violations] == ["FIFO", "", "socket", ""]


def test_devices_and_other_file_systems_are_violations(scan: Scan) -> None:
    result = scan(Path("/dev"), POLICY)

    assert {"null: special-file (character device)", "pts: mount (Invalid cross-device link)"} <= {
        str(v) for v in result.violations
    }


@pytest.mark.scenario("WSM-15")
@pytest.mark.parametrize(
    ("link", "target", "leaves"),
    [
        ("l", "f", False),
        ("l", "./d/../f", True),
        ("d/l", "../f", False),
        ("d/l", "../../f", True),
        ("d/l", ".././../f", True),
        ("l", "/etc/passwd", True),
        ("l", "/proc/self/root", True),
        ("l", "..", True),
        ("l", "l", False),
        ("d/l", "..", False),
        ("l", "nowhere", False),
    ],
    ids=str,
)
def test_a_link_that_may_lead_outside_is_a_violation(
    tmp_path: Path, link: str, target: str, leaves: bool, scan: Scan
) -> None:
    tree(tmp_path, "f", "d/f")
    (tmp_path / link).symlink_to(target)

    assert found(scan(tmp_path, POLICY)) == ([f"{link}: link-outside"] if leaves else [])


def test_a_chain_of_links_that_each_look_harmless_does_not_lead_outside(tmp_path: Path, scan: Scan) -> None:
    """Read lexically, ``d/d/../..`` is the root; walked, each ``d`` is the root already, and ``..`` leaves it."""
    (tmp_path / "d").symlink_to(".")
    (tmp_path / "out").symlink_to("d/d/../..")

    assert found(scan(tmp_path, POLICY)) == ["out: link-outside"]


def test_links_are_never_followed(tmp_path: Path, scan: Scan) -> None:
    tree(tmp_path, "d/f")
    (tmp_path / "d" / "loop").symlink_to("../d")

    assert (scan(tmp_path, POLICY).files, scan(tmp_path, POLICY).directories) == (1, 1)


def test_only_the_git_directory_at_the_top_is_skipped(tmp_path: Path, scan: Scan) -> None:
    tree(tmp_path, ".git/.env", "sub/.git/config", "wt/.GIT", "a/\u200b.git/x", ".gitignore")

    assert found(scan(tmp_path, POLICY)) == ["a/\\u200b.git: nested-git", "sub/.git: nested-git", "wt/.GIT: nested-git"]


def test_names_that_are_no_text_are_shown_escaped_and_kept_raw(tmp_path: Path, scan: Scan) -> None:
    raw = b"a\xff\n.key"
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + raw)).touch()

    result = scan(tmp_path, POLICY)

    assert found(result) == ["a\\xff\\n.key: forbidden:**/*.key"]
    assert result.offending == {raw}


@pytest.fixture
def as_ordinary_user() -> Iterator[Path]:
    """A directory that an ordinary user owns, and that user's rights, also when root runs the tests."""
    with tempfile.TemporaryDirectory() as folder:
        user = os.geteuid()
        if user == 0:
            os.chown(folder, 65534, 65534)
            os.seteuid(65534)
        yield Path(folder)
        os.seteuid(user)


def test_an_unreadable_directory_is_a_violation(as_ordinary_user: Path, scan: Scan) -> None:
    (as_ordinary_user / "closed").mkdir(mode=0)

    assert [str(v) for v in scan(as_ordinary_user, POLICY).violations] == ["closed: unreadable (Permission denied)"]


@pytest.fixture
def with_mount_inside(tmp_path: Path) -> Iterator[Path]:
    tree(tmp_path, "mounted/hidden", "elsewhere/.env")
    subprocess.run(["mount", "--bind", tmp_path / "elsewhere", tmp_path / "mounted"], check=True)
    yield tmp_path
    subprocess.run(["umount", tmp_path / "mounted"], check=True)


@ROOT.mark
def test_a_mount_of_the_same_file_system_is_a_violation_and_not_entered(with_mount_inside: Path, scan: Scan) -> None:
    assert found(scan(with_mount_inside, POLICY)) == ["elsewhere/.env: forbidden:**/.env", "mounted: mount"]


@pytest.fixture
def deep_tree(tmp_path: Path) -> Iterator[Path]:
    tree(tmp_path, "zz/.env")
    holder = os.open(tmp_path, os.O_RDONLY)
    for _ in range(2_100):
        os.mkdir("d", dir_fd=holder)
        below = os.open("d", os.O_RDONLY, dir_fd=holder)
        os.close(holder)
        holder = below
    os.close(holder)
    yield tmp_path
    subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)  # pytest's own clean-up recurses


def test_a_path_longer_than_the_system_allows_ends_there_and_the_rest_is_scanned(deep_tree: Path, scan: Scan) -> None:
    result = scan(deep_tree, POLICY)

    assert [v.rule for v in result.violations] == ["scan-limit", "forbidden:**/.env"]
    assert len(result.violations[0].path) == 4001


def test_limits_end_the_scan_and_say_so(tmp_path: Path, scan: Scan) -> None:
    tree(tmp_path, *(f"d{n}/{n}.key" for n in range(20)))

    few_entries = scan(tmp_path, POLICY, limit_entries=30)
    few_violations = scan(tmp_path, POLICY, limit_violations=5)

    assert (few_entries.truncated, few_violations.truncated) == (True, True)
    assert str(few_entries.violations[0]) == ".: scan-limit (more than 30 entries)"
    assert len(few_violations.violations) == 6


def test_a_scan_that_was_stopped_is_never_clean(tmp_path: Path, scan: Scan) -> None:
    tree(tmp_path, "a/b")

    result = scan(tmp_path, POLICY, should_stop=lambda: True)

    assert [str(v) for v in result.violations] == [".: scan-limit (stopped before the end)"]


@pytest.mark.nightly
def test_a_wide_directory_costs_no_memory(tmp_path: Path, scan: Scan) -> None:
    for n in range(20_000):
        os.close(os.open(tmp_path / str(n), os.O_CREAT))
    scan(tmp_path, POLICY)
    tracemalloc.start()
    try:
        assert scan(tmp_path, POLICY).files == 20_000
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
