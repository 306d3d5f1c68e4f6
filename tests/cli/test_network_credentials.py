"""Credentials that requests get outside the workspace, in whole runs with real clients: used, and nowhere inside."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.core.redact import Redactor
from tests.cli.test_dependencies import AS_ORDINARY
from tests.support import dockerd
from tests.support.certificates import make_certificate
from tests.support.http_servers import EVERYWHERE, Handler, serving_http
from tests.support.situations import Project

TOKEN = "canary-7f3b9c2e51d84a06b7e2c9d1"  # its beginning is what is looked for inside
THERE, ELSEWHERE = "127.0.0.2", "127.0.0.3"
PROVIDERS = ["local", "docker", pytest.param("gvisor", marks=dockerd.GVISOR.mark)]
# As it is, in base64 at each offset, and in hexadecimal. No pattern is found by itself.
SEARCH = """
import os, re, sys
wanted = re.compile(rb"[c]anary-7|[Y]2FuYXJ5|[N]hbmFyeS|[j]YW5hcn|[6]3616e617279", re.I)
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline"):
        try:
            found = wanted.search(open(f"/proc/{pid}/{name}", "rb").read())
        except OSError:
            continue
        print("FOUND in", pid, name) if found else None
    try:
        maps, memory = open(f"/proc/{pid}/maps"), open(f"/proc/{pid}/mem", "rb", 0)
    except OSError:
        continue
    for line in maps:
        begin, end = (int(one, 16) for one in line.split()[0].split("-"))
        try:
            memory.seek(begin)
            print("FOUND in memory of", pid) if wanted.search(memory.read(end - begin)) else None
        except (OSError, ValueError, OverflowError):
            pass
for top in ("/workspace", "/home", "/tmp", "/dev/shm", "/run", "/output"):
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isfile(path) and wanted.search(open(path, "rb").read()):
                print("FOUND in", path)
print("searched")
"""


class Asked(Handler):
    """Answers those who have the token, sends some elsewhere, and tells what it was asked with."""

    asked: list[tuple[str, str, str | None]]

    def do_GET(self) -> None:
        self.asked.append((str(self.headers["Host"]).partition(":")[0], self.path, self.headers["Authorization"]))
        if self.path == "/moved":
            place = f"https://{ELSEWHERE}:{self.headers['Host'].partition(':')[2]}/there"
            self.tell(b"", 302, location=place)
        else:
            self.tell(b"echo " + self.headers["Authorization"].encode() if self.path == "/echo" else b"welcome")


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    return make_certificate(tmp_path / "server.pem", f"IP:{THERE},IP:{ELSEWHERE}")


@pytest.fixture
def port(certificate: Path) -> Iterator[int]:
    """That of a server of this host with TLS."""
    Asked.asked = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    with serving_http(Asked, EVERYWHERE, context) as port:
        yield port


def asking(port: int) -> str:
    """A script that asks the server in ways that may have the token and in others, and then looks for it."""
    return f"""
        cat > /tmp/get.py <<'END'
        import http.client, sys, urllib.error, urllib.request
        for path in sys.argv[1:]:
            try:
                print(path, urllib.request.urlopen("https://{THERE}:{port}" + path).read().decode())
            except urllib.error.HTTPError as error:
                print(path, error.code)
            except (OSError, http.client.HTTPException):
                print(path, "cut")
        END
        cat > /tmp/search.py <<'END'
        {SEARCH.replace(chr(10), chr(10) + " " * 8)}
        END
        env | grep -i token
        python3 /tmp/get.py /repos/acme/x /repos/other /moved /echo
        python3 /tmp/search.py
        """


def injecting(port: int) -> str:
    return f"""
        network:
          allow: [{{host: '{THERE}:{port}', private: true}}, {{host: '{ELSEWHERE}:{port}', private: true}}]
          inject:
            - name: API_TOKEN
              from: {{env: API_TOKEN}}
              host: {THERE}:{port}
              bearer: true
              allow: [GET /repos/acme/**, GET /moved, GET /echo]
        """


def assert_used_and_nowhere(project: Project, port: int) -> None:
    """What is said inside, at the server, and in all that is kept on this host."""
    lines = project.logs("agent").splitlines()
    assert lines == ["/repos/acme/x welcome", "/repos/other 403", "/moved welcome", "/echo cut", "searched"]
    assert Asked.asked == [
        (THERE, "/repos/acme/x", f"Bearer {TOKEN}"),
        (THERE, "/moved", f"Bearer {TOKEN}"),
        (ELSEWHERE, "/there", None),
        (THERE, "/echo", f"Bearer {TOKEN}"),
    ]
    uses = project.record()["network"]
    assert {(use["place"], use["refusal"], use["requests"], use["credential"]) for use in uses} == {
        (f"{THERE}:{port}", None, 2, "API_TOKEN"),
        (f"{THERE}:{port}", "echo", 1, "API_TOKEN"),
        (f"{THERE}:{port}", "request", 0, "API_TOKEN"),
        (f"{ELSEWHERE}:{port}", None, 0, ""),
    }
    redactor = Redactor({"T": TOKEN.encode()})
    kept = [path for path in (project.home / "state").rglob("*") if path.is_file()]
    assert [path for path in kept if redactor.names_in(path.read_bytes())] == []
    assert len(kept) > 10


@pytest.mark.nightly
@pytest.mark.parametrize("provider", ["local", "docker"])
def test_so_do_commands_of_an_ordinary_user(project: Project, certificate: Path, port: int, provider: str) -> None:
    project.within = AS_ORDINARY
    project.env |= {"API_TOKEN": TOKEN, "SSL_CERT_FILE": str(certificate)}
    project.script(asking(port), workspace=injecting(port), provider=provider)

    project.succeed()

    assert_used_and_nowhere(project, port)


@pytest.mark.slow
@pytest.mark.scenario("BEY-24", only="provider")
@pytest.mark.parametrize("provider", PROVIDERS)
def test_commands_use_a_credential_that_is_nowhere_inside(
    project: Project, certificate: Path, port: int, provider: str
) -> None:
    project.env |= {"API_TOKEN": TOKEN, "SSL_CERT_FILE": str(certificate)}
    project.script(asking(port), workspace=injecting(port), provider=provider)

    planned = project.runner("plan", ".").out
    record = project.succeed()

    assert f"adds API_TOKEN for {THERE}:{port} as bearer" in " ".join(planned.split())
    assert_used_and_nowhere(project, port)
    uses = json.loads(project.runner("runs", "network", "last", "--output", "json").out)
    assert [use for use in record["network"] if use not in uses] == []


@pytest.mark.slow
@pytest.mark.scenario("BEY-13", only="provider")
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_mirror_of_this_hosts_configuration_is_found_and_trusted_inside(
    project: Project, certificate: Path, port: int, provider: str
) -> None:
    project.env |= {
        "SSL_CERT_FILE": str(certificate),
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": f"https://me:{TOKEN}@{THERE}:{port}/simple",
    }
    ask = "import os, urllib.request; print(urllib.request.urlopen(os.environ['PIP_INDEX_URL']).read().decode())"
    workspace = f'network: {{setup: {{allow: [pip]}}}}\nsetup_commands: ["python3 -c \\"{ask}\\""]'
    project.script("env | grep PIP_ || true", workspace=workspace, provider=provider)

    record = project.succeed()

    assert project.logs("setup") == "welcome\n"
    assert project.logs("agent") == ""
    assert [one[1:] for one in Asked.asked] == [("/simple", None)]
    assert record["network"][0]["origin"].endswith("pip: this host's configuration")
    assert TOKEN not in json.dumps(record)


INJECT = "inject: [{name: T, from: {env: API_TOKEN}, host: a.test, bearer: true}]"
REACHED = f"network: {{allow: [a.test], {INJECT}}}"


@pytest.mark.parametrize(
    ("workspace", "policy", "arguments", "code", "words"),
    [
        (f"network: {{allow: [b.test], {INJECT}}}", None, (), "manifest.bad-value", "`a.test` is not allowed here"),
        (REACHED, "secrets: [OTHER]", (), "policy.secret", "policy `house` does not allow secret `T`"),
        (REACHED, f"network: {{allow: [a.test], {INJECT}}}", (), "manifest.bad-value", "adds no credential"),
        (REACHED, None, ("--untrusted",), "policy.untrusted", "may not have secret `T`"),
        (REACHED.replace("bearer: true", "bearer: true, basic: me"), None, (), "manifest.bad-value", "exactly one way"),
        (REACHED.replace("bearer: true", "header: Host"), None, (), "manifest.bad-value", "`Host` cannot be set"),
        (REACHED.replace("true", "true, allow: [GET /a/../b]"), None, (), "manifest.bad-value", "several ways"),
    ],
    ids=["another host", "a ceiling", "in a ceiling", "a fork", "two ways", "a header of ours", "a path"],
)
def test_a_credential_that_cannot_be_kept_outside_is_an_error_at_its_line(
    project: Project, workspace: str, policy: str | None, arguments: tuple[str, ...], code: str, words: str
) -> None:
    project.env["API_TOKEN"] = TOKEN
    project.script("true", workspace=workspace, policy=policy)

    done = project.runner("plan", ".", *arguments)

    assert words in done.err
    assert code in done.errors


def test_a_proxy_of_this_host_that_cannot_be_used_is_an_error_before_anything_starts(project: Project) -> None:
    project.env["ALL_PROXY"] = "socks5://127.0.0.1:1"
    project.script("true", workspace="network: {allow: [a.test]}")

    done = project.runner("apply", ".", "--yes")

    assert "`ALL_PROXY` is not a proxy that speaks HTTP" in done.err
    assert done.code == 2
    assert project.json("runs", "list") == []
