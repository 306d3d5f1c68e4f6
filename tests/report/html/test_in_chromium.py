"""Pages in a real browser: usable by keyboard, on a phone and on paper, and harmless whatever stands in them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.report.html.run import render_comparison, render_run
from tests.support.browser import PHONE, axe_finds, chromium, heard_by, unfolded, width_of
from tests.support.needs import AXE, CHROMIUM
from tests.support.pages import hostile, ordinary
from tests.support.run_files import account, bad, good

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.nightly, CHROMIUM.mark]

QUICKSTART = Path(__file__).parents[3] / "manifests" / "quickstart"
PLAN = [sys.executable, "-m", "runner", "plan", "--offline", str(QUICKSTART), "--output", "html"]
PAGES: dict[str, Callable[[], str]] = {
    "ordinary": lambda: render_run(ordinary()),
    "hostile": lambda: render_run(hostile(60, 100_000)),
    "many events": lambda: render_run(hostile(10_000, 10_000_000)),
    "plan": lambda: subprocess.check_output(PLAN, text=True, env={"HOME": "/nonexistent"}),
    "several": lambda: render_comparison([account(good()), account(bad("<b>"), name="other", run="r2")]),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture
def show(browser: Browser, folder: Path) -> Iterator[Callable[..., Page]]:
    """Open a page of that name. At the end: it asked nobody for anything, and its policy was not broken."""
    heard: list[str] = []
    told: list[list[str]] = [heard]

    def opened(name: str, **how: Any) -> Page:
        file = folder / f"{name}.html"
        if not file.exists():
            file.write_text(PAGES[name]())
        page = browser.new_context(**how).new_page()
        told.append(heard_by(page))
        page.on("request", lambda request: heard.append(request.url) if request.url != file.as_uri() else None)
        page.goto(file.as_uri())
        return page

    yield opened
    assert [text for each in told for text in each] == []


@AXE.mark
@pytest.mark.parametrize("how", [{}, {"color_scheme": "dark"}, PHONE], ids=["light", "dark", "phone"])
@pytest.mark.parametrize("name", ["ordinary", "hostile", "plan", "several"])
def test_axe_finds_nothing(show: Callable[..., Page], name: str, how: dict[str, Any]) -> None:
    page = show(name, **how)

    assert axe_finds(page) == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_no_wider_than_a_phone(show: Callable[..., Page], name: str) -> None:
    page = show(name, **PHONE)

    assert width_of(page) == 360


@pytest.mark.parametrize("name", ["ordinary", "hostile"])
def test_a_page_reads_the_same_without_scripts(show: Callable[..., Page], name: str) -> None:
    texts = [show(name, java_script_enabled=on).locator("body").inner_text() for on in (True, False)]

    assert texts[0] == texts[1]
    assert show(name).title() != "1"


def test_everything_is_reached_by_keyboard(show: Callable[..., Page]) -> None:
    page = show("ordinary")
    focused = "document.activeElement.innerText"
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "Skip to the content"
    seen = []
    while page.evaluate("document.activeElement !== document.body"):
        seen.append(page.evaluate(focused))
        page.keyboard.press("Tab")

    assert {"Report", "Evidence", "kubectl/pods.txt:2-3", "what verify printed", "its words"} <= {*seen}
    page.get_by_text("what verify printed").focus()
    page.keyboard.press("Enter")
    assert page.get_by_text("ok", exact=True).is_visible()
    page.get_by_role("link", name="kubectl/pods.txt:2-3").first.press("Enter")
    assert page.evaluate("document.querySelector(':target').id") == "lines-1"


def test_on_paper_nothing_is_folded(show: Callable[..., Page]) -> None:
    page = show("hostile")
    assert not unfolded(page)

    page.emulate_media(media="print")

    assert unfolded(page)
    assert page.pdf().startswith(b"%PDF")
