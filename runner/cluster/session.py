"""The way to a cluster for reading: each request is judged, sent on, and told when it has ended.

What is forwarded is written anew from what was judged (``verbs``); of the client's headers only those pass that say
which form of an answer it wants. Nothing of an answer is kept here beyond the piece that passes.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import trio

from runner.cluster.access_review import object_of, review_of
from runner.cluster.kubeconfig import Target
from runner.cluster.requests import Asked, Refusal, judge, refusal_of
from runner.core.errors import RunnerError
from runner.core.sanitize import sanitize
from runner.network.http import Headers, Reply, Request, serve_http
from runner.network.upstream import Answer, Upstream, UpstreamFailed
from runner.ports.cluster import MOST_TOLD, ClusterRequest, Rights
from runner.ports.provider import Connection

PATIENCE = 5.0  # seconds for what is asked before anything starts
PLACES = 64  # requests that are under way at once; watches count
BUSY_SECONDS = 10.0  # for one of the places; no Retry-After then, which clients obey ten times without a word
PIECE_SECONDS = 90.0  # for the head and each piece of an answer that is no stream; the API server gives up after 60
MAX_BODY = 64 << 10  # of a request: reviews are the only ones that have one
_MAX_TEXT = 64 << 10  # of what is asked here
_JSON = b"application/json"
_ASKED = frozenset({b"accept", b"content-type", b"if-none-match", b"if-modified-since"})
_ANSWERED = frozenset(
    {b"content-type", b"etag", b"last-modified", b"cache-control", b"vary", b"warning", b"retry-after", b"audit-id"}
)
_PLAIN = (b"accept-encoding", b"identity")  # no credential could be found in anything else
_HOSTS = frozenset({"127.0.0.1", "localhost"})
_ACCESS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"

# What ``rights`` asks about: field, group, resource, subresource.
_RIGHTS = (
    ("pods", "", "pods", ""),
    ("logs", "", "pods", "log"),
    ("events", "", "events", ""),
    ("deployments", "apps", "deployments", ""),
    ("services", "", "services", ""),
    ("configmaps", "", "configmaps", ""),
    ("nodes", "", "nodes", ""),
)


class ReadSession:
    """See the port."""

    def __init__(
        self,
        target: Target,
        upstream: Upstream,
        on_request: Callable[[ClusterRequest], None],
        *,
        most_told: int = MOST_TOLD,
    ) -> None:
        self._target = target
        self._upstream = upstream
        self._on_request = on_request
        self._large = trio.Semaphore(1)
        self._places = trio.Semaphore(PLACES)
        self._scopes: set[trio.CancelScope] = set()
        self._closed = False
        self.complaints: dict[str, str] = {}
        self._left_to_tell = most_told
        self._untold: Counter[tuple[str, str | None]] = Counter()

    async def serve(self, connection: Connection) -> None:
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            if self._closed:
                scope.cancel()
            try:
                await serve_http(connection, self._exchange, self._large, max_body=MAX_BODY)
            finally:
                self._scopes.discard(scope)

    def close(self) -> None:
        """Break off what is still under way, and tell what was not told yet."""
        self._closed = True
        for scope in self._scopes:
            scope.cancel()
        for (verb, refusal), count in self._untold.items():
            self._on_request(ClusterRequest(verb, "", "", 0, 0.0, refusal, count))
        self._untold.clear()

    async def rights(self) -> Rights:
        answers: dict[str, bool] = {}
        unknown: defaultdict[str, list[str]] = defaultdict(list)  # by why

        async def look(field: str, group: str, resource: str, subresource: str) -> None:
            review = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {
                    "resourceAttributes": {
                        "namespace": self._target.namespace if field != "nodes" else "",
                        "verb": "get",
                        "group": group,
                        "resource": resource,
                        "subresource": subresource,
                    }
                },
            }
            status, words = await ask(self._upstream, "POST", _ACCESS, json.dumps(review).encode())
            allowed = _inner(object_of(words) or {}, "status").get("allowed") if status == 201 else None
            if isinstance(allowed, bool):
                answers[field] = allowed
            elif status is None:
                unknown[sanitize(words)].append(field)
            else:
                unknown[f"the cluster answered {status}" + " without saying it" * (status == 201)].append(field)

        async with trio.open_nursery() as nursery:
            for each in _RIGHTS:
                nursery.start_soon(look, *each)
        order = [field for field, *_ in _RIGHTS]
        named = {why: ", ".join(sorted(lacking, key=order.index)) for why, lacking in unknown.items()}
        warnings = sorted(f"whether {fields} can be read is not known: {why}" for why, fields in named.items())
        return Rights(self._target.context, self._target.namespace, **answers, warnings=tuple(warnings))

    # --- one request ---

    async def _exchange(self, request: Request, reply: Reply) -> None:
        asked = judge(request.method, request.target)
        refusal = asked.refusal
        try:
            if message := _uninvited(request):
                refusal = refusal or Refusal.REQUEST
                await _refuse(reply, refusal, message)
            elif message := _as_another(request.headers):
                refusal = Refusal.IMPERSONATION
                await _refuse(reply, refusal, message)
            elif refusal is not None:
                await _refuse(reply, refusal, asked.message)
            elif asked.review and (answer := _own_review(request.body)) is not None:
                await reply.send_all(201, _JSON, answer)
            else:
                refusal = await self._forward_in_turn(asked, request, reply)
        finally:
            self._tell(asked, reply.status, trio.current_time() - request.began, refusal)

    def _tell(self, asked: Asked, status: int, seconds: float, refusal: Refusal | None) -> None:
        why = refusal.value if refusal is not None else None
        if not self._left_to_tell and not self._closed:
            self._untold[asked.verb, why] += 1
            return
        self._left_to_tell -= not self._closed
        self._on_request(ClusterRequest(asked.verb, asked.resource, asked.namespace, status, seconds, why))

    async def _forward_in_turn(self, asked: Asked, request: Request, reply: Reply) -> Refusal | None:
        with trio.move_on_after(BUSY_SECONDS) as waiting:
            await self._places.acquire()
        if waiting.cancelled_caught:
            await _refuse(reply, Refusal.BUSY, f"runner: {PLACES} requests are under way; end a watch or a log first")
            return Refusal.BUSY
        try:
            return await self._forward(asked, request, reply)
        finally:
            self._places.release()

    async def _forward(self, asked: Asked, request: Request, reply: Reply) -> Refusal | None:
        """Let a request through; why that failed, if it did, is answered."""
        failure: str | None = "it did not go on"
        patience = math.inf if asked.streams else PIECE_SECONDS
        with trio.CancelScope(deadline=trio.current_time() + patience) as waiting:
            try:
                await self._pass_on(asked, request, reply, waiting)
                failure = None
            except UpstreamFailed as error:
                failure = str(error)
            except RunnerError as error:  # which names places of this host
                self.complaints[error.message] = error.code
                failure = "its credential cannot be had any more"
        if failure is None:
            return None
        if reply.status:
            reply.cut()
        else:
            await _refuse(reply, Refusal.CLUSTER, f"runner: the cluster cannot be reached: {sanitize(failure)}")
        return Refusal.CLUSTER

    async def _pass_on(self, asked: Asked, request: Request, reply: Reply, waiting: trio.CancelScope) -> None:
        """Raises ``UpstreamFailed``, and what is wrong with the credential by now."""
        body = request.body if asked.review else b""
        headers = [(name, value) for name, value in request.headers if name in _ASKED] + [_PLAIN]
        async with self._upstream.send(request.method, asked.target, headers, body) as answer:
            await _pass(answer, reply, waiting, streams=asked.streams)


async def _pass(answer: Answer, reply: Reply, waiting: trio.CancelScope, *, streams: bool) -> None:
    """Hand an answer on as it comes. A client may take its time; a server may not, unless it ``streams``."""
    if any(name == b"content-encoding" and value.lower() != b"identity" for name, value in answer.headers):
        raise UpstreamFailed("it answers in an encoding that it was not asked for")
    headers = [(name, value) for name, value in answer.headers if name in _ANSWERED]
    await reply.start(answer.status, headers)
    patience = math.inf if streams and answer.status < 400 else PIECE_SECONDS
    waiting.deadline = trio.current_time() + patience
    async for chunk in answer.body:
        waiting.deadline = math.inf
        await reply.send(chunk)
        waiting.deadline = trio.current_time() + patience


def _uninvited(request: Request) -> str | None:
    """Why a request is not of a client that reads: one that changes the protocol, or a page in a browser."""
    names = {name for name, _ in request.headers}  # and not their values: a second one may follow an empty one
    if b"upgrade" in names:
        return "runner: read only: nothing can be run, attached or forwarded in this cluster"
    host = request.header(b"host").decode("ascii", "replace").rpartition(":")
    if b"origin" in names or (host[0] or host[2]) not in _HOSTS:
        return "runner: only clients of this workspace are answered"
    return None


def _as_another(headers: Headers) -> str | None:
    """Why a request is in the name of somebody other than the credential's owner: by a credential of its own, in the
    API server's headers, or in those of a proxy before it. What it asks would be answered for the owner instead."""
    names = {name.replace(b"_", b"-") for name, _ in headers}
    if b"authorization" in names:
        return "runner: a credential of one's own (`--token`) is not forwarded; requests are made with the runner's"
    return _NOBODY_ELSE if any(name.startswith((b"impersonate-", b"x-remote-")) for name in names) else None


def _own_review(body: bytes) -> bytes | None:
    """The answer to a question about a right that nobody has here; ``None`` when it is the cluster's to give."""
    review = review_of(body)
    wanted = _inner(_inner(review or {}, "spec"), "resourceAttributes")
    keys = ("verb", "group", "resource", "subresource")
    words = [value if isinstance(value := wanted.get(key), str) else "" for key in keys]
    if review is None or not wanted or refusal_of(*words) is None:
        return None
    denied = {"allowed": False, "denied": True, "reason": "runner: this cluster is only read here, and no secrets"}
    return json.dumps({**review, "status": denied}).encode()


_NOBODY_ELSE = (
    "runner: nobody else can be acted for: impersonation (`--as`) is not forwarded; "
    "read the roles and their bindings to learn what another may"
)
_STATUSES = {Refusal.CLUSTER: (502, "ServiceUnavailable"), Refusal.BUSY: (429, "TooManyRequests")}


async def _refuse(reply: Reply, refusal: Refusal, message: str) -> None:
    """A ``Status`` as the API server's own, which clients print."""
    code, reason = _STATUSES.get(refusal, (403, "Forbidden"))
    status = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }
    await reply.send_all(code, _JSON, json.dumps(status).encode())


async def ask(upstream: Upstream, method: str, path: str, body: bytes = b"") -> tuple[int | None, str]:
    """Status and text of an answer; no status, and why, when none comes in time."""
    with trio.move_on_after(PATIENCE):
        try:
            headers: Headers = [(b"accept", _JSON), (b"content-type", _JSON), _PLAIN]
            async with upstream.send(method, path, headers, body) as answer:
                text = b""
                async for chunk in answer.body:
                    text += chunk
                    if len(text) >= _MAX_TEXT:
                        break
                return answer.status, text[:_MAX_TEXT].decode(errors="replace")
        except (UpstreamFailed, RunnerError) as error:
            return None, str(error)
    return None, f"no answer in {PATIENCE:g} s"


def _inner(value: dict[str, Any], key: str) -> dict[str, Any]:
    found = value.get(key)
    return found if isinstance(found, dict) else {}
