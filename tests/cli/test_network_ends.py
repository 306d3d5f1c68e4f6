"""The way to the allowed hosts ends while commands use it: nothing takes its place, and the record says why.

Here too what a proxy of this host has answered, in a whole run.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import Popen
from threading import Thread
from urllib.parse import urlsplit

import pytest

from runner.testing.outside import descendants, fields
from tests.cli.test_dependencies import own_address
from tests.support import dockerd
from tests.support.situations import Project, step, until

THERE = "127.0.0.2"
PROVIDERS = [
    "local",
    pytest.param("docker", marks=pytest.mark.nightly),
    pytest.param("gvisor", marks=[pytest.mark.nightly, dockerd.GVISOR.mark]),
]
QUIET = 1.0  # seconds; commands that could, would ask some twenty times
ASK = """
cat > ask.py <<'END'
import sys, time, urllib.request
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
while True:
    for url, ask in (("asked", urllib.request.urlopen), ("direct", direct.open)):
        try:
            ask(f"http://{sys.argv[1]}/{url}", timeout=5)
        except urllib.error.HTTPError as error:
            print(error.read().decode(), flush=True)
        except OSError:
            pass
    time.sleep(0.05)
END
python3 ask.py PLACE
"""


class Site(ThreadingHTTPServer):
    """A host, or a proxy that answers for all; keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        super().__init__(("0.0.0.0", 0), Answer)


class Answer(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[Site]:
    with Site() as site:
        thread = Thread(target=site.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield site
        finally:
            site.shutdown()
            thread.join()


@pytest.fixture
def site() -> Iterator[Site]:
    with serving() as site:
        yield site


def start(project: Project, site: Site, provider: str, host: str = THERE) -> Popen[str]:
    """An apply whose agent asks the site again and again."""
    place = f"{host}:{site.server_port}"
    network = f"network: {{allow: [{{host: '{place}', private: true}}]}}"
    project.script(ASK.replace("PLACE", place), workspace=network, provider=provider)
    return project.start("apply", ".")


def guest_of(process: Popen[str], provider: str) -> int:
    """The process that relays for the commands of the only sandbox of a run, as this host sees it."""
    if provider != "local":
        with dockerd.session().client() as client:
            (container,) = client.containers(filters={"label": "runner.workspace"})
        return dockerd.first(container["Id"])
    names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in descendants(process.pid) if fields(pid)[0] != "Z"}
    return next(pid for pid, name in names.items() if not name.startswith(("bwrap", "python")))


def assert_dark(site: Site) -> None:
    time.sleep(0.1)  # for what was under way
    before = len(site.asked)
    time.sleep(QUIET)
    assert len(site.asked) == before
    assert {*site.asked} == {"/asked"}


@pytest.mark.slow
@pytest.mark.scenario("BEY-13", only="provider")
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_killed_runner_takes_the_network_along(project: Project, site: Site, provider: str) -> None:
    with start(project, site, provider) as process:
        until(lambda: site.asked or process.poll() is not None)
        process.kill()
        process.communicate()
        assert_dark(site)

    recovered = project.runner("recover")

    assert recovered.code == 0, recovered.err
    record = project.record()
    assert (record["status"], record["exit_code"]) == ("unknown", 4)


@pytest.mark.slow
@pytest.mark.scenario("BEY-13", only="provider")
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_relay_that_is_killed_ends_the_run_which_says_so(project: Project, site: Site, provider: str) -> None:
    with start(project, site, provider) as process:
        until(lambda: site.asked or process.poll() is not None)
        os.kill(guest_of(process, provider), signal.SIGKILL)
        out, err = process.communicate()
        assert_dark(site)

    assert process.returncode == 4, out + err
    assert "the sandbox was lost while a command ran in it: the guest of workspace" in out
    record = project.record()
    assert step(record, "agent")["outcome"]["reason"] == "unknown"
    assert {(use["place"], use["refusal"]) for use in record["network"]} == {(f"{THERE}:{site.server_port}", None)}


@pytest.mark.slow
@pytest.mark.scenario("BEY-13", only="local")
def test_without_the_proxy_of_this_host_no_other_way_is_tried(project: Project, site: Site) -> None:
    with serving() as proxy:
        project.env["HTTP_PROXY"] = f"http://{THERE}:{proxy.server_port}"
        process = start(project, site, "local", own_address())
        until(lambda: proxy.asked or process.poll() is not None)
    words = f"the proxy {THERE}:{proxy.server_port} of this host cannot be reached: "
    until(lambda: words in "".join(log.read_text() for log in project.home.glob("state/runs/*/logs/agent.stdout")))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()

    assert process.returncode == 130, out + err
    assert {urlsplit(url).path for url in proxy.asked} == {"/asked"}
    assert site.asked == []
    assert {use["refusal"] for use in project.record()["network"]} == {None, "unreachable"}
