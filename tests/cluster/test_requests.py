"""What is let through to a cluster: only what reads, however it is spelt, and never a secret."""

from __future__ import annotations

import random
from collections.abc import Iterator
from urllib.parse import parse_qsl, unquote

import pytest

from runner.cluster.requests import parse_request
from runner.core.model import ClusterRefusal

READ = "get list watch"


@pytest.mark.parametrize(
    ("target", "verb", "resource", "namespace"),
    [
        ("/api/v1/namespaces/shop/pods", "list", "pods", "shop"),
        ("/api/v1/namespaces/shop/pods?limit=500", "list", "pods", "shop"),
        ("/api/v1/pods?watch=true", "watch", "pods", ""),
        ("/api/v1/pods?watch=0", "list", "pods", ""),
        ("/api/v1/namespaces/shop/pods/a-1", "get", "pods", "shop"),
        ("/api/v1/namespaces/shop/pods/a-1/log?follow=true&tailLines=5", "get", "pods/log", "shop"),
        ("/api/v1/namespaces/shop/configmaps/a", "get", "configmaps", "shop"),
        ("/api/v1/namespaces", "list", "namespaces", ""),
        ("/api/v1/namespaces/secrets", "get", "namespaces", "secrets"),
        ("/api/v1/namespaces/secrets/pods", "list", "pods", "secrets"),
        ("/api/v1/namespaces/shop/status", "get", "namespaces/status", "shop"),
        ("/api/v1/namespaces/shop/pods/secrets", "get", "pods", "shop"),
        ("/api/v1/nodes/a", "get", "nodes", ""),
        ("/apis/apps/v1/namespaces/shop/deployments/a/scale", "get", "deployments.apps/scale", "shop"),
        ("/apis/metrics.k8s.io/v1beta1/namespaces/shop/pods", "list", "pods.metrics.k8s.io", "shop"),
        ("/apis/rbac.example/v1/clusterroles/system:node", "get", "clusterroles.rbac.example", ""),
        ("/apis/external-secrets.io/v1/externalsecrets", "list", "externalsecrets.external-secrets.io", ""),
        ("/api/v1/events?fieldSelector=involvedObject.name%3Da%2Ctype%21%3DNormal", "list", "events", ""),
        ("/version", "get", "/version", ""),
        ("/readyz/etcd?verbose", "get", "/readyz", ""),
        ("/api", "get", "/api", ""),
        ("/apis/apps/v1/", "get", "/apis", ""),
        ("/openapi/v3/apis/apps/v1?hash=0AF", "get", "/openapi", ""),
    ],
)  # fmt: skip
def test_reading_is_let_through(target: str, verb: str, resource: str, namespace: str) -> None:
    asked = parse_request("GET", target.encode())

    assert (asked.verb, asked.resource, asked.namespace, asked.refusal) == (verb, resource, namespace, None)
    assert sorted(parse_qsl(asked.target.partition("?")[2], keep_blank_values=True)) == sorted(
        parse_qsl(target.partition("?")[2], keep_blank_values=True)
    )


@pytest.mark.parametrize(
    ("method", "target", "refusal"),
    [
        ("GET", "/api/v1/secrets", ClusterRefusal.SECRETS),
        ("GET", "/api/v1/secrets?watch=true", ClusterRefusal.SECRETS),
        ("HEAD", "/api/v1/namespaces/a/secrets/b", ClusterRefusal.SECRETS),
        ("DELETE", "/api/v1/namespaces/a/secrets/b", ClusterRefusal.SECRETS),
        ("GET", "/apis/oauth.openshift.io/v1/oauthaccesstokens", ClusterRefusal.SECRETS),
        ("GET", "/apis/anything.example/v1/secrets", ClusterRefusal.SECRETS),
        ("GET", "/apis/image.openshift.io/v1/namespaces/a/imagestreams/b/secrets", ClusterRefusal.SECRETS),
        ("GET", "/api/v1/watch/secrets", ClusterRefusal.REQUEST),
        ("GET", "/api/v1/watch/namespaces/a/pods", ClusterRefusal.REQUEST),
        ("GET", "/api/v1/proxy/nodes/a/", ClusterRefusal.REQUEST),
        ("GET", "/api//v1/secrets", ClusterRefusal.REQUEST),
        ("GET", "//api/v1/secrets", ClusterRefusal.REQUEST),
        ("GET", "/api/v1/namespaces/a/%73ecrets", ClusterRefusal.REQUEST),
        ("GET", "/api/v1/namespaces/a%2Fsecrets", ClusterRefusal.REQUEST),
        ("GET", "/api/v1/pods/../secrets", ClusterRefusal.REQUEST),
        ("GET", "/api/v1/./secrets", ClusterRefusal.REQUEST),
        ("GET", "/API/V1/SECRETS", ClusterRefusal.REQUEST),
        ("GET", "/api/v1/Secrets", ClusterRefusal.REQUEST),
        ("GET", "/api/V1/pods", ClusterRefusal.REQUEST),
        ("GET", "/api/v2/secrets", ClusterRefusal.REQUEST),
        ("GET", "/api/v1/secrets;x", ClusterRefusal.REQUEST),
        ("GET", "/api/v1\\secrets", ClusterRefusal.REQUEST),
        ("GET", "http://127.0.0.1/api/v1/secrets", ClusterRefusal.REQUEST),
        ("GET", "/api/v1/namespaces/a/pods/b/exec?command=id", ClusterRefusal.WRITE),
        ("POST", "/api/v1/namespaces/a/pods/b/exec", ClusterRefusal.WRITE),
        ("GET", "/api/v1/namespaces/a/pods/b/attach", ClusterRefusal.WRITE),
        ("GET", "/api/v1/namespaces/a/pods/b/portforward", ClusterRefusal.WRITE),
        ("GET", "/api/v1/namespaces/a/pods/b/proxy", ClusterRefusal.WRITE),
        ("GET", "/api/v1/namespaces/a/services/b/proxy", ClusterRefusal.WRITE),
        ("GET", "/api/v1/nodes/a/proxy", ClusterRefusal.WRITE),
        ("GET", "/api/v1/nodes/a/proxy/run/x", ClusterRefusal.REQUEST),
        ("GET", "/apis/subresources.kubevirt.io/v1/namespaces/a/virtualmachines/b/console", ClusterRefusal.REQUEST),
        ("POST", "/api/v1/namespaces/a/serviceaccounts/b/token", ClusterRefusal.WRITE),
        ("POST", "/api/v1/namespaces/a/pods", ClusterRefusal.WRITE),
        ("PUT", "/api/v1/namespaces/a/pods/b", ClusterRefusal.WRITE),
        ("PATCH", "/apis/apps/v1/namespaces/a/deployments/b/scale", ClusterRefusal.WRITE),
        ("DELETE", "/api/v1/namespaces/a/pods", ClusterRefusal.WRITE),
        ("OPTIONS", "/api/v1/namespaces/a/pods", ClusterRefusal.WRITE),
        ("get", "/api/v1/namespaces/a/pods", ClusterRefusal.WRITE),
        ("LIST", "/api/v1/namespaces/a/pods", ClusterRefusal.WRITE),
        ("watch", "/api", ClusterRefusal.WRITE),
        ("TRACE", "/api", ClusterRefusal.WRITE),
        ("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", ClusterRefusal.WRITE),
        ("POST", "/apis/authentication.k8s.io/v1/tokenreviews", ClusterRefusal.WRITE),
        ("POST", "/apis/authorization.k8s.io/v1/namespaces/a/selfsubjectaccessreviews", ClusterRefusal.WRITE),
        ("PUT", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", ClusterRefusal.WRITE),
        ("GET", "/metrics", ClusterRefusal.REQUEST),
        ("GET", "/logs/kubelet.log", ClusterRefusal.REQUEST),
        ("GET", "/debug/pprof/heap", ClusterRefusal.REQUEST),
        ("GET", "/api/v1/pods?impersonate=x", ClusterRefusal.REQUEST),
        ("GET", "/api/v1/namespaces/a/pods/b/log?insecureSkipTLSVerifyBackend=true", ClusterRefusal.REQUEST),
        ("GET", "/", ClusterRefusal.REQUEST),
        ("GET", "*", ClusterRefusal.REQUEST),
        ("GET", "/api/v1/pods?limit=%0d%0aX", ClusterRefusal.REQUEST),
        ("GET", "/api/v1/pods?" + "a" * 9000, ClusterRefusal.REQUEST),
    ],
)  # fmt: skip
def test_all_else_is_refused(method: str, target: str, refusal: ClusterRefusal) -> None:
    asked = parse_request(method, target.encode())

    assert (asked.refusal, asked.target) == (refusal, "")
    assert asked.message


@pytest.mark.parametrize("kind", ["selfsubjectaccessreviews", "selfsubjectrulesreviews"])
def test_questions_about_one_s_own_rights_are_let_through(kind: str) -> None:
    asked = parse_request("POST", f"/apis/authorization.k8s.io/v1/{kind}".encode())

    assert (asked.refusal, asked.review) == (None, True)


@pytest.mark.parametrize(
    ("target", "streams"),
    [("/api/v1/pods?watch=1", True), ("/api/v1/namespaces/a/pods/b/log?follow=true", True), ("/api/v1/pods", False)],
)
def test_what_may_be_silent_for_long_is_known(target: str, streams: bool) -> None:
    assert parse_request("GET", target.encode()).streams is streams


# --- many spellings, judged by another reader ---

_WORDS = (
    *("api", "apis", "v1", "v1beta1", "apps", "authorization.k8s.io", "version", "healthz", "openapi", "v2", "metrics"),
    *("namespaces", "shop", "default", "a-1", "secrets", "Secrets", "SECRETS", "secrets.v1.", "secret", "."),
    *("pods", "nodes", "services", "events", "configmaps", "serviceaccounts", "oauthaccesstokens", "log", "exec"),
    *("attach", "portforward", "proxy", "watch", "status", "scale", "token", "finalize", "selfsubjectaccessreviews"),
)
_ODD = (
    "",
    ".",
    "..",
    "%2e",
    "%2F",
    "%2e%2e",
    "%73ecrets",
    "s%65crets",
    "secrets%00",
    "secrets ",
    "secrets%20",
    "secrets;a=b",
)
_ODD += (
    "secrets?x",
    "secrets#x",
    "secrets\\",
    "\u017fecrets",
    "secrets%2f",
    "sec\trets",
    "//",
    "secrets/",
    "%",
    "%zz",
    "+",
)
_QUERIES = ("", "watch=true", "watch=1&watch=0", "resource=secrets", "limit=1;watch=1", "fieldSelector=metadata.name=a")
_QUERIES += ("labelSelector=a%26b", "%77atch=true", "follow=true", "a=%00", "=", "&", "command=id", "stdin=true")
_METHODS = ("GET", "GET", "GET", "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "get", "Get")
_STARTS = (
    "/api/v1",
    "/api/v1/namespaces/shop",
    "/apis/apps/v1",
    "/apis/apps/v1/namespaces/shop",
    "",
    "/",
    "/api",
    "http://x/api/v1",
)


def spellings(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    luck = random.Random(seed)
    for _ in range(count):
        words = [luck.choice(_ODD) if luck.random() < 0.12 else luck.choice(_WORDS) for _ in range(luck.randint(0, 5))]
        path = luck.choice(_STARTS) + "".join(f"/{word}" for word in words)
        query = luck.choice(_QUERIES) if luck.random() < 0.4 else ""
        text = f"{path}?{query}" if query else path
        if luck.random() < 0.05:
            at = luck.randrange(len(text) + 1)
            text = text[:at] + luck.choice("/%.;\\?#&\x00\x7f\xff sS") + text[at:]
        yield luck.choice(_METHODS), text.encode("utf-8" if luck.random() < 0.9 else "latin-1", "replace")


def as_the_server_reads(method: str, target: str) -> tuple[str, str, str, list[str]]:
    """Verb, group, resource and the words behind it, after the API server's ``NewRequestInfo``."""
    parts = unquote(target.partition("?")[0]).strip("/").split("/")
    verb = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}.get(method, method.lower())
    if len(parts) < 3 or parts[0] not in ("api", "apis"):
        return verb, "", "", parts
    prefix, parts = parts[0], parts[1:]
    group = ""
    if prefix == "apis":
        if len(parts) < 3:
            return verb, "", "", parts
        group, parts = parts[0], parts[1:]
    parts = parts[1:]
    if parts[0] in ("proxy", "watch"):
        verb, parts = parts[0], parts[1:]
    if parts and parts[0] == "namespaces" and len(parts) > 2 and parts[2] not in ("status", "finalize"):
        parts = parts[2:]
    return verb, group, parts[0] if parts else "", parts[1:]


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_no_spelling_reads_a_secret_or_changes_anything(count: int) -> None:
    passed = 0
    for method, target in spellings(count, seed=count):
        asked = parse_request(method, target)
        if asked.refusal is not None:
            assert not asked.target
            continue
        passed += 1
        verb, group, resource, more = as_the_server_reads(method, asked.target)
        assert not set("%;\\") & set(asked.target.partition("?")[0])
        assert resource == resource.lower()
        assert resource not in ("secrets", "oauthaccesstokens"), (method, target)
        if resource:
            assert not set(more[1:]) & {"secrets", "exec", "attach", "portforward", "proxy", "token"}, (method, target)
        assert method in ("GET", "HEAD", "POST")
        if verb not in ("get", "head"):
            assert (verb, group, resource) == ("create", "authorization.k8s.io", "selfsubjectaccessreviews"), target

    assert passed > count / 50
