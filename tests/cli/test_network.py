"""What a manifest lets a workspace reach, in whole runs: through the proxy, and in no other way."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import dockerd
from tests.support.http_servers import EVERYWHERE, Handler, serving_http
from tests.support.needs import program
from tests.support.situations import REPO, Project, document, git

# Not 127.0.0.1, which programs reach without a proxy, and which inside is the workspace's own.
THERE, ELSEWHERE = "127.0.0.2", "127.0.0.3"
PROVIDERS = ["local", "docker", pytest.param("gvisor", marks=dockerd.GVISOR.mark)]
PROGRAM = """
import socket, sys, urllib.error, urllib.request

port = int(sys.argv[1])
print(urllib.request.urlopen(f"http://{sys.argv[2]}:{port}/a").read().decode())
for url in (f"http://{sys.argv[3]}:{port}/", "http://169.254.169.254/latest/meta-data/"):
    try:
        urllib.request.urlopen(url)
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode().strip())
for family, place in ((socket.AF_INET, sys.argv[2]), (socket.AF_INET6, "::ffff:" + sys.argv[2])):
    try:
        socket.socket(family).connect((place, port))
        print("OUT")
    except OSError as error:
        print(type(error).__name__)
try:
    socket.getaddrinfo("example.org", 80)
    print("OUT")
except OSError:
    print("no names")
"""


class Hello(Handler):
    """Says hello; of a path with a bare repository it has the files."""

    def do_GET(self) -> None:
        body = f"hello {self.path} {self.headers['Host']}".encode()
        there = True
        if "remote.git" in self.path:
            file = Path(self.path.partition("?")[0])
            there = file.is_file()
            body = file.read_bytes() if there else b""
        self.tell(body, 200 if there else 404)


@pytest.fixture
def port() -> Iterator[int]:
    """That of a server on this host."""
    with serving_http(Hello, EVERYWHERE) as port:
        yield port


@pytest.mark.slow
@pytest.mark.scenario("BEY-13", only="provider")
@pytest.mark.parametrize("provider", PROVIDERS)
def test_commands_reach_what_the_manifest_names_and_nothing_else(project: Project, port: int, provider: str) -> None:
    (project.folder / "program.py").write_text(PROGRAM)
    project.script(
        f"cat > p.py <<'END'\n{PROGRAM}\nEND\npython3 p.py {port} {THERE} {ELSEWHERE}",
        workspace=f"network: {{allow: [{{host: '{THERE}:{port}', private: true}}]}}",
        provider=provider,
    )

    planned = project.runner("plan", ".").out
    record = project.succeed()

    assert f"{THERE}:{port}" in planned
    lines = project.logs("agent").splitlines()
    assert lines[0] == f"hello /a {THERE}:{port}"
    assert [line.split()[0] for line in lines[1:3]] == ["403", "403"]
    assert "OUT" not in lines
    assert lines[-1] == "no names"
    uses = json.loads(project.runner("runs", "network", "last", "--output", "json").out)
    assert [(use["place"], use["refusal"], use["connections"]) for use in uses] == [
        (f"{THERE}:{port}", None, 1),
        (f"{ELSEWHERE}:{port}", "not-allowed", 1),
        ("169.254.169.254:80", "not-allowed", 1),
    ]
    assert record["network"] == uses
    assert "not-allowed" in project.runner("runs", "network", "last").out
    assert f"network    1 connection ({THERE}:{port}); 2 refused" in project.runner("runs", "show", "last").out


@pytest.mark.slow
@pytest.mark.scenario("BEY-13", only="local")
def test_each_step_reaches_what_is_named_for_it(project: Project, port: int) -> None:
    ask = f"curl -sf -o /dev/null -w '%{{http_code}}' http://{THERE}:{port}/ || echo no"
    project.script(
        f"touch made\n{ask}",
        workspace=f"""\
            setup_commands: ["{ask}"]
            network:
              setup: {{allow: [{{host: '{THERE}:{port}', private: true}}]}}
              post_hook: open
              verify: {{allow: [{{host: '{THERE}:{port}', private: true}}]}}""",
        agent=f'post_hooks: ["{ask}"]',
        run=f'snapshot: {{}}\nverify: {{commands: [{{run: "{ask}"}}]}}',
    )

    record = project.succeed()

    told = {step: project.logs(step).strip() for step in ("setup", "agent", "post_hook", "verify")}
    assert told == {"setup": "200", "agent": "000no", "post_hook": "403no", "verify": "200"}
    assert record["open_network"] == ["post_hook"]
    assert project.runner("runs", "show", "last").out.startswith(
        "NETWORK OPEN: post_hook may reach every public host\n"
    )
    learned = project.runner("network", "learn", "last").out
    assert [line.strip() for line in learned.splitlines()[1:]] == [
        "setup:", "allow:", f'- {{host: "{THERE}:{port}", private: true}}',
        "post_hook:", "allow:", f'- {{host: "{THERE}:{port}", private: true}}  # refused: private',
        "verify:", "allow:", f'- {{host: "{THERE}:{port}", private: true}}',
    ]  # fmt: skip
    lines = project.manifest.read_text().splitlines()
    (reached,) = [use for use in record["network"] if use["refusal"] is None]
    assert lines[int(reached["origin"].rpartition(":")[2]) - 1].strip().startswith("verify: {allow:")


@pytest.mark.slow
@pytest.mark.scenario("BEY-13", only="provider")
@pytest.mark.parametrize("provider", PROVIDERS)
def test_without_a_network_there_is_no_proxy(project: Project, port: int, provider: str) -> None:
    project.script(
        "env | grep -i proxy\n"
        f"python3 -c 'import urllib.request; urllib.request.urlopen(\"http://{THERE}:{port}\")' && echo OUT\ntrue",
        provider=provider,
    )

    project.succeed()

    assert project.logs("agent") == ""
    assert project.runner("runs", "network", "last").out == "no connection, and none was refused\n"


@pytest.mark.parametrize("network", ["{allow: []}", "{agent: {allow: []}}", "none"])
def test_an_empty_list_is_the_same_as_none(project: Project, network: str) -> None:
    project.script("true", workspace=f"network: {network}")
    listed = project.json("plan", ".")["runs"][0]
    project.script("true")
    absent = project.json("plan", ".")["runs"][0]

    assert [step["network"] for step in listed["steps"]] == [step["network"] for step in absent["steps"]]


@pytest.mark.parametrize(
    ("word", "named"),
    [("pipp", "pip"), ("registires", "registries"), ("npm", None), ("nexus", None), ("gi.test", None)],
)
def test_a_word_that_is_nearly_a_set_is_taken_for_no_host(project: Project, word: str, named: str | None) -> None:
    project.script("true", workspace=f"network: {{setup: {{allow: [{word}]}}}}")
    project.add(document("NetworkSet", "registries", "allow: [pypi.org]"))

    done = project.runner("validate", ".")

    assert done.errors == ([] if named is None else ["manifest.unknown-reference"])
    told = f"did you mean `{named}`? a host of this name is `{{host: {word}, private: true}}`"
    assert named is None or told in done.err


INSTALL = {
    "npm": "cd /tmp; echo '{}' > package.json; npm install -s ms && ls node_modules/ms",
    "pip": "python3 -m venv /tmp/v && /tmp/v/bin/pip install -q six && ls /tmp/v/lib/python3*/site-packages/six.py",
}


@pytest.mark.nightly
@pytest.mark.parametrize("tool", INSTALL)
def test_a_tool_installs_from_where_this_machine_has_it_do_so(project: Project, tool: str) -> None:
    program(tool).require()
    project.env |= {name: os.environ[name] for name in ("SSL_CERT_FILE", "PIP_CONFIG_FILE") if name in os.environ}
    project.script(
        "true",
        workspace=f"""
        network: {{setup: {{allow: [{tool}]}}}}
        setup_commands:
          - {json.dumps(INSTALL[tool])}""",
    )

    record = project.succeed()

    assert sum(one["connections"] for one in record["network"] if one["refusal"] is None) >= 1


@pytest.mark.slow
@pytest.mark.scenario("BEY-13", only="local")
def test_git_fetches_from_the_remotes_of_the_repository(project: Project, repository: Path, port: int) -> None:
    git(project.folder, "clone", "-q", "--bare", "repo", "remote.git")
    git(project.folder / "remote.git", "update-server-info")
    remote = f"http://{THERE}:{port}{project.folder}/remote.git"
    git(repository, "remote", "add", "origin", remote)
    project.script(
        f"git fetch -q {remote} main && git rev-parse FETCH_HEAD\ngit ls-remote http://{ELSEWHERE}:{port}/ || true",
        workspace=f"{REPO}\nnetwork: {{agent: {{allow: [git]}}}}",
    )

    record = project.succeed()

    assert project.logs("agent").strip() == git(repository, "rev-parse", "HEAD")
    assert {(one["place"], one["refusal"]) for one in record["network"]} == {
        (f"{THERE}:{port}", None),
        (f"{ELSEWHERE}:{port}", "not-allowed"),
    }


def test_a_look_at_what_is_reached_opens_every_step_as_far_as_policies_let_it(project: Project) -> None:
    project.script("true", workspace="network: none")
    planned = project.runner("plan", ".", "--record-network")
    assert "NETWORK OPEN: every public host for agent (--record-network)" in planned.out

    project.script("true", policy="network: none")
    assert project.runner("plan", ".", "--record-network").errors == ["policy.network"]
    assert "manifests of a fork get no network" in project.runner("plan", ".", "--record-network", "--untrusted").err


@pytest.mark.slow
def test_a_look_at_what_is_reached_leaves_what_the_plan_names(project: Project, port: int) -> None:
    """Hosts with private addresses, too, which `open` is not."""
    ask = "curl -s -w '%{http_code} ' -o /dev/null"
    network = f"network: {{agent: {{allow: [{{host: '{THERE}:{port}', private: true}}]}}}}"
    project.script(f"{ask} http://{THERE}:{port}/ -o /dev/null http://{ELSEWHERE}:{port}/", workspace=network)

    record = project.succeed("--record-network")

    assert project.logs("agent").split() == ["200", "403"]
    assert record["open_network"][0] == "agent"
    learned = project.runner("network", "learn", "last").out
    assert f'- {{host: "{THERE}:{port}", private: true}}\n' in learned


@pytest.mark.parametrize(
    ("network", "named", "words"),
    [
        ("{allow: [pypi.org]}", "network: {allow: [pypi.org, other.org]}", ""),
        ("{allow: [pypi.org, more.org]}", "network: {allow: [pypi.org]}", "does not allow network more.org"),
        ("open", "network: {allow: [pypi.org]}", "does not allow network open"),
        ("{allow: [pypi.org]}", "network: {allow: [registries]}", "does not allow network pypi.org"),
        ("{allow: [pip]}", "network: {allow: [pypi.org]}", "no tool of this host is asked for the hosts of `pip`"),
        ("{allow: [pypi.org]}", "max_file_size: 1M", "manifests of a fork get no network"),
        (
            "{allow: [pypi.org], inject: [{name: T, from: {env: T}, host: pypi.org, bearer: true}]}",
            "network: {allow: [pypi.org]}",
            "an untrusted manifest may not have secret `T`",
        ),
    ],
)
def test_a_fork_reaches_what_the_policy_of_this_host_names_and_nothing_else(
    project: Project, network: str, named: str, words: str
) -> None:
    """Whatever sets and policies its own documents have."""
    project.script("true", workspace=f"network: {network}", policy="network: open")
    project.add(document("NetworkSet", "registries", "allow: [pypi.org]"))
    held_to = project.folder.parent / "policy.yaml"
    held_to.write_text(document("Policy", "house", named))
    project.env["RUNNER_UNTRUSTED_POLICY"] = str(held_to)

    planned = project.runner("plan", ".", "--untrusted")

    assert words in planned.err
    assert (planned.code == 0) is (words == ""), planned.err


@pytest.mark.parametrize(
    ("arguments", "provider", "policy", "code", "words"),
    [
        ((), "process", None, "plan.unenforceable", "`process` cannot enforce network pypi.org"),
        (("--untrusted",), "local", None, "policy.network", "manifests of a fork get no network"),
        ((), "local", "network: none", "policy.network", "policy `house` does not allow network pypi.org"),
        ((), "local", "network: {allow: [pypi.org:443]}", "policy.network", "allowed: pypi.org:443"),
        ((), "local", "network: {verify: open, setup: {allow: [pypi.org]}}", "policy.network", "network pypi.org"),
    ],
    ids=["a provider without", "a fork", "no ceiling", "a lower ceiling", "a ceiling of other steps"],
)
def test_what_cannot_be_held_or_allowed_is_refused_at_its_line(
    project: Project, arguments: tuple[str, ...], provider: str, policy: str | None, code: str, words: str
) -> None:
    project.script("true", workspace="network: {allow: [pypi.org]}", provider=provider, policy=policy)

    done = project.runner("plan", ".", *arguments)

    assert code in done.errors
    assert words in done.err
    assert "network: {allow: [pypi.org]}" in done.err
