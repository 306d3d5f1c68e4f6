"""Parse requests to a Kubernetes API by the rules of the API server, and decide whether they only read. Pure.

The server's rules (its ``RequestInfo``) decide by method and path. Here only one spelling of each path is accepted:
plain segments, nothing encoded, no empty one and no dots; and the forwarded request is written from the parsed one. So
no two readers can disagree about it. Everything that is not known to read is refused: another prefix, a subresource
that connects or was added later, a query that no reader needs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlencode

from runner.core.model import ClusterRefusal

MAX_TARGET = 8 << 10  # characters


@dataclass(frozen=True)
class KubeRequest:
    """A request in the API's words. ``target`` is forwarded, and empty with a ``refusal``."""

    verb: str
    resource: str
    namespace: str = ""
    target: str = ""
    streams: bool = False
    review: bool = False
    refusal: ClusterRefusal | None = None
    message: str = ""


_NAME = re.compile(r"[A-Za-z0-9._:-]{1,253}")
_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_GROUP = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?")
_VALUE = re.compile(r"[ -~]*")
_VERBS = {"GET": "get", "HEAD": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}

SECRET_RESOURCES = frozenset({"secrets", "oauthaccesstokens", "oauthauthorizetokens", "useroauthaccesstokens"})
_PLAIN_SUBRESOURCES = frozenset({"status", "scale"})  # subresources of anything that only show a part of it
_REVIEWS = {
    ("authorization.k8s.io", "selfsubjectaccessreviews"),
    ("authorization.k8s.io", "selfsubjectrulesreviews"),
    ("authentication.k8s.io", "selfsubjectreviews"),
}
_HEALTH = frozenset({"healthz", "livez", "readyz"})

_COMMON_QUERY = frozenset({"timeout", "pretty"})
_LIST_QUERY = frozenset(
    {"labelSelector", "fieldSelector", "limit", "continue", "resourceVersion", "resourceVersionMatch", "includeObject"}
    | {"watch", "allowWatchBookmarks", "sendInitialEvents", "timeoutSeconds"}
)
_LOG_QUERY = frozenset(
    {"container", "follow", "previous", "sinceSeconds", "sinceTime", "timestamps", "tailLines", "limitBytes", "stream"}
)
_HEALTH_QUERY = frozenset({"verbose", "exclude"})
_REVIEW_QUERY = frozenset({"fieldManager", "fieldValidation"})

_ALLOWED = "here are get, list, watch and logs only, and no secrets"


class _RequestRefused(Exception):
    def __init__(self, refusal: ClusterRefusal, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal


def parse_request(method: str, target: bytes) -> KubeRequest:
    """Parse a request, to be forwarded or to be refused with a message."""
    verb = _VERBS.get(method, "other")
    asked = KubeRequest(verb, "")
    try:
        parts, query = _split_target(target)
        asked = _describe(method, parts, query)
        kind = _check_allowed(asked, parts, query)
    except _RequestRefused as refused:
        return KubeRequest(asked.verb, asked.resource, asked.namespace, refusal=refused.refusal, message=str(refused))
    path = "/" + "/".join(parts)
    target_text = f"{path}?{urlencode(query, quote_via=quote)}" if query else path
    return KubeRequest(
        verb=asked.verb,
        resource=asked.resource,
        namespace=asked.namespace,
        target=target_text,
        streams=kind == "stream",
        review=kind == "review",
    )


def refusal_of(verb: str, group: str, resource: str, subresource: str) -> ClusterRefusal | None:
    """Return the refusal of a verb on a resource, whatever its object; ``None`` when it reads what may be read."""
    if resource in SECRET_RESOURCES or subresource in SECRET_RESOURCES or resource == "*":
        return ClusterRefusal.SECRETS
    if verb not in ("get", "list", "watch"):
        return ClusterRefusal.WRITE
    if subresource in ("", *_PLAIN_SUBRESOURCES) or (group, resource, subresource) == ("", "pods", "log"):
        return None
    return ClusterRefusal.WRITE if subresource in ("exec", "attach", "portforward", "proxy") else ClusterRefusal.REQUEST


def _split_target(target: bytes) -> tuple[list[str], list[tuple[str, str]]]:
    """Split a target in its one spelling into path segments and query."""
    text = target.decode("ascii", "replace")
    path, _, query = text.partition("?")
    if len(text) > MAX_TARGET:
        raise _RequestRefused(ClusterRefusal.REQUEST, "the URL is too long")
    parts = path.removesuffix("/").split("/")[1:]
    if not path.startswith("/") or not parts or any(not _NAME.fullmatch(p) or p in (".", "..") for p in parts):
        raise _RequestRefused(
            ClusterRefusal.REQUEST, "the path of the URL is not plain: no encoding, no empty segment, no dots"
        )
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=32, errors="strict")
    except ValueError:
        raise _RequestRefused(ClusterRefusal.REQUEST, "the query of the URL cannot be read") from None
    if any(not _VALUE.fullmatch(value) for _, value in pairs) or ";" in query:
        raise _RequestRefused(ClusterRefusal.REQUEST, "the query of the URL is not plain text")
    return parts, pairs


def _describe(method: str, parts: list[str], query: list[tuple[str, str]]) -> KubeRequest:
    """Return verb, resource and namespace as the API server names them; for other paths, the first segment."""
    verb = _VERBS.get(method, "other")
    group, rest = _split_group(parts)
    if not rest:
        return KubeRequest(verb, f"/{parts[0]}"[:64])
    namespace, words = _split_namespace(rest)
    resource, name, subresource = (*words, "", "")[:3] if len(words) < 3 else words[:3]
    if not name and verb == "get":
        watched = [value for key, value in query if key == "watch"]
        verb = "watch" if watched and watched[0].lower() not in ("0", "false") else "list"
    label = f"{resource}.{group}" if group else resource
    return KubeRequest(verb, f"{label}/{subresource}" if subresource else label, namespace)


def _split_group(parts: list[str]) -> tuple[str, list[str]]:
    """Return the group of a path, and the segments after its version; none for a path that is not a resource's."""
    if parts[0] == "api":
        return "", parts[2:]
    return (parts[1], parts[3:]) if parts[0] == "apis" and len(parts) > 3 else ("", [])


def _split_namespace(rest: list[str]) -> tuple[str, list[str]]:
    """Return the namespace of a resource, and the segments from the resource on."""
    if rest[0] != "namespaces" or len(rest) < 2:
        return "", rest
    inner = len(rest) > 2 and rest[2] not in ("status", "finalize")
    return rest[1], rest[2:] if inner else rest


def _check_allowed(asked: KubeRequest, parts: list[str], query: list[tuple[str, str]]) -> str:
    """Return the kind of a request: plain, stream or review. Raises ``_RequestRefused``."""
    group, rest = _split_group(parts)
    if not rest:
        _check_path(asked, parts)
        _check_query(query, _COMMON_QUERY | (_HEALTH_QUERY if parts[0] in _HEALTH else frozenset({"hash"})))
        return "plain"
    _check_version(parts, group)
    namespace, words = _split_namespace(rest)
    if namespace and not _LABEL.fullmatch(namespace):
        raise _RequestRefused(ClusterRefusal.REQUEST, "that is not the name of a namespace")
    resource, subresource = words[0], words[2] if len(words) > 2 else ""
    if resource in ("watch", "proxy") or len(words) > 3 or not _LABEL.fullmatch(resource):
        raise _RequestRefused(ClusterRefusal.REQUEST, "that is not the path of a resource")
    if asked.verb == "create" and (group, "/".join(words)) in _REVIEWS and not namespace:
        _check_query(query, _COMMON_QUERY | _REVIEW_QUERY)
        return "review"
    match refusal_of(asked.verb, group, resource, subresource):
        case ClusterRefusal.SECRETS:
            raise _RequestRefused(ClusterRefusal.SECRETS, f"secrets are refused; {_ALLOWED}")
        case ClusterRefusal.WRITE:
            what = f"{asked.verb} {asked.resource}"
            raise _RequestRefused(ClusterRefusal.WRITE, f"read only: `{what}` is refused; {_ALLOWED}")
        case ClusterRefusal.REQUEST:
            raise _RequestRefused(
                ClusterRefusal.REQUEST, f"`{asked.resource}` is refused: it is not known to read only"
            )
    is_log = subresource == "log"
    _check_query(query, _COMMON_QUERY | (_LOG_QUERY if is_log else _LIST_QUERY))
    follows = is_log and any(key == "follow" and value.lower() not in ("0", "false") for key, value in query)
    return "stream" if follows or asked.verb == "watch" else "plain"


def _check_path(asked: KubeRequest, parts: list[str]) -> None:
    """Allow discovery, schemas, version and health."""
    if asked.verb != "get":
        raise _RequestRefused(ClusterRefusal.WRITE, f"read only: {_ALLOWED}")
    match parts:
        case ["version"] | ["api"] | ["api", "v1"] | ["apis"] | ["openapi", "v2"]:
            return
        case ["openapi", "v3", *_] if len(parts) <= 5:
            return
        case ["apis", group] | ["apis", group, _] if _GROUP.fullmatch(group):
            return
        case [health] | [health, _] if health in _HEALTH:
            return
    raise _RequestRefused(ClusterRefusal.REQUEST, "that path is not among what can be read")


def _check_version(parts: list[str], group: str) -> None:
    version = parts[2] if group else parts[1]
    if not _LABEL.fullmatch(version) or (not group and version != "v1") or (group and not _GROUP.fullmatch(group)):
        raise _RequestRefused(ClusterRefusal.REQUEST, "that is not a version of an API")


def _check_query(query: list[tuple[str, str]], known: frozenset[str]) -> None:
    if unknown := [key for key, _ in query if key not in known]:
        raise _RequestRefused(ClusterRefusal.REQUEST, f"`{unknown[0][:40]}` in the URL is refused: no reader needs it")
