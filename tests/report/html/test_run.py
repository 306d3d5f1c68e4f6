"""The page of a run: its golden file, and that nothing which an agent wrote is more than text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec.structs import replace

from runner.events.events import Event
from runner.report.html.run import RunContents, render_comparison, render_run
from tests.support.pages import hostile, ordinary
from tests.support.run_files import CHECKS, account, bad, begin, good, record

GOLDEN = Path(__file__).parents[2] / "cases" / "html" / "run.html"
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Elements, attributes and text of a page. Raises for one that is not well formed."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += ((tag, name, value or "") for name, value in attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def values(self, name: str) -> list[str]:
        return [value for _, at, value in self.attributes if at == name]


@pytest.fixture(scope="module", params=[ordinary, lambda: hostile(10_000, 1_000_000)], ids=["ordinary", "hostile"])
def page(request: pytest.FixtureRequest) -> Page:
    contents: RunContents = request.param()
    return Page(render_run(contents))


def test_the_page_of_an_ordinary_run_is_as_in_its_case(request: pytest.FixtureRequest) -> None:
    found = re.sub(r"(?s)<style>.*</style>", "<style></style>", render_run(ordinary()))
    found = re.sub(r"sha256-[^']+", "sha256-STYLE", found)

    if request.config.getoption("--update-cases"):
        GOLDEN.write_text(found)
    assert found == GOLDEN.read_text()


def test_a_page_asks_nobody_for_anything_and_runs_nothing(page: Page) -> None:
    assert not page.tags & {"script", "img", "iframe", "object", "embed", "form", "base", "audio", "video"}
    assert not [name for _, name, _ in page.attributes if name.startswith("on") or name in ("style", "src", "srcdoc")]
    assert [href for tag, name, href in page.attributes if name == "href" and not href.startswith("#")] == ["data:,"]
    (policy,) = [value for value in page.values("content") if "default-src" in value]
    assert re.fullmatch(
        r"default-src 'none'; style-src 'sha256-[\w+/]{43}='; img-src data:; base-uri 'none'; form-action 'none'",
        policy,
    )


def test_each_link_of_a_page_leads_to_one_place(page: Page) -> None:
    ids = page.values("id")

    assert len(set(ids)) == len(ids)
    assert {href[1:] for href in page.values("href") if href.startswith("#")} <= {*ids}


def test_nothing_in_a_page_turns_text_round_or_hides_it(page: Page) -> None:
    assert page.text.replace("\n", "").isprintable()
    assert all(value.isprintable() for _, _, value in page.attributes)


def test_a_page_of_ten_thousand_events_and_endless_lines_stays_small() -> None:
    assert len(render_run(hostile(10_000, 10_000_000)).encode()) < 4 << 20


@pytest.mark.parametrize("end", [good(CHECKS), bad()], ids=["good", "bad"])
def test_a_run_has_a_page_at_every_point_of_its_way(end: list[Event]) -> None:
    events = [*begin("work", "r1"), *end]
    for seen in range(1, len(events) + 1):
        contents = replace(ordinary(), account=replace(account([]), record=record(events[:seen])))
        assert "<h2>Evidence</h2>" in render_run(contents)


def test_an_open_network_is_said_before_all_else() -> None:
    contents = ordinary()
    contents.account.record.open_network = ("setup",)

    assert '<header>\n<p class="banner">NETWORK OPEN: setup may reach every public host</p>\n<h1>' in render_run(
        contents
    )


def test_several_runs_stand_beside_each_other_with_how_each_ended() -> None:
    page = Page(
        render_comparison([account(good(), name="work.a", run="r1"), account(bad("<b>"), name="work.b", run="r2")])
    )

    assert "✓ succeeded" in page.text
    assert "agent: <b>" in page.text
    assert "runner runs show r2 --output html" in page.text
