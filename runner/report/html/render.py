"""Templates of the pages, and the one place where values become HTML."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from runner.core.plural import plural
from runner.core.sanitize import sanitize
from runner.report import format as words

if TYPE_CHECKING:
    from jinja2 import Environment

WIDEST = 2_000  # characters of a value or a line
_TEMPLATES = Path(__file__).with_name("templates")


def render(template: str, **values: object) -> str:
    """Render a page, with a final line break."""
    return environment().get_template(template).render(values)


@cache
def environment(*folders: Path) -> Environment:
    """Return the environment of the pages, with further folders of templates."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    found = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        loader=FileSystemLoader([*folders, _TEMPLATES]),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_readable,
    )
    digest = b64encode(hashlib.sha256(style().encode()).digest()).decode()
    found.globals |= {"style": Markup(style()), "style_digest": f"sha256-{digest}", "MARKS": words.MARKS}  # ours
    found.filters |= {
        name: getattr(words, name) for name in ("brief", "cost", "count", "duration", "limits", "open_network")
    }
    found.filters |= {"plural": lambda items, noun: plural(len(items), noun), "moment": _moment}
    return found


def style() -> str:
    return (_TEMPLATES / "page.css").read_text(encoding="utf-8")


def _readable(value: object) -> object:
    """Escape what is not shown or would turn text round, in all that is not HTML already, and cut what is long."""
    return value if hasattr(value, "__html__") else sanitize(str(value)[: WIDEST + 1].expandtabs(4), WIDEST)


def _moment(microseconds: int) -> str:
    return datetime.fromtimestamp(microseconds // 1_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
