"""Pages of the server, and the report of a run, in a real browser."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.report.html.run import render_run
from tests.server.test_oidc_login import LoginIssuer, open_issuer
from tests.server.test_oidc_login import options as login_options
from tests.support.browser import PHONE, axe_finds, chromium, heard_by, unfolded, width_of
from tests.support.needs import AXE, CHROMIUM
from tests.support.pages import HOSTILE, hostile
from tests.support.server import Served, serving
from tests.support.situations import Project, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [CHROMIUM.mark, AXE.mark]

TEXT = HOSTILE.replace("\x00", "").replace("\ud800", "").replace("'", "")  # what a script can print
LIVE = f"mkdir output; printf '%s\\n' '{TEXT}' | tee 'a<b>&c' output/r.md; echo \"$0\""
FOCUSED = "document.activeElement.innerText.trim()"
KINDS: dict[str, dict[str, Any]] = {"light": {}, "dark": {"color_scheme": "dark"}, "phone": PHONE}


def press_to(page: Page, name: str) -> None:
    """Press the tabulator until what has this text is focused."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate(FOCUSED) == name:
            return
    raise AssertionError(f"{name} is not reached")


def run(served: Served) -> str:
    """Start the run of the project, and return the path of its page."""
    return f"/runs/{served.post('/runs')['runs'][0]['id']}"


def ended(served: Served, path: str) -> None:
    until(lambda: served.get(path)["exit_code"] is not None)


@pytest.fixture
def online(project: Project) -> Iterator[Served]:
    project.script(LIVE)
    with serving(project, "--manifests", str(project.folder), "--listen", "127.0.0.1:0") as served:
        yield served


@pytest.mark.scenario("BEY-30")
def test_page_and_report_are_usable_by_keyboard_on_a_phone_and_on_paper_and_harmless(
    online: Served, tmp_path: Path
) -> None:
    path = run(online)
    report = tmp_path / "report.html"
    report.write_text(render_run(hostile(3, 1_000)))
    asked: list[str] = []
    with chromium() as browser:
        page = browser.new_context(**PHONE).new_page()
        heard = heard_by(page)
        page.on("request", lambda request: asked.append(request.url))
        page.goto(online.url)
        assert (axe_finds(page), width_of(page)) == ([], 360)
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        page.keyboard.type(online.token)
        page.keyboard.press("Enter")
        page.wait_for_url(f"{online.url}/")
        assert (axe_finds(page), width_of(page)) == ([], 360)
        ended(online, path)
        press_to(page, "work")
        page.keyboard.press("Enter")
        page.wait_for_url(f"{online.url}{path}")
        press_to(page, "Skip to the content") if page.evaluate(FOCUSED) else page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.url.endswith("#main")
        for place in (None, report.as_uri()):
            if place is not None:
                page.goto(place)
            assert (axe_finds(page), width_of(page), page.title() == "1") == ([], 360, False)
            assert "<script>document.title=1</script>" in page.locator("main").inner_text()
            page.emulate_media(media="print")
            assert unfolded(page)
            page.emulate_media(media="screen")
        page.context.close()
    assert heard == []
    assert [url for url in asked if not url.startswith((f"{online.url}/", report.as_uri()))] == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def visit(browser: Browser, online: Served) -> Iterator[Callable[..., Page]]:
    """Open a page after a login. At the end: no script failed, and no policy was broken."""
    heard: list[list[str]] = []

    def opened(path: str, **how: Any) -> Page:
        page = browser.new_context(**how).new_page()
        heard.append(heard_by(page))
        page.goto(f"{online.url}/login")
        page.fill("#token", online.token)
        page.keyboard.press("Enter")
        page.wait_for_url(f"{online.url}/")
        page.goto(f"{online.url}{path}")
        return page

    yield opened
    refused = "Failed to load resource: the server responded with a status of 4"
    assert [text for each in heard for text in each if not text.startswith(refused)] == []


def picture(page: Page, name: str) -> None:
    """Keep a picture where ``RUNNER_TESTS_PICTURES`` says, for a person to look at."""
    if folder := os.environ.get("RUNNER_TESTS_PICTURES"):
        page.screenshot(path=Path(folder, f"{name}.png"), full_page=True)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_axe_finds_nothing_on_any_page(online: Served, visit: Callable[..., Page], kind: str) -> None:
    workspace = online.post("/workspaces", {"tools": ["bash"]})["id"]
    online.post("/agent-types", {"name": "worker"})
    online.post("/sessions", {"agent_type": "worker"})
    path = run(online)
    ended(online, path)
    page = visit("/", **KINDS[kind])
    shown: dict[str, Any] = {}
    for place in ("/", "/plan", "/workspaces", "/sessions", "/host", path, "/runs/none", "/?state=odd"):
        page.goto(f"{online.url}{place}")
        picture(page, f"{kind}{place.replace('/', '-')}")
        shown[place] = (axe_finds(page), width_of(page) <= (360 if kind == "phone" else 1280))
    online.ask("DELETE", f"/api/v1/workspaces/{workspace}?discard=true")

    assert shown == dict.fromkeys(shown, ([], True))


@pytest.fixture
def issued(project: Project, tmp_path: Path) -> Iterator[tuple[Served, LoginIssuer]]:
    """A server at which one can log in by an issuer too."""
    with open_issuer() as issuer:
        listen = ("--manifests", str(project.folder), "--listen", "127.0.0.1:0")
        project.script("true")
        with serving(project, *listen, *login_options(issuer, tmp_path)) as served:
            yield served, issuer


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_axe_finds_nothing_on_the_pages_of_a_login_and_of_what_was_not_done(
    issued: tuple[Served, LoginIssuer], browser: Browser, kind: str
) -> None:
    """By token and by issuer: asked, refused, on the way back; and a page, a form and a run that cannot be had."""
    served, issuer = issued
    url = served.url.replace("127.0.0.1", "localhost")  # another site than that of the issuer
    page = browser.new_context(**KINDS[kind]).new_page()
    heard = heard_by(page)
    shown: dict[str, Any] = {}

    def look(name: str, heading: str) -> None:
        page.get_by_role("heading", name=heading, exact=True).wait_for()
        picture(page, f"{kind}-{name}")
        shown[name] = (axe_finds(page), width_of(page) <= (360 if kind == "phone" else 1280))

    page.goto(f"{url}/plan")
    look("login", "Log in")
    page.fill("#token", "rt_tests_guess")
    page.keyboard.press("Enter")
    page.get_by_role("alert").wait_for()
    look("login-refused", "Log in")
    issuer.error = "access_denied"
    page.get_by_text("log in with 127.0.0.1").click()
    page.get_by_role("alert").wait_for()
    look("login-refused-by-issuer", "Log in")
    issuer.error, issuer.claims = "", {"sub": "mary"}
    page.route(f"{url}/plan", lambda route: route.fulfill(status=204))  # which leaves the page where it is
    page.goto(f"{url}/login?next=/plan")
    page.get_by_text("log in with 127.0.0.1").click()
    look("logged-in", "Logged in")
    page.unroute(f"{url}/plan")
    for name, place in (("no-run", "/runs/none"), ("no-state", "/?state=odd"), ("not-for-a-reader", "/plan")):
        page.goto(f"{url}{place}")
        look(name, "Not done")
    page.evaluate("document.querySelector('form[action=\"/logout\"] [name=proof]').value = 'x'")
    page.get_by_role("button", name="Log out").click()
    look("not-its-form", "Not done")

    assert shown == dict.fromkeys(shown, ([], True))
    refused = "Failed to load resource: the server responded with a status of 4"
    assert [text for text in heard if not text.startswith(refused)] == []


@pytest.mark.nightly
@pytest.mark.parametrize("scripts", [True, False], ids=["with scripts", "without"])
def test_a_run_is_followed_and_stopped_in_a_browser(online: Served, visit: Callable[..., Page], scripts: bool) -> None:
    """Without scripts the page loads itself again."""
    online.project.script("echo first; sleep 3; echo second; sleep 300")
    path = run(online)
    page = visit(path, java_script_enabled=scripts)
    page.get_by_text("first", exact=True).wait_for()
    page.get_by_text("second", exact=True).wait_for()
    picture(page, f"live-{scripts}")
    if scripts:
        assert axe_finds(page) == []

    page.get_by_text("Cancel…").click()
    page.get_by_role("button", name="Cancel").click()

    page.locator(".status.cancelled").wait_for()
    page.get_by_role("heading", name="Evidence").wait_for()
    picture(page, f"cancelled-{scripts}")
    page.get_by_text("Resume…").click()
    online.project.script("echo done >file")
    page.get_by_role("button", name="Resume").click()
    page.locator(".status.succeeded").first.wait_for()
