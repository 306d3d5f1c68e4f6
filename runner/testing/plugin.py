"""The pytest plugin of the suites: who is judged, a fresh workspace for each check, and declared gaps.

Without hooks that name them, the providers and agents that other distributions have registered are judged.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from itertools import chain, count
from pathlib import Path

import pytest

from runner.core.model import Feature, Handle, Limits
from runner.ports.provider import Provider, WorkspaceRequest
from runner.testing.agents import AgentCandidate, registered_agents
from runner.testing.outside import eventually, marked, on_host, volumes_of
from runner.testing.place import Candidate, Place, registered_providers

_NAMES = count()
_NONCE = "nonce-of-this-store"


class Hooks:
    @staticmethod
    def pytest_runner_candidates() -> Sequence[Candidate]:
        """Name providers that the conformance suite judges."""
        raise NotImplementedError

    @staticmethod
    def pytest_runner_agents() -> Sequence[AgentCandidate]:
        """Name agents that the conformance suite judges."""
        raise NotImplementedError


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(Hooks)


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "scenario(id, only=None): a claim that this test shows on the real component, or the part `only` of it",
        "slow: takes more than 0.25 s",
        "nightly: takes too long for every run",
    ):
        config.addinivalue_line("markers", line)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Run checks of these suites in trio, also where the tests around them do not."""
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj) and is_shipped(item.obj):
        item.add_marker(pytest.mark.trio)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """Give a skip inside of trio its reason back: pytest-trio raises it anew without."""
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, pytest.skip.Exception) and isinstance(leaf := error.__context__, BaseExceptionGroup):
        found: BaseException = leaf
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        error.msg = str(found)


def candidates(config: pytest.Config) -> Mapping[str, Candidate]:
    """Return the providers that are judged, by name."""
    named = [*chain.from_iterable(config.hook.pytest_runner_candidates())]
    return {candidate.name: candidate for candidate in named or registered_providers()}


def agents(config: pytest.Config) -> Mapping[str, AgentCandidate]:
    """Return the agents that are judged, by name."""
    named = [*chain.from_iterable(config.hook.pytest_runner_agents())]
    return {candidate.name: candidate for candidate in named or registered_agents()}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if is_shipped(metafunc.function):
        judge(metafunc)


def is_shipped(check: object) -> bool:
    return getattr(check, "__module__", "").startswith("runner.testing.")


def judge(metafunc: pytest.Metafunc) -> None:
    """Give a check every candidate, unless its module has ``KINDS`` of its own."""
    if "agent" in metafunc.fixturenames:
        metafunc.parametrize("agent", agents(metafunc.config), indirect=True)
    if "provider" in metafunc.fixturenames:
        found = candidates(metafunc.config)
        kinds = getattr(metafunc.module, "KINDS", found)
        params = [pytest.param(kind, marks=_marks(found[kind], metafunc)) for kind in kinds]
        metafunc.parametrize("provider", params, indirect=True)


def _marks(candidate: Candidate, metafunc: pytest.Metafunc) -> list[pytest.MarkDecorator]:
    name = metafunc.function.__name__
    gap = candidate.gaps.get(name)
    expected = [pytest.mark.xfail(reason=gap, strict=True)] if gap else []
    return [*expected, *candidate.marks(name, metafunc.module)]


def lack(what: str, why: str, command: str | None) -> None:
    pytest.skip(f"{what} | {why} | {command or ''}")


@pytest.fixture
def agent(request: pytest.FixtureRequest) -> AgentCandidate:
    return agents(request.config)[request.param]


@pytest.fixture
def candidate(request: pytest.FixtureRequest, provider: Provider) -> Candidate:
    return candidates(request.config)[request.node.callspec.params["provider"]]


@pytest.fixture
async def provider(request: pytest.FixtureRequest, tmp_path: Path) -> Provider:
    candidate = candidates(request.config)[request.param]
    made = candidate.make(tmp_path, candidate.grace)
    probe = await made.probe()
    if not probe.available:
        lack(f"provider {candidate.name}", probe.reason or "unavailable", probe.hint)
    return made


@pytest.fixture
async def place(candidate: Candidate, provider: Provider, tmp_path: Path) -> AsyncIterator[Place]:
    """A fresh workspace; afterwards an outside look finds nothing of it."""
    before = on_host(tmp_path)
    handle = await provider.create(
        WorkspaceRequest(id=f"check-{os.getpid()}-{next(_NAMES)}-", run="run-1", nonce=_NONCE)
    )
    made = Place(
        candidate=candidate,
        provider=provider,
        home=tmp_path,
        handle=handle,
        nonce=_NONCE,
        probe=await provider.probe(),
    )
    yield made
    assert (marked(made.mark), [*candidate.inhabitants(handle)]) == ([], [])
    if handle.tree.exists() or handle.private.exists():
        await provider.destroy(handle)
    assert not handle.tree.exists()
    assert not handle.private.exists()
    assert [*tmp_path.glob(f"sandboxes/*{handle.id}*")] == []
    assert on_host(tmp_path) == before


@pytest.fixture
async def limited(
    request: pytest.FixtureRequest, candidate: Candidate, provider: Provider, tmp_path: Path
) -> AsyncIterator[Callable[[Limits], Awaitable[Place]]]:
    """Make workspaces with limits; afterwards an outside look finds nothing of them."""
    made: list[Handle] = []

    async def make(limits: Limits) -> Place:
        probe = await provider.probe()
        for feature in (Feature.MEMORY, Feature.CPU, Feature.PIDS):
            if feature in probe.missing and not request.node.get_closest_marker("xfail"):
                lack(f"limits of {feature}", probe.missing[feature], None)
        name = f"check-{os.getpid()}-{next(_NAMES)}-"
        made.append(await provider.create(WorkspaceRequest(id=name, run="run-1", nonce="nonce", limits=limits)))
        return Place(candidate=candidate, provider=provider, home=tmp_path, handle=made[-1], nonce="nonce", probe=probe)

    yield make
    for handle in made:
        assert marked(handle.id) == []
        await provider.destroy(handle)
    # A sandbox that is just made beside us, by another test, has each mount of the host for a moment.
    eventually(lambda: volumes_of(tmp_path) == [])
    assert on_host(tmp_path) == set()
