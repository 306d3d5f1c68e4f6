"""The pages of the documentation: what they show is what happens, their links lead somewhere, none is lost."""

from __future__ import annotations

import os
import random
import re
import shlex
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from runner.manifest.load import load
from runner.report.diagnostics import render
from runner.safefs import trees
from tests.support.page import HOME, Answer, Command, Page, read_page, rewritten, run_page
from tests.support.page_situations import ROOT, SITUATIONS, programs, require
from tests.support.situations import leftovers

DOCS = ROOT / "docs"
_NAMED = re.compile(r"`((?:docs|manifests|runners?|schemas|skills|tests)/(?:[\w.*-]+/)*(?:[\w.*-]+\.\w+)?)`")
_ANY = re.compile(r"(?<![A-Za-z])[A-Z]+(?![A-Za-z])")
TIMEOUT = 280.0  # seconds, for one page
PAGES = {
    str(path.relative_to(ROOT)): read_page(path)
    for path in [*ROOT.glob("*.md"), *sorted(DOCS.rglob("*.md"))]
    if "_build" not in path.parts
}
# Sessions of five seconds and more, for the night.
LONG = ("troubleshooting", "howto/add-a-provider", "howto/add-a-step", "howto/add-an-agent", "tutorials/first-agent")
LONG += ("howto/run-from-a-program", "oncall/setup", "tutorials/node", "tutorials/python", "tutorials/policy")
LONG += ("howto/add-a-verb", "howto/deliver-a-change", "howto/resume-and-recover", "howto/dependencies")
LONG += ("howto/warm-pools", "howto/workspaces", "explanation/architecture", "explanation/plan")
LONG += (
    "howto/shared-store",
    "howto/mcp",
    "howto/server",
    "howto/github-actions",
    "howto/gitlab",
    "howto/pages",
    "howto/rehearse",
    "howto/secrets",
    "howto/webhooks",
    "howto/matrix-and-needs",
    "explanation/evidence",
    "tutorials/first-run",
)
NIGHT = {f"docs/{name}.md" for name in LONG}
SESSIONS = [
    pytest.param(name, marks=[pytest.mark.nightly] if name in NIGHT else [])
    for name, page in PAGES.items()
    if page.commands
]


@pytest.mark.slow
@pytest.mark.parametrize("name", SESSIONS)
def test_commands_of_a_page_print_what_it_shows(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    page = PAGES[name]

    answers = session(page, tmp_path)

    if request.config.option.update_cases:
        page.path.write_text(rewritten(page, answers))
    elif found := differences(name, answers):
        pytest.fail(found, pytrace=False)


def session(page: Page, folder: Path) -> list[tuple[Command, Answer]]:
    """Run a page where its comments say, in a home of its own, and leave nothing of it on the host."""
    home, needed = make_home(), page.chosen("needs")
    work, state = home / "work", home / ".local" / "state" / "runner"
    for made in (work, state, folder / "bin"):
        made.mkdir(parents=True)
    (home / "state").symlink_to(state)  # where leftovers are looked for
    (home / ".gitconfig").write_text("[user]\nname = You\nemail = you@example.org\n[init]\ndefaultBranch = main\n")
    env = {"LANG": "C.UTF-8", "PYTHONPATH": str(ROOT), "GIT_CONFIG_NOSYSTEM": "1"}
    env["PATH"] = os.pathsep.join([str(folder / "bin"), *programs(needed), os.environ["PATH"]])
    try:
        with ExitStack() as stack:
            for part in needed:
                env |= require(part)
            for situation in page.chosen("given"):
                env |= stack.enter_context(SITUATIONS[situation](work))
            command = folder / "bin" / "runner"
            words = f'PYTHONPATH={shlex.quote(env.pop("PYTHONPATH"))} exec {shlex.quote(sys.executable)} -m runner "$@"'
            command.write_text(f"#!/bin/sh\n{words}\n")
            command.chmod(0o755)
            answers = run_page(page, home, env, TIMEOUT)
        left = leftovers(home)
    finally:
        trees.remove(home)
    assert left == []
    return answers


def make_home() -> Path:
    """A new directory whose name is as long as the one that pages show, so that tables are as wide."""
    while True:
        home = Path("/tmp", "".join(random.choices("ghjkmnpqrstvwxyz", k=len(HOME) - len("/tmp/"))))
        with suppress(FileExistsError):
            home.mkdir(mode=0o700)
            return home


def differences(name: str, answers: list[tuple[Command, Answer]]) -> str:
    """Each command that printed something else, or ended otherwise; after one that never ended, no more."""
    found = []
    for command, answer in answers:
        if not answer.fits(command):
            ended = f"[exit {answer.status}]" if answer.status is not None else "[the session ended here]"
            wanted = [*command.output, f"[exit {command.status}]"]
            found.append(f"{name}:{command.first - 1}: $ {command.text}\n--- the page\n" + "\n".join(wanted))
            found.append(f"--- the command\n{answer.output.rstrip()}\n{ended}\n")
        if answer.status is None:
            break
    return "\n".join(found)


# The examples of the errors are broken on purpose, and those of a checkout are for what the page adds to it.
@pytest.mark.parametrize(
    "name",
    [n for n, page in PAGES.items() if n != "docs/reference/errors.md" and "checkout" not in page.chosen("given")],
)
def test_manifests_of_a_page_are_fine(name: str, tmp_path: Path) -> None:
    found = []
    for fence in PAGES[name].fences:
        if fence.language == "yaml" and fence.text.startswith("apiVersion: runner/"):
            file = tmp_path / f"line-{fence.line}.runner.yaml"
            file.write_text(fence.text)
            found += load(file)[1]

    assert render(found) == ""


@pytest.mark.parametrize("name", PAGES)
def test_links_of_a_page_lead_somewhere(name: str) -> None:
    assert [link for link in PAGES[name].links if not leads(PAGES[name], link)] == []


@pytest.mark.parametrize("name", sorted(PAGES.keys() - {"docs/reference/policy-patterns.md"}))  # which invents files
def test_files_of_this_repository_that_a_page_names_are_here(name: str) -> None:
    """``NAME`` and other words in capitals stand for any."""
    page = PAGES[name]
    named = {path for line in page.prose for path in _NAMED.findall(line)}
    made = {fence.file for fence in page.fences if fence.file}

    assert [path for path in sorted(named - made) if not any(ROOT.glob(_ANY.sub("*", path)))] == []


def leads(page: Page, link: str) -> bool:
    """Whether a link's file is here and has the anchor; what is elsewhere is not asked for."""
    url = urlsplit(link)
    if url.scheme:
        return url.scheme in ("https", "mailto")
    target = (page.path.parent / url.path).resolve()
    if url.path and not (target.exists() and target.is_relative_to(ROOT)):
        return False
    return not url.fragment or url.fragment in (read_page(target) if url.path else page).anchors


def test_the_map_names_each_page() -> None:
    named = {link for link in read_page(DOCS / "index.md").links if not link.startswith("..")}

    assert named == {name.removeprefix("docs/") for name in PAGES if name.startswith("docs/")} - {"index.md"}
