"""Kubeconfigs as data: which cluster one means, what is refused, and that nothing in it is run or sent by mistake."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from runner.cluster.clusters import workspace_place
from runner.cluster.kubeconfig import ClusterTarget, read_target
from runner.core.errors import BadKubeconfig, KubeconfigRefused, ProviderFailed, RunnerError, UnknownContext
from runner.core.settings import Settings
from tests.skills.api_server import Cluster
from tests.support.folder_contents import put
from tests.support.kubernetes import CONTEXT, NAMESPACE, TOKEN, Api

NOBODY = 65534
SERVER = "https://10.2.0.1:6443"

Part = Callable[[dict[str, Any]], dict[str, Any]]
NO_URL = "not the URL|plain URL"


@pytest.fixture
def api(authority: Path) -> Api:
    return Api(authority, Cluster())


def read(path: Path | str, context: str | None = None, namespace: str | None = None, **reach: str) -> ClusterTarget:
    return read_target(str(path), context, namespace, reach)


def user(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["users"][0]["user"]
    return found


def cluster(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["clusters"][0]["cluster"]
    return found


def named_at_length(document: dict[str, Any]) -> dict[str, Any]:
    document["contexts"][0]["name"] = document["current-context"] = "x" * 254
    return document


def b64(path: Path) -> str:
    return b64encode(path.read_bytes()).decode()


def test_a_context_means_a_cluster_a_namespace_and_a_credential(api: Api, tmp_path: Path) -> None:
    target = read(api.write(tmp_path / "config", server=SERVER))

    assert (target.context, target.server, target.namespace, target.exposed) == (CONTEXT, SERVER, NAMESPACE, "")
    assert target.authorization() == f"Bearer {TOKEN}".encode()
    assert TOKEN not in repr(target)


@pytest.mark.parametrize(
    "server",
    ["https://a.example.:6443", "https://my_cluster-1/k8s/c-1", "https://[::1]:6443", f"https://{'a' * 63}.example"],
)
def test_servers_that_kubectl_takes_too(api: Api, tmp_path: Path, server: str) -> None:
    assert read(api.write(tmp_path / "config", server=server, tls_server_name="kube.test")).server == server


def test_context_and_namespace_can_be_named(api: Api, tmp_path: Path) -> None:
    document = api.kubeconfig(server=SERVER)
    document["contexts"].append({"name": "us", "context": {"cluster": "eu", "user": "me"}})
    document.pop("current-context")
    (tmp_path / "config").write_text(json.dumps(document))

    assert read(tmp_path / "config", "us").namespace == "default"
    assert read(tmp_path / "config", "us", "shop").namespace == "shop"
    with pytest.raises(UnknownContext, match="has no current context") as caught:
        read(tmp_path / "config")
    assert caught.value.hint == f"name one of its contexts: {CONTEXT}, us"
    with pytest.raises(UnknownContext, match="has no context `eu`"):
        read(tmp_path / "config", "eu")


def test_several_files_are_merged_as_kubectl_does(api: Api, tmp_path: Path) -> None:
    put(tmp_path / "one" / "token", "first-token-1\n")
    first = api.write(tmp_path / "one" / "config", {"tokenFile": "token"}, server=SERVER)
    second = api.write(tmp_path / "two", server="https://other.example")

    target = read(f"{tmp_path}/none:{first}::{second}")

    assert (target.server, target.authorization()) == (SERVER, b"Bearer first-token-1")
    with pytest.raises(BadKubeconfig, match="none` is not there"):
        read(f"{tmp_path}/none:{tmp_path}/nothing")


@pytest.mark.parametrize(
    ("credential", "header"),
    [
        pytest.param({"token": TOKEN}, f"Bearer {TOKEN}", id="token"),
        pytest.param({"username": "me", "password": "p:w"}, "Basic bWU6cDp3", id="basic"),
        pytest.param({}, "", id="nobody"),
    ],
)
def test_credentials(api: Api, tmp_path: Path, credential: Mapping[str, Any], header: str) -> None:
    assert read(api.write(tmp_path / "config", credential)).authorization() == header.encode()


def test_certificates_are_taken_as_data_and_as_files(api: Api, tmp_path: Path, authority: Path) -> None:
    as_data = {f"client-{n}-data": b64(authority / f"client.{s}") for n, s in (("certificate", "pem"), ("key", "key"))}
    as_files = {f"client-{n}": str(authority / f"client.{s}") for n, s in (("certificate", "pem"), ("key", "key"))}

    one = read(api.write(tmp_path / "one", as_data, server=SERVER))
    two = read(api.write(tmp_path / "two", as_files, server=SERVER))

    assert one.certificate == two.certificate
    assert one.certificates(one.certificate) is not None


def test_nothing_is_sent_to_a_server_without_tls(api: Api, tmp_path: Path) -> None:
    """Such as ``kubectl proxy`` on this host."""
    target = read(api.write(tmp_path / "config", server="http://127.0.0.1:8001"))

    assert (target.authorization(), target.certificates(None)) == (b"", None)


def test_a_token_that_is_renamed_over_is_read_again(api: Api, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first-token-1")
    target = read(api.write(tmp_path / "config", {"tokenFile": "token"}))
    before = target.authorization()

    (tmp_path / "new").write_text("second-token-2\n")
    (tmp_path / "new").rename(tmp_path / "token")
    assert (before, target.authorization()) == (b"Bearer first-token-1", b"Bearer second-token-2")

    (tmp_path / "token").unlink()
    with pytest.raises(BadKubeconfig, match="`token`, which cannot be read: no such file"):
        target.authorization()


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        pytest.param(user, {"auth-provider": {"name": "oidc"}}, "`auth-provider`", id="auth-provider"),
        pytest.param(user, {"as": "root"}, "acts as somebody else", id="impersonation"),
        pytest.param(user, {"as-groups": ["system:masters"]}, "somebody else", id="group"),
        pytest.param(cluster, {"insecure-skip-tls-verify": True}, "not verified", id="not verified"),
        pytest.param(cluster, {"server": "http://10.2.0.1"}, "not reached by https", id="http"),
        pytest.param(cluster, {"server": "ftp://127.0.0.1"}, "not reached by https", id="ftp"),
        pytest.param(cluster, {"proxy-url": "http://evil.example"}, "a proxy of its own", id="proxy"),
        pytest.param(user, {"tokenFile": "/etc/hostname"}, "foreign file `/etc/hostname`", id="token file"),
        pytest.param(user, {"tokenFile": "../outside"}, "foreign file `../outside`", id="outside"),
        pytest.param(user, {"tokenFile": "link"}, "foreign file `link`", id="link to outside"),
        pytest.param(user, {"tokenFile": "open"}, "which others can change", id="open to others"),
        pytest.param(
            user,
            {"client-certificate": "/proc/self/environ", "client-key": "k"},
            "others|no such|regular|foreign",
            id="foreign certificate",
        ),
    ],
)
def test_what_a_kubeconfig_may_not_do(api: Api, tmp_path: Path, part: Part, change: dict[str, Any], words: str) -> None:
    folder = tmp_path / "kube"
    folder.mkdir()
    (tmp_path / "outside").write_text("outside-token-1")
    (folder / "link").symlink_to(tmp_path / "outside")
    put(folder / "open", "open-token-1", 0o666)
    document = api.kubeconfig(server=SERVER)
    part(document).update(change)
    (folder / "config").write_text(json.dumps(document))

    with pytest.raises((KubeconfigRefused, BadKubeconfig), match=words) as caught:
        read(folder / "config")

    if "certificate" not in str(user(document)):
        assert isinstance(caught.value, KubeconfigRefused)
        assert (caught.value.exit_code, caught.value.code) == (3, "kubeconfig.refused")


def test_certificates_in_a_directory_of_somebody_else_are_refused(api: Api, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    put(folder / "ca.pem", (api.folder / "ca.pem").read_bytes())
    path = api.write(tmp_path / "kube", server=SERVER)
    (tmp_path / "mine").mkdir()
    path = path.rename(tmp_path / "mine" / "config")
    document = json.loads(path.read_text())
    cluster(document).pop("certificate-authority-data")
    cluster(document)["certificate-authority"] = str(folder / "ca.pem")
    path.write_text(json.dumps(document))

    assert read(path).authorities is not None
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
        with pytest.raises(KubeconfigRefused, match="foreign file"):
            read(path)


def test_the_host_s_own_proxy_may_be_named(api: Api, tmp_path: Path) -> None:
    path = api.write(tmp_path / "config", server=SERVER, proxy_url="http://proxy:3128")

    assert read(path, HTTPS_PROXY="http://proxy:3128").server == SERVER


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda path: None, "is not there", id="missing"),
        pytest.param(lambda path: path.mkdir(), "is a directory", id="directory"),
        pytest.param(lambda path: path.symlink_to("elsewhere"), "is a symbolic link", id="link"),
        pytest.param(lambda path: os.mkfifo(path), "is not a regular file", id="pipe"),
        pytest.param(lambda path: path.write_text("a: [\n"), "is not a kubeconfig, line", id="syntax"),
        pytest.param(lambda path: path.write_text("a: \0\n"), "is not a kubeconfig: ", id="nul"),
        pytest.param(lambda path: path.write_text("a: " + "x" * 300_000), "is not a kubeconfig: ", id="long line"),
        pytest.param(lambda path: path.write_text("token"), "is not a kubeconfig", id="text"),
        pytest.param(lambda path: path.write_text("a: 1\n---\nb: 2\n"), "is not a kubeconfig", id="two documents"),
        pytest.param(lambda path: path.write_text("contexts: 5\n"), "`contexts` of", id="no list"),
        pytest.param(lambda path: path.write_bytes(b"#" * ((1 << 20) + 1)), "larger than 1 MiB", id="large"),
        pytest.param(lambda path: path.write_text(""), "is not a kubeconfig|no current", id="empty"),
    ],
)
def test_what_is_no_kubeconfig_is_said(tmp_path: Path, make: Callable[[Path], object], words: str) -> None:
    make(tmp_path / "config")

    with pytest.raises(BadKubeconfig, match=words) as caught:
        read(tmp_path / "config")

    assert caught.value.exit_code == 2
    assert "config" in caught.value.message


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        pytest.param(cluster, {"server": "https://a b"}, "plain URL|not the URL", id="blank"),
        pytest.param(cluster, {"server": "https://me:pw@10.2.0.1"}, "URL of a cluster", id="user"),
        pytest.param(cluster, {"server": "https://10.2.0.1/../x"}, "URL of a cluster", id="dots"),
        pytest.param(cluster, {"server": "https://10.2.0.1:port"}, "not a URL", id="port"),
        pytest.param(cluster, {"server": "https://a..b/"}, NO_URL, id="empty label"),
        pytest.param(cluster, {"server": f"https://{'a' * 64}/"}, NO_URL, id="long label"),
        pytest.param(cluster, {"server": f"https://{'a.' * 127}aa/"}, NO_URL, id="long host"),
        pytest.param(cluster, {"server": "https://\uff41.example/"}, NO_URL, id="wide host"),
        pytest.param(cluster, {"server": "https://:443"}, NO_URL, id="no host"),
        pytest.param(cluster, {"server": "https://@a.example"}, NO_URL, id="empty user"),
        pytest.param(cluster, {"server": "https://a.example?"}, NO_URL, id="empty query"),
        pytest.param(cluster, {"server": f"https://a.example/{'a' * 2048}"}, NO_URL, id="long path"),
        pytest.param(cluster, {"tls-server-name": ".x..y"}, "`tls-server-name` of", id="dots in a name"),
        pytest.param(cluster, {"tls-server-name": "\u00e9" * 300}, "`tls-server-name` of", id="wide name"),
        pytest.param(cluster, {"tls-server-name": "a" * 300}, "`tls-server-name` of", id="long name"),
        pytest.param(cluster, {"server": 7}, "`server` of the kubeconfig is not a text", id="number"),
        pytest.param(cluster, {"certificate-authority-data": "!"}, "not base64", id="base64"),
        pytest.param(cluster, {"certificate-authority-data": "YQ=="}, "not a certificate", id="ca"),
        pytest.param(user, {"client-key-data": "YQ=="}, "needs its key", id="half"),
        pytest.param(
            user,
            {"client-key-data": "YQ==", "client-certificate-data": "YQ=="},
            "client certificate of context",
            id="client",
        ),
        pytest.param(user, {"token": "a\nb"}, "holds no token", id="token"),
        pytest.param(named_at_length, {}, "has more than 253 characters", id="long context"),
    ],
)
def test_values_that_are_none_are_said_and_not_shown(
    api: Api, tmp_path: Path, part: Part, change: dict[str, Any], words: str
) -> None:
    document = api.kubeconfig(server=SERVER)
    part(document).update(change)
    (tmp_path / "config").write_text(json.dumps(document))

    with pytest.raises(RunnerError, match=words) as caught:
        read(tmp_path / "config")

    assert TOKEN not in f"{caught.value.message}{caught.value.hint}"
    assert ":pw@" not in caught.value.message


@pytest.mark.parametrize(
    ("mode", "words"), [(0o600, ""), (0o640, ""), (0o644, "read by others"), (0o660, "changed by its group")]
)
def test_a_kubeconfig_that_others_can_read_is_a_warning(api: Api, tmp_path: Path, mode: int, words: str) -> None:
    path = api.write(tmp_path / "config", server=SERVER)
    path.chmod(mode)

    assert words in read(path).exposed
    assert bool(read(path).exposed) is bool(words)


def test_a_kubeconfig_that_anybody_can_change_is_refused(api: Api, tmp_path: Path) -> None:
    path = api.write(tmp_path / "config", server=SERVER)
    path.chmod(0o666)

    with pytest.raises(KubeconfigRefused, match="can be changed by anybody"):
        read(path)


def test_a_context_is_not_passed_over_where_a_pod_has_no_kubeconfig(tmp_path: Path) -> None:
    pod = {"HOME": str(tmp_path), "KUBERNETES_SERVICE_HOST": "10.0.0.1", "RUNNER_KUBERNETES_NAMESPACE": NAMESPACE}

    place = workspace_place(Settings.from_env(pod))
    with pytest.raises(ProviderFailed, match="context `staging` is one of a kubeconfig, and none is here"):
        workspace_place(Settings.from_env({**pod, "RUNNER_KUBERNETES_CONTEXT": "staging"}))

    assert (place.kubeconfig, place.namespace) == (None, NAMESPACE)
