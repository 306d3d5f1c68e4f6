"""A repository's own policy: what it says, and how it stands beside the others."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from runner.core.hosts import NetworkRule, NetworkSpec
from runner.core.model import IsolationClass
from runner.manifest.load import DEFAULTS
from runner.manifest.network import STEPS
from runner.policy.paths import PathPolicy, compose
from runner.report.diagnostics import render
from runner.spec.model import PolicyFile, PolicySpec
from runner.spec.repository import OwnPolicy, read_own, with_network, with_own

BUILT_IN = PolicySpec(
    name="defaults",
    origin=DEFAULTS,
    allowed_paths=("**",),
    forbidden_patterns=("**/.env", "**/*.pem"),
    max_file_size=1000,
    providers=None,
    min_isolation=IsolationClass.NONE,
)
HOUSE = PolicySpec(
    name="house",
    origin="h.yaml:3",
    allowed_paths=("src/**", ".env"),
    forbidden_patterns=("**/*.key",),
    max_file_size=500,
    providers=("local",),
    min_isolation=IsolationClass.NAMESPACES,
)


def own(text: str) -> OwnPolicy:
    found, findings = read_own(PolicyFile("c" * 40, text.encode()))
    assert found is not None, render(findings)
    return found


def judge(specs: tuple[PolicySpec, ...], path: str) -> str:
    return compose([PathPolicy(s.allowed_paths, s.forbidden_patterns, s.max_file_size) for s in specs]).judge(path).rule


def test_a_custom_policy_permits_env_in_place_of_the_built_in_defaults() -> None:
    specs, warnings = with_own([BUILT_IN], own('forbiddenPatterns: ["**/*.pem"]'), untrusted=False)

    assert judge(specs, ".env") == "allowed:**"
    assert judge(specs, "a/x.pem") == "forbidden:**/*.pem"
    assert [w.message for w in warnings] == ["`**/.env`, a default, is not in this list"]


@pytest.mark.parametrize(
    ("text", "allowed", "forbidden", "most"),
    [
        pytest.param("{}", ("**",), ("**/.env", "**/*.pem"), 1000, id="nothing"),
        pytest.param("maxFileSize: 5000", ("**",), ("**/.env", "**/*.pem"), 5000, id="a larger size"),
        pytest.param("allowedPaths: [src/]", ("src/",), ("**/.env", "**/*.pem"), 1000, id="fewer paths"),
        pytest.param("forbiddenPatterns: []", ("**",), (), 1000, id="nothing forbidden"),
        pytest.param("allowedPaths: []", (), ("**/.env", "**/*.pem"), 1000, id="nothing allowed"),
    ],
)
def test_what_it_leaves_out_is_the_built_in_default(
    text: str, allowed: tuple[str, ...], forbidden: tuple[str, ...], most: int
) -> None:
    (spec,), _ = with_own([BUILT_IN], own(text), untrusted=False)

    assert (spec.allowed_paths, spec.forbidden_patterns, spec.max_file_size) == (allowed, forbidden, most)
    assert spec.origin == ".agentgate/policy.yaml at cccccccccccc"


@pytest.mark.parametrize(
    ("before", "untrusted"),
    [
        pytest.param((HOUSE,), False, id="a Policy manifest"),
        pytest.param((BUILT_IN,), True, id="untrusted"),
        pytest.param((HOUSE, BUILT_IN), True, id="untrusted with a Policy"),
    ],
)
def test_beside_others_it_only_tightens(before: tuple[PolicySpec, ...], untrusted: bool) -> None:
    loose = own("allowedPaths: ['**']\nforbiddenPatterns: []\nmaxFileSize: 1G\nallowNetwork: true")
    tight = own("allowedPaths: [src/a]\nforbiddenPatterns: ['**/*.bak']\nmaxFileSize: 7")

    specs, warnings = with_own(before, loose, untrusted=untrusted)
    tightened, _ = with_own(before, tight, untrusted=untrusted)

    paths = (".env", "src/a", "src/b", "x.key", "x.pem", "src/a.bak", "README")
    allowed = {path for path in paths if judge(before, path).startswith("allowed")}
    assert {path for path in paths if judge(specs, path).startswith("allowed")} == allowed
    assert min(s.max_file_size for s in specs) == min(s.max_file_size for s in before)
    assert warnings == []
    assert {path for path in paths if judge(tightened, path).startswith("allowed")} == {"src/a"}
    assert min(s.max_file_size for s in tightened) == 7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("forbiddenPatern: []", "unknown-field .agentgate/policy.yaml:1:1", id="unknown key"),
        pytest.param("forbidden_patterns: []", "unknown-field .agentgate/policy.yaml:1:1", id="a manifest's key"),
        pytest.param("allowedPaths: src", "bad-value .agentgate/policy.yaml:1:15", id="no list"),
        pytest.param("\nallowedPaths: [a, 3]", "bad-value .agentgate/policy.yaml:2:19", id="no text"),
        pytest.param("allowedPaths: [a, '@(b)']", "bad-value .agentgate/policy.yaml:1:19", id="a group"),
        pytest.param("allowNetwork: 1", "bad-value .agentgate/policy.yaml:1:15", id="no boolean"),
        pytest.param("maxFileSize: -1", "bad-value .agentgate/policy.yaml:1:14", id="no size"),
        pytest.param("allowedPaths: [a, ../b]", "bad-value .agentgate/policy.yaml:1:19", id="no pattern"),
        pytest.param("a: b: c", "syntax .agentgate/policy.yaml:1:5", id="no YAML"),
        pytest.param("allowedPaths: []\nallowedPaths: []", "duplicate-key .agentgate/policy.yaml:2:1", id="twice"),
        pytest.param("", "bad-value None", id="empty"),
        pytest.param("[]", "bad-value None", id="a list"),
        pytest.param("\x00", "encoding .agentgate/policy.yaml:1:1", id="binary"),
    ],
)
def test_what_is_wrong_is_said_at_its_place(text: str, said: str) -> None:
    found, findings = read_own(PolicyFile("c" * 40, text.encode()))

    assert found is None
    assert [f"{f.code.removeprefix('manifest.')} {f.at}" for f in findings] == [said]


NONE = dict.fromkeys(STEPS, NetworkSpec())
CEILING = replace(HOUSE, network=dict.fromkeys(STEPS, NetworkSpec((NetworkRule("a.test"),))))


@pytest.mark.parametrize(
    ("text", "policies", "why_not", "opened", "warnings"),
    [
        pytest.param("allowNetwork: true", [HOUSE], "", ["agent", "dependencies", "post_hook", "setup"], [], id="true"),
        pytest.param("allowNetwork: true", [CEILING], "", [], ["policy.network-ignored"], id="a lower ceiling"),
        pytest.param("allowNetwork: true", [HOUSE], "no", [], ["policy.network-ignored"], id="something else"),
        pytest.param("allowNetwork: false", [HOUSE], "", [], [], id="false"),
        pytest.param("maxFileSize: 7", [HOUSE], "", [], [], id="left out"),
    ],
)
def test_every_public_host_is_added_where_nothing_forbids_it(
    text: str, policies: list[PolicySpec], why_not: str, opened: list[str], warnings: list[str]
) -> None:
    networks, at, findings = with_network(NONE, own(text), policies, why_not=why_not)

    assert sorted(step for step, network in networks.items() if network.open) == opened
    assert [finding.code for finding in findings] == warnings
    assert (at is not None) == bool(opened)


def test_none_is_a_ceiling_of_every_step() -> None:
    specs, _ = with_own([HOUSE], own("allowNetwork: false"), untrusted=False)

    assert specs[-1].network is not None
    assert all(NetworkSpec(open=True).excess(specs[-1].network[step]) for step in STEPS)
