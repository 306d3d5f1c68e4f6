"""Plug-ins: built in by their file name, of other distributions by entry point."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import runner.agents
import runner.providers
from runner.core import plugins
from runner.core.errors import PluginBroken, UnknownPlugin
from tests.support.distribution import install


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory where distributions are found."""
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.registered.cache_clear()
    plugins.fact.cache_clear()
    yield tmp_path
    plugins.registered.cache_clear()
    plugins.fact.cache_clear()


def test_a_provider_of_another_distribution_is_imported_by_its_name(site: Path) -> None:
    install(site, "boxed", {"runner.providers": {"boxed": "boxed_one"}}, boxed_one="provider = 1\nSHOWS_HOST = True\n")

    assert plugins.load(runner.providers, "boxed").provider == 1
    assert "boxed" in plugins.known(runner.providers)
    assert plugins.beside(runner.providers, "boxed") == site
    assert plugins.fact(runner.providers, "boxed", "SHOWS_HOST", False) is True


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("broken_a", "import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("broken_b", "raise RuntimeError('boom')", "RuntimeError: boom"),
        ("broken_c", "", "has no `provider` in broken_c"),
    ],
)
def test_one_that_cannot_be_imported_is_named_with_its_distribution(
    site: Path, name: str, text: str, said: str
) -> None:
    install(site, "boxed", {"runner.providers": {"boxed": name}}, version="1.2", **{name: text})

    with pytest.raises(PluginBroken, match=re.escape(said)) as caught:
        plugins.load(runner.providers, "boxed")
    assert "`boxed` of boxed 1.2" in caught.value.message
    assert "boxed" not in plugins.importable(runner.providers)


def test_a_built_in_name_is_not_shadowed(site: Path) -> None:
    install(site, "evil", {"runner.providers": {"local": "evil_local"}}, evil_local="provider = None")

    assert plugins.load(runner.providers, "local").__name__ == "runner.providers.local"
    assert plugins.registered(runner.providers)["local"].problem == "a built-in plug-in has this name"


def test_a_name_of_two_distributions_is_neither_s(site: Path) -> None:
    for one in ("first", "second"):
        install(site, one, {"runner.agents": {"twice": f"of_{one}"}}, **{f"of_{one}": "agent = 1"})

    with pytest.raises(PluginBroken, match=r"(first|second) 1\.0 and (first|second) 1\.0 both register it"):
        plugins.load(runner.agents, "twice")


def test_the_hint_for_an_unknown_name_knows_registered_ones(site: Path) -> None:
    install(site, "boxed", {"runner.providers": {"boxed": "boxed_two"}}, boxed_two="provider = 1")

    with pytest.raises(UnknownPlugin) as caught:
        plugins.load(runner.providers, "boxd")
    assert caught.value.hint == "did you mean `boxed`?"


def test_facts_of_a_built_in_provider_are_read_without_importing_it() -> None:
    code = (
        "import sys; from runner.core import plugins\n"
        "print(plugins.fact('runner.providers', 'docker', 'USES_IMAGES', False),"
        " plugins.fact('runner.providers', 'local', 'USES_IMAGES', False),"
        " plugins.names('runner.providers') == ('docker', 'gvisor', 'kubernetes', 'local', 'process'),"
        " {'runner.providers.docker', 'trio', 'importlib.metadata'} & {*sys.modules})"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert said == "True False True set()\n"
