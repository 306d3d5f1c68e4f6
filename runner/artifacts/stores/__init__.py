"""Stores of artifacts, opened by URL. A scheme is a module of this room, with an ``open_store`` of its own.

One conformance suite for all.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from urllib.parse import parse_qsl, urlsplit

from runner.core import plugins
from runner.core.errors import BadArtifactsUrl, UnknownPlugin, nearest
from runner.core.sanitize import excerpt
from runner.ports.artifacts import ArtifactStore

FORM = "write file:///PATH or s3://BUCKET/PREFIX"
_HERE = sys.modules[__name__]


def open_artifacts(url: str) -> ArtifactStore:
    """Open a store; nothing of it is asked yet. Raises ``BadArtifactsUrl``."""
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise BadArtifactsUrl(f"`RUNNER_ARTIFACTS` is not a URL: {excerpt(str(error))}", hint=FORM) from None
    if parts.username is not None or parts.password is not None or parts.fragment:
        hint = "keys of S3 come from AWS_ACCESS_KEY_ID, a profile or the host's role"
        raise BadArtifactsUrl("`RUNNER_ARTIFACTS` has a user or a fragment, which no such URL has", hint=hint)
    try:
        scheme = plugins.load(_HERE, parts.scheme)
    except UnknownPlugin:
        known = ", ".join(plugins.names(_HERE))
        message = f"`RUNNER_ARTIFACTS` has an unknown scheme: `{excerpt(parts.scheme)}`"
        raise BadArtifactsUrl(message, hint=f"known: {known}") from None
    opened: ArtifactStore = scheme.open_store(parts.netloc, parts.path, options)
    return opened


def check_options(options: Mapping[str, str], known: Mapping[str, frozenset[str] | None]) -> None:
    """Raise ``BadArtifactsUrl`` for an unknown option, or a value that is none of a closed set."""
    for name, value in options.items():
        if name not in known:
            message = f"`RUNNER_ARTIFACTS` has an unknown option `{excerpt(name)}`"
            raise BadArtifactsUrl(message, hint=nearest(name, known) if known else "leave it out")
        choices = known[name]
        if not value or (choices is not None and value not in choices):
            hint = f"write one of: {', '.join(sorted(choices))}" if choices else "write a value, or leave it out"
            raise BadArtifactsUrl(f"option `{name}` of `RUNNER_ARTIFACTS` is `{excerpt(value)}`", hint=hint)
