"""Images of registries: what a name means there, and bringing it to the daemon, which is who asks the registry."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import quote, urlencode

import trio

from runner.core.errors import ImageMissing, ProviderFailed, PullFailed, RegistryDenied, RegistryUnreachable
from runner.core.sanitize import excerpt, sanitize
from runner.ports.provider import PullReport
from runner.sandbox.daemon_stream import call
from runner.sandbox.docker_api import Engine
from runner.sandbox.registry_credentials import HUB

REPORT_PAUSE = 5.0  # seconds between two reports of progress
RESOLVE_TIMEOUT = 60.0
_LAYERS = 1_000  # an image has at most 127

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_DENIED = re.compile(r"unauthorized|denied|authentication required|no basic auth|forbidden", re.IGNORECASE)
_ABSENT = re.compile(r"manifest unknown|name unknown|not found|no such manifest", re.IGNORECASE)
_UNREACHED = re.compile(
    r"dial tcp|no such host|connection (refused|reset)|i/o timeout|network is unreachable|x509|tls:|Client\.Timeout"
    r"|server misbehaving|deadline exceeded|gave HTTP response|\bEOF\b",
    re.IGNORECASE,
)
_WRONG = re.compile(r"verification failed|digest mismatch|did not match|unexpected digest", re.IGNORECASE)
_FULL = "no space left"
_NO_SUCH_CALL = "Not Found"  # podman's, in the place of a sentence about the image


def split_name(name: str) -> tuple[str, str]:
    """Split a reference into its repository and ``:TAG``, ``@DIGEST`` or both, which may be empty."""
    repository, at, digest = name.partition("@")
    folder, slash, last = repository.rpartition("/")
    last, colon, tag = last.partition(":")
    return f"{folder}{slash}{last}", f"{colon}{tag}{at}{digest}"


def full_repository(name: str) -> tuple[str, str]:
    """Return the registry and the path in it that a reference means."""
    repository = split_name(name)[0]
    first, _, rest = repository.partition("/")
    if rest and ("." in first or ":" in first or first == "localhost"):
        registry, path = first, rest
    else:
        registry, path = HUB, repository
    return registry, f"library/{path}" if registry == HUB and "/" not in path else path


def pin_of(name: str, image: Mapping[str, Any]) -> str:
    """Return what ``name`` means for good: its repository with the digest in it, else the id that ``image`` has here.

    So an image that is here is pinned by the same words as it was before it was pulled.
    """
    known = (one.partition("@") for one in image.get("RepoDigests") or ())
    digests = sorted(digest for of, _, digest in known if full_repository(of) == full_repository(name))
    if not digests:
        return str(image["Id"])
    asked = name.partition("@")[2]
    return f"{split_name(name)[0]}@{asked if asked in digests else digests[0]}"


async def resolve(engine: Engine, name: str) -> str:
    """Return ``name`` with the digest that its registry has for it. Nothing is downloaded.

    Raises ``ImageMissing``, ``RegistryDenied``, ``RegistryUnreachable``, ``PullFailed``, ``CredentialHelperFailed``,
    and ``ProviderFailed`` for the daemon's own failures.
    """
    with trio.move_on_after(RESOLVE_TIMEOUT):
        target = f"/distribution/{quote(name, safe='/:@')}/json"
        async with call(engine, "GET", target, await _headers(engine, name)) as answer:
            if answer.status != 200:
                words = await answer.refusal()
                if words == _NO_SUCH_CALL:
                    message = f"podman has no image `{excerpt(name)}`, and its socket tells no digest of a registry"
                    raise ImageMissing(message, hint=f"podman pull {name}")
                raise fault_of(name, words, answer.status)
            async with aclosing(answer.objects()) as objects:
                async for found in objects:
                    digest = found.get("Descriptor", {}).get("digest")
                    if isinstance(digest, str) and _DIGEST.fullmatch(digest):
                        return f"{split_name(name)[0]}@{digest}"
        raise ProviderFailed(f"the docker daemon does not say what `{name}` is")
    raise fault_of(name, f"i/o timeout: no answer within {RESOLVE_TIMEOUT:.0f}s")


async def pull(engine: Engine, image: str, report: PullReport | None = None) -> None:
    """Bring ``REPOSITORY@DIGEST`` to the daemon; ``report`` gets bytes received and expected, from time to time.

    Cancelling ends the pull. Raises as ``resolve`` does.
    """
    repository, mark = split_name(image)
    words = {"fromImage": repository, "tag": mark.lstrip("@:")}
    progress, due = _Progress(), trio.current_time() + REPORT_PAUSE
    async with call(engine, "POST", f"/images/create?{urlencode(words)}", await _headers(engine, image)) as answer:
        if answer.status != 200:
            raise fault_of(image, await answer.refusal(), answer.status)
        async with aclosing(answer.objects()) as objects:
            async for said in objects:
                if error := said.get("error"):
                    raise fault_of(image, sanitize(str(error)))
                progress.add(said)
                if report is not None and trio.current_time() >= due:
                    await report(*progress.bytes)
                    due = trio.current_time() + REPORT_PAUSE
    if report is not None:
        await report(*progress.bytes)


class _Progress:
    """The bytes of each layer that the daemon tells of."""

    def __init__(self) -> None:
        self._layers: dict[str, tuple[int, int]] = {}

    def add(self, said: Mapping[str, Any]) -> None:
        layer, status, detail = str(said.get("id", "")), said.get("status"), said.get("progressDetail")
        if status == "Downloading" and isinstance(detail, dict):
            done, total = detail.get("current"), detail.get("total")
            known = layer in self._layers or len(self._layers) < _LAYERS
            if isinstance(done, int) and isinstance(total, int) and known:
                self._layers[layer] = (done, max(done, total))
        elif status in ("Download complete", "Pull complete") and layer in self._layers:
            total = self._layers[layer][1]
            self._layers[layer] = (total, total)

    @property
    def bytes(self) -> tuple[int, int]:
        return sum(done for done, _ in self._layers.values()), sum(total for _, total in self._layers.values())


async def _headers(engine: Engine, name: str) -> list[tuple[str, str]]:
    return [("X-Registry-Auth", await engine.login.header(full_repository(name)[0]))]


def fault_of(name: str, words: str, status: int = 0) -> ProviderFailed | ImageMissing:
    """Choose the error for what the daemon says of an image that it could not get."""
    registry, _ = full_repository(name)
    said, by_hand = excerpt(words, 300), f"docker pull {name}"
    if _FULL in words:
        return PullFailed(f"the docker daemon has no room for image `{name}`: {said}", hint="docker system prune")
    if _WRONG.search(words):
        hint = f"ask who runs {registry}; nothing but the pinned bytes is used"
        return PullFailed(f"registry `{registry}` serves something other than `{name}`: {said}", hint=hint)
    if status in (401, 403) or _DENIED.search(words):
        message = f"docker has no image `{name}`, and registry `{registry}` does not give it: {said}"
        return RegistryDenied(message, hint=f"docker login {registry}" if registry != HUB else "docker login")
    if _UNREACHED.search(words):
        message = f"docker has no image `{name}`, and registry `{registry}` cannot be reached: {said}"
        hint = f"look whether the daemon reaches it: {by_hand}; or bring the image by docker save and docker load"
        return RegistryUnreachable(message, hint=hint)
    if status == 404 or _ABSENT.search(words):
        message = f"docker has no image `{name}`, and neither has registry `{registry}`"
        return ImageMissing(message, hint="check its name and tag, or build it")
    return PullFailed(f"image `{name}` cannot be pulled: {said}", hint=by_hand)
