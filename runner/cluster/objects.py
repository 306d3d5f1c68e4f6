"""Objects of a cluster's API: read, made, watched and deleted, and programs run in its containers.

A call whose answer was lost is made again for a while, since a server that restarts must not end what runs elsewhere:
an object that is there already was then made by the call before.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
import trio

from runner.cluster.websocket import ExecStream, message_of, open_exec
from runner.core.errors import ProviderBusy, ProviderFailed
from runner.core.sanitize import sanitize
from runner.network.http import Headers
from runner.network.served_session import IDENTITY, JSON_TYPE
from runner.network.upstream import Upstream, UpstreamFailed

PATIENCE = 30.0  # seconds for a server that restarts
CALL_SECONDS = 20.0  # for one answer
_MAX_ANSWER = 16 << 20
_PAGE = "500"  # objects of a list in one answer
_MAX_EVENT = 4 << 20
_BUSY = (429, 500, 502, 503, 504)

Object = Mapping[str, Any]


class Refused(ProviderFailed):
    """The API server answered with an error. ``status`` is the answer's."""

    def __init__(self, message: str, status: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status


class ClusterObjects:
    """The objects of one namespace."""

    def __init__(self, upstream: Upstream, server: str, namespace: str) -> None:
        self._upstream = upstream
        self.server = server
        self.namespace = namespace

    def path(self, resource: str, name: str = "", *, group: str = "") -> str:
        """Return where a resource of the namespace is; ``group`` is that with its version, such as ``batch/v1``."""
        root = f"/apis/{group}" if group else "/api/v1"
        return f"{root}/namespaces/{quote(self.namespace)}/{resource}" + (f"/{quote(name)}" if name else "")

    async def get(self, path: str, **query: str) -> Object | None:
        """Read an object or a list; ``None`` when there is none."""
        whole = f"{path}?{urlencode(query)}" if query else path
        status, text = await self._ask("GET", whole)
        return None if status == 404 else self._object(status, text, f"read {path}")

    async def list_all(self, path: str, **query: str) -> Sequence[Object]:
        """Read all objects of a list, in pages."""
        found: list[Object] = []
        page: dict[str, str] = {}
        while True:
            listed = await self.get(path, limit=_PAGE, **query, **page) or {}
            found += listed.get("items") or ()
            if not (more := (listed.get("metadata") or {}).get("continue")):
                return found
            page = {"continue": str(more)}

    async def create(self, path: str, body: Object, *, again: bool = False) -> Object | None:
        """Make an object; ``None`` when one of its name is there already, but with ``again`` that one."""
        status, text = await self._ask("POST", path, json.dumps(body).encode())
        if status != 409 or "AlreadyExists" not in text.decode(errors="replace"):
            return self._object(status, text, f"make {body['metadata']['name']}")
        return await self.get(f"{path}/{quote(body['metadata']['name'])}") if again else None

    async def delete(self, path: str, *, grace: int | None = None, **query: str) -> None:
        """Delete an object, or all of a list that ``query`` selects; none is no error."""
        words = {**query, **({} if grace is None else {"gracePeriodSeconds": str(grace)})}
        status, text = await self._ask("DELETE", f"{path}?{urlencode(words)}" if words else path)
        if status != 404:
            self._object(status, text, f"delete {path}")

    async def watch(self, path: str, name: str) -> AsyncGenerator[Object | None]:
        """Yield an object as it is, and each time that it has changed; ``None`` at last, once it is gone."""
        while True:
            found = await self.get(f"{path}/{quote(name)}")
            yield found
            if found is None:
                return
            version = str(found["metadata"]["resourceVersion"])
            query = {"watch": "1", "fieldSelector": f"metadata.name={name}", "resourceVersion": version}
            async with aclosing(self._events(f"{path}?{urlencode(query)}")) as events:
                async for event in events:
                    if event.get("type") == "DELETED":
                        yield None
                        return
                    if event.get("type") != "MODIFIED" and event.get("type") != "ADDED":
                        break  # an error: it is too old, and read anew
                    yield event["object"]
            await trio.sleep(0.2)

    async def _events(self, target: str) -> AsyncGenerator[Object]:
        """Yield events until the server, or the way to it, ends the watch."""
        rest = b""
        try:
            async with self._upstream.send("GET", target, _HEADERS, b"") as answer:
                if answer.status != 200:
                    return
                async for chunk in answer.body:
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in filter(None, lines):
                        yield json.loads(line)
                    if len(rest) > _MAX_EVENT:
                        return
        except (UpstreamFailed, ValueError):
            return

    def exec(self, pod: str, container: str, words: Sequence[str]) -> AbstractAsyncContextManager[ExecStream]:
        """Run a program in a container, as ``open_exec`` does."""
        return open_exec(self._upstream, self.namespace, pod, container, words)

    async def ask(self, method: str, path: str, body: Object | None = None) -> tuple[int, Object]:
        """Ask what has no object; return the status of the answer, and the answer."""
        status, text = await self._ask(method, path, b"" if body is None else json.dumps(body).encode())
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        return status, found if isinstance(found, dict) else {"message": message_of(text)}

    async def _ask(self, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
        """Return status and text of an answer. Raises ``ProviderBusy`` when none comes, or only that it cannot be."""
        why, pause = "no answer", 0.1
        deadline = trio.current_time() + PATIENCE
        while True:
            with trio.move_on_after(CALL_SECONDS):
                try:
                    status, text = await self._ask_once(method, target, body)
                    if status not in _BUSY or trio.current_time() >= deadline:
                        return status, text
                    why = message_of(text)
                except UpstreamFailed as error:
                    why = str(error)
            if trio.current_time() >= deadline:
                raise ProviderBusy(f"cluster {self.server} cannot be reached: {sanitize(why)}", hint=REACH_HINT)
            await trio.sleep(pause)
            pause = min(2 * pause, 2.0)

    async def _ask_once(self, method: str, target: str, body: bytes) -> tuple[int, bytes]:
        async with self._upstream.send(method, target, _HEADERS, body) as answer:
            text = b""
            async for chunk in answer.body:
                text += chunk
                if len(text) > _MAX_ANSWER:
                    raise ProviderFailed(f"an answer of cluster {self.server} exceeds {_MAX_ANSWER >> 20} MiB")
            return answer.status, text

    def _object(self, status: int, text: bytes, doing: str) -> Object:
        if 200 <= status < 300:
            try:
                found = msgspec.json.decode(text)
            except msgspec.DecodeError:
                found = None
            if isinstance(found, dict):
                return found
            raise ProviderFailed(f"cluster {self.server} answers in no JSON")
        said = sanitize(message_of(text))
        hint = _ACCESS_HINT if status in (401, 403) and "exceeded quota" not in said else None
        raise Refused(f"the cluster does not {doing}: {said}", status, hint=hint)


_HEADERS: Headers = [(b"accept", JSON_TYPE), (b"content-type", JSON_TYPE), IDENTITY]
REACH_HINT = "`kubectl version` should answer; VPN?"
_ACCESS_HINT = "run `runner cluster check`, which names the rights that are missing"
