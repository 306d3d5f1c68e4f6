"""Rules about hosts: what each means, what a ceiling leaves, which spellings and addresses are taken."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from runner.core.hosts import NetworkRule, NetworkSpec, canonical_host, is_public, parse_rule, reachable


@pytest.mark.parametrize(
    ("rule", "host", "port", "allowed"),
    [
        ("pypi.org", "pypi.org", 443, True),
        ("pypi.org", "pypi.org", 80, True),
        ("pypi.org", "pypi.org", 22, False),
        ("pypi.org", "a.pypi.org", 443, False),
        ("pypi.org", "notpypi.org", 443, False),
        ("pypi.org:22", "pypi.org", 22, True),
        ("pypi.org:22", "pypi.org", 443, False),
        ("*.example.org", "a.b.example.org", 443, True),
        ("*.example.org", "example.org", 443, False),
        ("*.example.org", "badexample.org", 443, False),
        ("*.example.org:8443", "a.example.org", 8443, True),
        ("10.0.0.7:5432", "10.0.0.7", 5432, True),
    ],
)
def test_a_rule_allows_its_host_and_ports(rule: str, host: str, port: int, allowed: bool) -> None:
    spec = NetworkSpec((parse_rule(rule),))

    assert (spec.rule_for(host, port) is not None) is allowed


def test_an_open_network_allows_every_host() -> None:
    assert NetworkSpec(open=True).rule_for("a.example", 22) == NetworkRule("*", 22)
    assert NetworkSpec().rule_for("a.example", 443) is None


@pytest.mark.parametrize(
    "text",
    [
        *("", "*", "*.com", "A.org", "a..b", "a.", "-a.b", "a:0", "a:65536", "a:b", "user@a.org", "http://a.org"),
        *("1.2.3", "010.0.0.1", "0x7f.1", "256.0.0.1", "2130706433", "bücher.example", "a b", "a\0b", "[::1]"),
        *("a.org/x", f"{'a' * 64}.org", ".".join(["a" * 60] * 5)),
    ],
)
def test_what_is_no_host_is_no_rule(text: str) -> None:
    with pytest.raises(ValueError, match="a host such as"):
        parse_rule(text)


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("PyPI.org.", "pypi.org"),
        ("127.0.0.1", "127.0.0.1"),
        ("[::1]", "::1"),
        ("[2001:DB8::0:1]", "2001:db8::1"),
        ("::1", None),
        ("[127.0.0.1]", None),
        ("[fe80::1%eth0]", None),
        ("127.1", None),
        ("0177.0.0.1", None),
        ("0x7f000001", None),
        ("2130706433", None),
        ("pypi.org..", None),
        ("pypi.org%00.evil", None),
        ("bücher.example", None),
        ("", None),
    ],
)
def test_a_host_has_one_spelling_or_none(written: str, canonical: str | None) -> None:
    assert canonical_host(written) == canonical


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.17.0.1", False),
        ("192.168.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("fe80::1", False),
        ("fec0::1", False),
        ("fd00:ec2::254", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:93.184.216.34", True),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::5db8:d822", True),
        ("64:ff9b:1::5db8:d822", False),
        ("2002:7f00:1::", False),
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", False),
        ("::7f00:1", False),
    ],
)
def test_only_addresses_of_the_internet_are_public(address: str, public: bool) -> None:
    assert is_public(ip_address(address)) is public


@pytest.mark.parametrize(
    ("rule", "host", "found", "left"),
    [
        (parse_rule("a.org"), "a.org", ["10.0.0.1", "93.184.216.34"], ["93.184.216.34"]),
        (parse_rule("a.org", private=True), "a.org", ["10.0.0.1"], ["10.0.0.1"]),
        (parse_rule("10.0.0.1:80"), "10.0.0.1", ["10.0.0.1"], ["10.0.0.1"]),
        (NetworkRule("*", 80), "10.0.0.1", ["10.0.0.1"], []),
    ],
    ids=["mixed", "private", "the address itself", "open"],
)
def test_private_addresses_are_dialled_only_where_the_rule_says_so(
    rule: NetworkRule, host: str, found: list[str], left: list[str]
) -> None:
    assert [str(one) for one in reachable([ip_address(one) for one in found], rule, host)] == left


PRIVATE = parse_rule("corp.example", private=True)


@pytest.mark.parametrize(
    ("wanted", "ceiling", "beyond"),
    [
        (["a.org"], ["a.org"], []),
        (["a.org:443"], ["a.org"], []),
        (["a.org"], ["a.org:443"], ["a.org"]),
        (["x.a.org", "*.x.a.org"], ["*.a.org"], []),
        (["*.a.org"], ["x.a.org"], ["*.a.org"]),
        (["a.org", "b.org:22"], [], ["a.org", "b.org:22"]),
        (["a.org"], "open", []),
        ("open", ["a.org"], ["open"]),
        ("open", "open", []),
        ("private", "open", ["corp.example"]),
        ("private", ["corp.example"], ["corp.example"]),
        ("private", "private", []),
    ],
)
def test_a_ceiling_names_what_goes_beyond_it(
    wanted: list[str] | str, ceiling: list[str] | str, beyond: list[str]
) -> None:
    def spec(written: list[str] | str) -> NetworkSpec:
        if isinstance(written, list):
            return NetworkSpec(tuple(map(parse_rule, written)))
        return NetworkSpec(open=True) if written == "open" else NetworkSpec((PRIVATE,))

    assert spec(wanted).excess(spec(ceiling)) == beyond
