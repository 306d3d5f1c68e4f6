"""Reading isolation back: what the probe's text means, and that a text which is not the probe's is refused."""

from __future__ import annotations

import pytest

from runner.core.errors import ProviderFailed
from runner.core.model import Isolation, IsolationClass, Limits
from runner.sandbox.readback import NAMESPACES, HostView, read_back
from runner.sandbox.sandbox_layout import PATHS
from runner.sandbox.volumes import Volume

HOST = {name: f"{name}:[100]" for name in NAMESPACES}


def text(
    *,
    effective: str = "0000000000000000",
    new_privileges: int = 1,
    seccomp: int = 2,
    spaces: dict[str, str] | None = None,
    mounts: str = "",
    devices: str = "    lo: 0 0\n",
) -> str:
    status = f"Name:\tcat\nNoNewPrivs:\t{new_privileges}\nCapEff:\t{effective}\nCapBnd:\t0000000000000000\n"
    status += f"Seccomp:\t{seccomp}\n"
    inside = {name: f"{name}:[200]" for name in NAMESPACES} | {"pid_for_children": "pid:[300]"} | (spaces or {})
    listed = "".join(f"lrwxrwxrwx 1 root root 0 Nov 22 13:46 {name} -> {link}\n" for name, link in inside.items())
    heads = "Inter-|   Receive\n face |bytes\n"
    return "----\n".join([status, f"total 0\n{listed}", mounts, heads + devices, "Linux\n", ""])


def read(body: str, volume: Volume | None = None, *, filtered: bool = True) -> Isolation:
    outside = HostView(namespaces=HOST, uid=7000, limits=Limits(pids=9), volume=volume, filtered=filtered)
    return read_back(body, outside, provider="local", isolation=IsolationClass.NAMESPACES, paths=PATHS)


def test_a_closed_sandbox_shares_nothing() -> None:
    found = read(text())

    assert (found.capabilities, found.no_new_privileges, found.shared_namespaces) == ("none", True, ())
    assert (found.interfaces, found.uid, found.limits) == (("lo",), 7000, Limits(pids=9))


def test_a_capability_is_shown() -> None:
    assert read(text(effective="0000000000200000")).capabilities == "effective 200000, bounding 0"


def test_a_shared_namespace_is_named_and_the_host_s_interfaces_are_not_listed_as_ours() -> None:
    found = read(text(spaces={"net": "net:[100]"}, devices="  eth0: 1 1\n"))

    assert (found.shared_namespaces, found.interfaces) == (("net",), None)


@pytest.mark.parametrize(("seccomp", "filtered"), [(0, True), (1, True), (2, False)])
def test_calls_are_filtered_when_the_guest_was_refused_and_the_command_has_a_filter(
    seccomp: int, filtered: bool
) -> None:
    assert read(text()).filtered
    assert not read(text(seccomp=seccomp), filtered=filtered).filtered


def with_own_kernel(body: str) -> Isolation:
    outside = HostView(namespaces=HOST, uid=7000, limits=Limits(), kernel="Linux of the host\n")
    return read_back(body, outside, provider="gvisor", isolation=IsolationClass.KERNEL, paths=PATHS)


@pytest.mark.parametrize(
    ("said", "gained"),
    [("", False), ("NoNewPrivs:\t1\n", False), ("NoNewPrivs:\t0\n", True)],
    ids=["unsaid", "none", "some"],
)
def test_another_kernel_shares_nothing_and_need_not_say_all_that_this_one_does(said: str, gained: bool) -> None:
    spaces = dict.fromkeys(NAMESPACES, "net:[100]")  # numbers of its own, and not for all
    body = text(spaces=spaces).replace("NoNewPrivs:\t1\n", said)
    found = with_own_kernel(body)

    assert (found.isolation, found.shared_namespaces, found.interfaces) == (IsolationClass.KERNEL, (), ("lo",))
    assert found.no_new_privileges is not gained


def test_a_sandbox_that_should_have_a_kernel_of_its_own_and_has_the_host_s_is_refused() -> None:
    with pytest.raises(ProviderFailed, match="this host's own kernel"):
        with_own_kernel(text().replace("Linux\n", "Linux of the host\n"))


@pytest.mark.parametrize(
    ("mounts", "expected"),
    [
        ("1 0 8:1 /x /workspace rw - ext4 d rw\n2 1 8:1 /x/P /workspace/P ro - ext4 d rw\n", ("/workspace/P",)),
        ("1 0 8:1 /x /workspace ro - ext4 d rw\n", ("/workspace",)),
        ("1 0 8:1 /x /workspace-evil ro - ext4 d rw\n", ()),
        ("1 0 8:1 /x /workspace/a\\040b ro - ext4 d rw\n", ("/workspace/a b",)),
        ("1 0 8:1 /x /workspace/P ro - ext4 d rw\n2 1 8:1 /x /workspace/P rw - ext4 d rw\n", ()),
    ],
    ids=["below", "itself", "a neighbour", "a space", "covered by a later mount"],
)
def test_read_only_mounts_are_those_that_hold(mounts: str, expected: tuple[str, ...]) -> None:
    assert read(text(mounts=mounts)).read_only == expected


@pytest.mark.parametrize(
    ("places", "limit"),
    [
        (("/workspace", "/output", "/home/agent"), 4096),
        (("/workspace", "/output"), None),
        (("/workspace", "/output", "/home/agent", "/output"), None),
    ],
    ids=["all", "a home elsewhere", "an output that is covered"],
)
def test_the_disk_is_limited_when_all_that_commands_write_is_in_the_volume(
    places: tuple[str, ...], limit: int | None
) -> None:
    mounts = [
        f"1 0 {'8:1' if place in places[:n] else '7:3'} /x {place} rw - ext4 d rw\n" for n, place in enumerate(places)
    ]

    assert read(text(mounts="".join(mounts)), Volume("7:3", 4096)).limits == Limits(pids=9, disk_bytes=limit)
    assert read(text(mounts="".join(mounts))).limits == Limits(pids=9)


@pytest.mark.parametrize(
    "body", ["", "----\n" * 5, text().replace("CapEff", "CapXxx")], ids=["empty", "bare", "lacking"]
)
def test_a_text_that_is_not_the_probe_s_is_refused(body: str) -> None:
    with pytest.raises(ProviderFailed):
        read(body)
