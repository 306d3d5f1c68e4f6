"""Debian's Chromium, as tests of pages drive it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.support import components

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "device_scale_factor": 2}
_FOLDED = "[...document.querySelectorAll('details')].map(each => each.lastElementChild.checkVisibility())"


@contextmanager
def chromium() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield found
        found.close()


def heard_by(page: Page) -> list[str]:
    """Everything that a page says where nobody looks: errors, breaches of its policy, and dialogs."""
    heard: list[str] = []
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("dialog", lambda dialog: heard.append(dialog.message))
    return heard


def axe_finds(page: Page) -> list[tuple[str, list[str]]]:
    """What axe has against a page: rules, with the first elements that break them."""
    page.evaluate((components.AXE / "axe.min.js").read_text())
    found = page.evaluate("axe.run().then(({violations}) => violations)")
    return [(one["id"], [node["html"] for node in one["nodes"]][:3]) for one in found]


def width_of(page: Page) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth"))


def unfolded(page: Page) -> bool:
    return all(page.evaluate(_FOLDED))
