"""A read-only session with a cluster: each request is parsed, forwarded or refused, and reported when it has ended.

The forwarded request is written from the parsed one (``requests``); of the client's headers only those pass that say
which form of an answer it wants. Nothing of an answer is kept here beyond the piece that passes.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import trio

from runner.cluster.access_review import json_object, parse_review
from runner.cluster.kubeconfig import ClusterTarget
from runner.cluster.requests import KubeRequest, parse_request, refusal_of
from runner.core.errors import RunnerError
from runner.core.model import ClusterRefusal
from runner.core.sanitize import sanitize
from runner.network.http import Headers, Request, Response
from runner.network.served_session import (
    IDENTITY,
    JSON_TYPE,
    RequestRefused,
    ServedSession,
    is_encoded,
    select_headers,
)
from runner.network.upstream import Upstream, UpstreamFailed, UpstreamResponse
from runner.ports.cluster import MAX_REPORTED, ClusterPermissions, ClusterRequest

ASK_SECONDS = 5.0  # for a question of the runner's own
MAX_REQUESTS = 64  # under way at once; watches count
BUSY_SECONDS = 10.0  # until one of them ends; then no Retry-After, which clients obey ten times in silence
READ_SECONDS = 90.0  # for the head and each piece of an answer that is no stream; the API server gives up after 60
MAX_BODY = 64 << 10  # of a request: reviews are the only ones that have one
_MAX_ANSWER = 64 << 10  # of the answer to such a question
_REQUEST_HEADERS = frozenset({b"accept", b"content-type", b"if-none-match", b"if-modified-since"})
_RESPONSE_HEADERS = frozenset(
    {b"content-type", b"etag", b"last-modified", b"cache-control", b"vary", b"warning", b"retry-after", b"audit-id"}
)
_HOSTS = frozenset({"127.0.0.1", "localhost"})
_ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"

# The fields of ``ClusterPermissions``, and what each asks about: group, resource, subresource.
_PERMISSIONS = (
    ("pods", "", "pods", ""),
    ("logs", "", "pods", "log"),
    ("events", "", "events", ""),
    ("deployments", "apps", "deployments", ""),
    ("services", "", "services", ""),
    ("configmaps", "", "configmaps", ""),
    ("nodes", "", "nodes", ""),
)

_STATUSES = {ClusterRefusal.CLUSTER: (502, "ServiceUnavailable"), ClusterRefusal.BUSY: (429, "TooManyRequests")}
_FORBIDDEN = (403, "Forbidden")
_NO_IMPERSONATION = (
    "impersonation (`--as`) is not forwarded: requests are made with the runner's account only; "
    "read the roles and their bindings to learn what another account may do"
)


class ClusterRefused(RequestRefused):
    """A request is answered here, with a ``Status`` as of the API server, which clients print."""

    def __init__(self, refusal: ClusterRefusal, message: str) -> None:
        super().__init__(refusal, f"runner: {message}", _STATUSES.get(refusal, _FORBIDDEN)[0])
        self.cluster_refusal = refusal


class ReadOnlySession(ServedSession):
    """See the port."""

    def __init__(
        self,
        target: ClusterTarget,
        upstream: Upstream,
        on_request: Callable[[ClusterRequest], None],
        *,
        max_reported: int = MAX_REPORTED,
    ) -> None:
        super().__init__(large_places=1, max_body=MAX_BODY)
        self._target = target
        self._upstream = upstream
        self._on_request = on_request
        self._places = trio.Semaphore(MAX_REQUESTS)
        self.credential_errors: dict[str, str] = {}
        self._left_to_report = max_reported
        self._unreported: Counter[tuple[str, ClusterRefusal | None]] = Counter()

    def close(self) -> None:
        """End what is still under way, and report the requests that were only counted."""
        super().close()
        for (verb, refusal), count in self._unreported.items():
            self._on_request(
                ClusterRequest(
                    verb=verb, resource="", namespace="", status=0, seconds=0.0, refusal=refusal, count=count
                )
            )
        self._unreported.clear()

    async def permissions(self) -> ClusterPermissions:
        answers: dict[str, bool] = {}
        unknown: defaultdict[str, list[str]] = defaultdict(list)  # by why

        async def review(field: str, group: str, resource: str, subresource: str) -> None:
            question = {
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
            status, text = await ask(self._upstream, "POST", _ACCESS_REVIEWS, json.dumps(question).encode())
            allowed = _inner(json_object(text) or {}, "status").get("allowed") if status == 201 else None
            if isinstance(allowed, bool):
                answers[field] = allowed
            elif status is None:
                unknown[sanitize(text)].append(field)
            else:
                unknown[f"the cluster answered {status}" + " without saying it" * (status == 201)].append(field)

        async with trio.open_nursery() as nursery:
            for each in _PERMISSIONS:
                nursery.start_soon(review, *each)
        order = [field for field, *_ in _PERMISSIONS]
        named = {why: ", ".join(sorted(lacking, key=order.index)) for why, lacking in unknown.items()}
        warnings = sorted(f"whether {fields} can be read is not known: {why}" for why, fields in named.items())
        return ClusterPermissions(
            cluster=self._target.context, namespace=self._target.namespace, **answers, warnings=tuple(warnings)
        )

    def _error_body(self, refused: RequestRefused) -> bytes:
        code, reason = _STATUSES.get(ClusterRefusal(refused.refusal), _FORBIDDEN)
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        return json.dumps({**status, "message": str(refused), "reason": reason, "code": code}).encode()

    async def _exchange(self, request: Request, response: Response) -> None:
        parsed = parse_request(request.method, request.target)
        refusal: ClusterRefusal | None = None
        try:
            _check_client(request, parsed)
            if parsed.review and (answer := _denied_review(request.body)) is not None:
                await response.send_all(201, JSON_TYPE, answer)
            else:
                await self._forward_in_turn(parsed, request, response)
        except ClusterRefused as refused:
            refusal = refused.cluster_refusal
            if response.status:
                response.cut()
            else:
                await self._refuse(response, refused)
        finally:
            self._report(parsed, response.status, trio.current_time() - request.began, refusal)

    def _report(self, parsed: KubeRequest, status: int, seconds: float, refusal: ClusterRefusal | None) -> None:
        if not self._left_to_report and not self._connections.closed:
            self._unreported[parsed.verb, refusal] += 1
            return
        self._left_to_report -= not self._connections.closed
        self._on_request(
            ClusterRequest(
                verb=parsed.verb,
                resource=parsed.resource,
                namespace=parsed.namespace,
                status=status,
                seconds=seconds,
                refusal=refusal,
            )
        )

    async def _forward_in_turn(self, parsed: KubeRequest, request: Request, response: Response) -> None:
        with trio.move_on_after(BUSY_SECONDS) as waiting:
            await self._places.acquire()
        if waiting.cancelled_caught:
            message = f"{MAX_REQUESTS} requests are under way; end a watch or a log first"
            raise ClusterRefused(ClusterRefusal.BUSY, message)
        try:
            await self._forward(parsed, request, response)
        finally:
            self._places.release()

    async def _forward(self, parsed: KubeRequest, request: Request, response: Response) -> None:
        """Forward a request and its answer. Raises ``ClusterRefused``."""
        failure: str | None = "it stalled"
        patience = math.inf if parsed.streams else READ_SECONDS
        with trio.CancelScope(deadline=trio.current_time() + patience) as waiting:
            try:
                body = request.body if parsed.review else b""
                headers = [*select_headers(request.headers, _REQUEST_HEADERS), IDENTITY]
                async with self._upstream.send(request.method, parsed.target, headers, body) as answer:
                    await _pass(answer, response, waiting, streams=parsed.streams)
                failure = None
            except UpstreamFailed as error:
                failure = str(error)
            except RunnerError as error:  # whose message names places of this host
                self.credential_errors[error.message] = error.code
                failure = "its credential is gone"
        if failure is not None:
            raise ClusterRefused(ClusterRefusal.CLUSTER, f"the cluster cannot be reached: {sanitize(failure)}")


async def _pass(answer: UpstreamResponse, response: Response, waiting: trio.CancelScope, *, streams: bool) -> None:
    """Send an answer on as it comes. A client may take its time; a server may not, unless it ``streams``."""
    if is_encoded(answer):
        raise UpstreamFailed("it answers in an encoding that was not asked for")
    await response.start(answer.status, select_headers(answer.headers, _RESPONSE_HEADERS))
    patience = math.inf if streams and answer.status < 400 else READ_SECONDS
    waiting.deadline = trio.current_time() + patience
    async for chunk in answer.body:
        waiting.deadline = math.inf
        await response.send(chunk)
        waiting.deadline = trio.current_time() + patience


def _check_client(request: Request, parsed: KubeRequest) -> None:
    """Raise ``ClusterRefused`` for a request that a client which only reads does not make."""
    names = {name for name, _ in request.headers}  # and not their values: a second one may follow an empty one
    host = request.header(b"host").decode("ascii", "replace").rpartition(":")
    if b"upgrade" in names:
        message = "read only: nothing can be run, attached or forwarded in this cluster"
        raise ClusterRefused(parsed.refusal or ClusterRefusal.REQUEST, message)
    if b"origin" in names or (host[0] or host[2]) not in _HOSTS:
        message = "only clients of this workspace are answered"
        raise ClusterRefused(parsed.refusal or ClusterRefusal.REQUEST, message)
    if why := _foreign_identity(request.headers):
        raise ClusterRefused(ClusterRefusal.IMPERSONATION, why)
    if parsed.refusal is not None:
        raise ClusterRefused(parsed.refusal, parsed.message)


def _foreign_identity(headers: Headers) -> str | None:
    """Return why a request is not the runner's account's own: it brings a credential, or impersonates somebody.

    Identities stand in the API server's headers, or in those of a proxy before it. The answer would be for the
    runner's account instead.
    """
    names = {name.replace(b"_", b"-") for name, _ in headers}
    if b"authorization" in names:
        return "a credential of your own (`--token`) is not forwarded: requests are made with the runner's account only"
    return _NO_IMPERSONATION if any(name.startswith((b"impersonate-", b"x-remote-")) for name in names) else None


def _denied_review(body: bytes) -> bytes | None:
    """Return the answer about a permission that nobody has here; ``None`` when the cluster must answer."""
    review = parse_review(body)
    wanted = _inner(_inner(review or {}, "spec"), "resourceAttributes")
    keys = ("verb", "group", "resource", "subresource")
    words = [value if isinstance(value := wanted.get(key), str) else "" for key in keys]
    if review is None or not wanted or refusal_of(*words) is None:
        return None
    denied = {"allowed": False, "denied": True, "reason": "runner: this cluster is read-only here, without secrets"}
    return json.dumps({**review, "status": denied}).encode()


async def ask(upstream: Upstream, method: str, path: str, body: bytes = b"") -> tuple[int | None, str]:
    """Ask the cluster; return status and text of the answer, or no status and the reason when none comes in time."""
    with trio.move_on_after(ASK_SECONDS):
        try:
            headers: Headers = [(b"accept", JSON_TYPE), (b"content-type", JSON_TYPE), IDENTITY]
            async with upstream.send(method, path, headers, body) as answer:
                text = b""
                async for chunk in answer.body:
                    text += chunk
                    if len(text) >= _MAX_ANSWER:
                        break
                return answer.status, text[:_MAX_ANSWER].decode(errors="replace")
        except (UpstreamFailed, RunnerError) as error:
            return None, str(error)
    return None, f"no answer in {ASK_SECONDS:g} s"


def _inner(value: dict[str, Any], key: str) -> dict[str, Any]:
    found = value.get(key)
    return found if isinstance(found, dict) else {}
