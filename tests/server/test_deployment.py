"""What stands before a server, as docs/howto/deploy-the-server.md sets it up: the real nginx, Caddy and systemd."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.certificates import make_certificate
from tests.support.git_servers import free_port
from tests.support.needs import ADMINISTRATORS_PATH, program
from tests.support.server import Served, serving
from tests.support.situations import Project, until

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "deploy-the-server.md"
HOST = "runner.example.org"
PATH = f"{os.environ['PATH']}:{ADMINISTRATORS_PATH}"
NGINX, CADDY = program("nginx", PATH), program("caddy", PATH)
ACTIVATE = program("systemd-socket-activate")

pytestmark = pytest.mark.nightly


def block(language: str, holds: str) -> str:
    """Return the block of the page that holds this text."""
    [found] = [one for one in re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.M | re.S) if holds in one]
    return str(found)


def moved(text: str, places: dict[str, str]) -> str:
    """Return a configuration with other places: each has to be in it."""
    for old, new in places.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


class Proxy:
    """A proxy before a server; ``ask`` is curl's."""

    def __init__(self, port: int, certificate: Path, token: str) -> None:
        self._words = ["curl", "--silent", "--show-error", "--cacert", str(certificate), "--resolve"]
        self._words += [f"{HOST}:{port}:127.0.0.1", "--header", f"Authorization: Bearer {token}"]
        self.url = f"https://{HOST}:{port}"

    def start(self, path: str, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen([*self._words, f"{self.url}{path}", *words], stdout=subprocess.PIPE, text=True)

    def ask(self, path: str, *words: str) -> tuple[int, str]:
        code = ["--write-out", "\n%{http_code}"]
        out, _ = self.start(path, *code, *words).communicate(timeout=60)
        body, _, status = out.rpartition("\n")
        return int(status), body


def nginx(folder: Path, port: int, certificate: Path, socket: Path) -> list[str]:
    places = {
        "unix:/run/runner/server.sock": f"unix:{socket}",
        "listen 443": f"listen 127.0.0.1:{port}",
        "/etc/ssl/runner.pem": str(certificate),
        "/etc/ssl/private/runner.key": str(certificate.with_suffix(".key")),
    }
    site = moved(block("nginx", "proxy_pass"), places)
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;\n" if os.geteuid() == 0 else ""  # its workers reach the socket of the test
    head = f"daemon off;\n{user}pid {folder}/pid;\nerror_log stderr;\nevents {{}}\n"
    (folder / "nginx.conf").write_text(f"{head}http {{\naccess_log off;\n{temporary}{site}}}\n")
    return ["nginx", "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]


def caddy(folder: Path, port: int, certificate: Path, socket: Path) -> list[str]:
    places = {
        f"{HOST} {{\n": f"https://{HOST}:{port} {{\nbind 127.0.0.1\n"
        f"tls {certificate} {certificate.with_suffix('.key')}\n",
        "unix//run/runner/server.sock": f"unix/{socket}",
    }
    site = moved(block("text", "reverse_proxy"), places)
    (folder / "Caddyfile").write_text(f"{{\nadmin off\nauto_https disable_redirects\n}}\n{site}")
    return ["caddy", "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


@contextmanager
def standing_before(
    served: Served, folder: Path, words: Callable[[Path, int, Path, Path], list[str]]
) -> Iterator[Proxy]:
    """A proxy of the page's configuration, for as long as the block lasts."""
    port, certificate = free_port(), make_certificate(folder / "site.pem", f"DNS:{HOST}")
    env = {"PATH": PATH, "HOME": str(folder)}
    with subprocess.Popen(
        words(folder, port, certificate, served.socket), env=env, stderr=subprocess.DEVNULL
    ) as process:
        try:
            proxy = Proxy(port, certificate, served.token)
            until(lambda: proxy.ask("/healthz")[0] == 200)
            yield proxy
        finally:
            process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize("words", [pytest.param(nginx, marks=NGINX.mark), pytest.param(caddy, marks=CADDY.mark)])
def test_a_proxy_of_the_page_carries_tools_events_and_refusals(
    project: Project, tmp_path: Path, words: Callable[[Path, int, Path, Path], list[str]]
) -> None:
    project.script("echo begun; sleep 4")
    options = ("--manifests", str(project.folder), "--behind-proxy", "--host", HOST)
    with serving(project, *options) as served, standing_before(served, tmp_path, words) as proxy:
        as_json = ("--json",)
        status, made = proxy.ask("/api/v1/workspaces", *as_json, '{"tools": ["bash"]}')
        assert status == 201, made
        place = f"/api/v1/workspaces/{json.loads(made)['id']}"
        status, done = proxy.ask(f"{place}/tools/bash", *as_json, '{"command": "echo inside"}')
        assert (status, json.loads(done)["stdout"]) == (200, "inside\n")

        (run,) = json.loads(proxy.ask("/api/v1/runs", *as_json, "{}")[1])["runs"]
        followed = proxy.start(
            f"/api/v1/runs/{run['id']}/events", "--no-buffer", "--header", "Accept: text/event-stream"
        )
        assert followed.stdout is not None
        until(lambda: str(followed.stdout.readline()).startswith("data:"))
        assert json.loads(proxy.ask(f"/api/v1/runs/{run['id']}")[1])["status"] == "running"  # they come as they happen
        assert '"exit_code": 0' in followed.communicate(timeout=60)[0]

        (tmp_path / "large").write_bytes(bytes((16 << 20) + 1))
        large = proxy.ask("/api/v1/runs", *as_json, f"@{tmp_path / 'large'}")
        assert large[0] in (0, 413)  # over HTTP/2 it may end the request before it is heard
        assert proxy.ask("/", "--output", "/dev/null")[0] in (200, 303)  # the page, or its login
        assert proxy.ask(place, "--header", "Authorization: Bearer none")[0] in (400, 401)  # which nginx sees itself
        assert proxy.ask(f"{place}?discard=true", "--request", "DELETE")[0] == 200


@ACTIVATE.mark
def test_systemd_itself_opens_the_socket(project: Project) -> None:
    """The program of systemd that does for one process what a .socket unit does."""
    path = project.home / "state" / "server.sock"
    path.parent.mkdir(parents=True, exist_ok=True)
    project.within = ("systemd-socket-activate", f"--listen={path}")
    waiting = Served(project, project.start("serve", "--listen", "systemd"), "", "")
    try:
        until(path.exists)
        assert waiting.ask("GET", "/healthz").status == 200  # the first request starts the server, and waits for it
    finally:
        waiting.process.send_signal(signal.SIGTERM)
        out, err = waiting.process.communicate(timeout=60)
    assert (waiting.process.returncode, "listening on unix:" in out) == (0, True), err
    assert path.exists()


@program("systemd-analyze").mark
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    for name in ("runner.socket", "runner.service"):
        text = block("ini", f"/etc/systemd/system/{name}").replace("/opt/runner/bin/runner", "/bin/true")
        (tmp_path / name).write_text(text.replace("User=runner", "User=root").replace("Group=www-data", "Group=root"))

    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "runner.socket"), str(tmp_path / "runner.service")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, [line for line in done.stderr.splitlines() if "/runner." in line]) == (0, []), done.stderr
