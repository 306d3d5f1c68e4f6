"""Exec credential plug-ins, which are real programs here, asked by us and by the real kubectl with one kubeconfig."""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from runner.cluster.clusters import Clusters
from runner.cluster.credential_plugin import ASK_INTERVAL, TIMEOUT
from runner.cluster.kubeconfig import ClusterTarget, read_target
from runner.core.errors import BadKubeconfig, ClusterDenied, CredentialFailed, InputChanged, KubeconfigRefused
from runner.core.redact import Redactor
from runner.core.settings import Settings
from runner.ports.cluster import ClusterGrant, ClusterRequest
from tests.cluster.test_session import PODS, Line, api, connected, sockets
from tests.support.folder_contents import put
from tests.support.kubernetes import NAMESPACE, TOKEN, Api

V1, BETA = "client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1"
TOLD = """
import json, os, sys
here = os.path.dirname(os.path.abspath(__file__))
told = {
    "info": json.loads(os.environ["KUBERNETES_EXEC_INFO"]), "args": sys.argv[1:], "mine": os.environ.get("MINE"),
    "kept": os.environ.get("KEPT"), "input": os.readlink("/proc/self/fd/0"), "here": os.getcwd(),
}
with open(here + "/told", "a") as file:
    file.write(json.dumps(told) + "\\n")
"""


__all__ = ["api"]


def answer(version: str = V1, **status: Any) -> str:
    return json.dumps({"apiVersion": version, "kind": "ExecCredential", "status": status or {"token": TOKEN}})


class Situation:
    """A kubeconfig in a folder of its own, with the program beside it that gives its credential."""

    def __init__(self, folder: Path, api: Api) -> None:
        self.folder, self.api = folder, api
        self.config = folder / "config"
        self.redact = Redactor()
        self.now = time.time
        self.env = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "KEPT": "kept"}
        self.clusters = Clusters(Settings.from_env(self.env), self.redact, lambda: self.now())

    def program(self, text: str, name: str = "plug") -> None:
        """Python, unless it says what else it is."""
        path = self.folder / name
        put(path, text if text.startswith("#!") else f"#!/usr/bin/env python3\n{TOLD}\n{text}\n", 0o755)

    def prints(self, text: str) -> None:
        self.program(f"sys.stdout.write({text!r})")

    def write(self, exec: Mapping[str, Any] | None = None, **cluster: Any) -> None:
        entry = {"apiVersion": V1, "command": "./plug", "interactiveMode": "Never", **(exec or {})}
        entry = {key: value for key, value in entry.items() if value is not ...}
        self.api.write(self.config, {"exec": entry}, **cluster)

    def target(self) -> ClusterTarget:
        return read_target(str(self.config), None, None, {})

    def grant(self) -> ClusterGrant:
        target = self.target()
        program = target.plug_in.sha256 if target.plug_in else ""
        return ClusterGrant(
            kubeconfig=str(self.config),
            context=target.context,
            server=target.server,
            namespace=NAMESPACE,
            plug_in_sha256=program,
        )

    @asynccontextmanager
    async def line(self) -> AsyncIterator[Line]:
        told: list[ClusterRequest] = []
        async with self.clusters.open(self.grant(), told.append) as session, connected(session, told, sockets) as line:
            yield line

    async def reach(self) -> None:
        with trio.fail_after(120):
            await self.clusters.check(self.grant())

    def later(self) -> None:
        """As if the program had been asked long ago."""
        for credentials in self.clusters._credentials.values():
            credentials._asked -= ASK_INTERVAL

    def just_asked(self) -> None:
        """As if the program had been asked this moment, however long that takes here."""
        for credentials in self.clusters._credentials.values():
            credentials._asked = math.inf

    def told(self) -> list[Any]:
        """What the program was told each time."""
        path = self.folder / "told"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def kubectl(self, program: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program / "bin" / "kubectl", "--kubeconfig", self.config, "get", "--raw", "/version"],
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )


@pytest.fixture
def situation(tmp_path: Path, api: Api) -> Situation:
    found = Situation(tmp_path, api)
    found.write()
    found.prints(answer())
    return found


# --- as kubectl does ---


@pytest.mark.scenario("BEY-23")
@pytest.mark.parametrize("version", [V1, BETA], ids=["v1", "v1beta1"])
@pytest.mark.parametrize(
    ("entry", "cluster"),
    [
        pytest.param({}, {}, id="plain"),
        pytest.param({"provideClusterInfo": True}, {}, id="cluster"),
        pytest.param({"provideClusterInfo": True, "interactiveMode": "IfAvailable"}, {}, id="interactive"),
        pytest.param(
            {"args": ["get-token", "", "a b", "$HOME"], "env": [{"name": "MINE", "value": "y=z"}, {"name": "EMPTY"}]},
            {},
            id="arguments",
        ),
        pytest.param({"env": [{"name": "KEPT", "value": "changed"}], "args": None}, {}, id="variable"),
        pytest.param(
            {"provideClusterInfo": True},
            {
                "tls_server_name": "kube.test",
                "disable_compression": True,
                "extensions": [
                    {"name": "client.authentication.k8s.io/exec", "extension": {"b": [1, None, "<\u00e9>"], "a": {}}},
                    {"name": "another", "extension": {"not": "this"}},
                ],
            },
            id="extension",
        ),
        pytest.param(
            {"provideClusterInfo": True},
            {"certificate_authority_data": None, "certificate_authority": "ca.pem"},
            id="authority in a file",
        ),
    ],
)
async def test_a_program_is_told_what_kubectl_tells_it(
    situation: Situation, kubectl: Path, version: str, entry: dict[str, Any], cluster: dict[str, Any]
) -> None:
    (situation.folder / "ca.pem").write_bytes((situation.api.folder / "ca.pem").read_bytes())
    situation.write({"apiVersion": version, **entry}, **cluster)
    situation.prints(answer(version))

    done = situation.kubectl(kubectl)
    await situation.reach()

    assert done.returncode == 0, done.stderr
    theirs, ours = situation.told()
    assert ours == theirs
    assert ours["input"] == "/dev/null"


@pytest.mark.parametrize("command", ["plug-on-path", "bin/plug", "ABSOLUTE"])
async def test_a_program_is_found_where_kubectl_finds_it(situation: Situation, kubectl: Path, command: str) -> None:
    folder = situation.folder / "bin"
    folder.mkdir()
    for name in ("plug-on-path", "plug"):
        situation.program(f"sys.stdout.write({answer()!r})", f"bin/{name}")
    situation.env["PATH"] = f"{folder}:/usr/bin:/bin"
    situation.clusters = Clusters(Settings.from_env(situation.env))
    situation.write({"command": str(folder / "plug") if command == "ABSOLUTE" else command})

    assert situation.kubectl(kubectl).returncode == 0
    await situation.reach()
    assert len((folder / "told").read_text().splitlines()) == 2


GOOD = {
    "yaml": f"apiVersion: {V1}\nkind: ExecCredential\nstatus:\n  token: {TOKEN}\n",
    "other fields": json.dumps({**json.loads(answer(token=TOKEN, expirationTimestamp=None, more=1)), "more": 2}),
    "fraction": answer(token=TOKEN, expirationTimestamp="2999-01-01T00:00:00.5+02:00"),
}
BAD = {
    "nothing": ("", "printed no ExecCredential"),
    "garbage": ("\0\x1b[31mgarbage", "printed no ExecCredential"),
    "words": ("Please log in", "printed no ExecCredential"),
    "two": (f"{answer()} {answer()}", "printed no ExecCredential"),
    "list": ("[]", "printed no ExecCredential"),
    "no version": ("{}", "printed `None of None`, and the kubeconfig says"),
    "another version": (answer(BETA), f"printed `ExecCredential of {BETA}`, and the kubeconfig says {V1}"),
    "another kind": (answer().replace("ExecCredential", "Secret"), f"printed `Secret of {V1}`, and"),
    "no status": (json.dumps({"apiVersion": V1, "kind": "ExecCredential"}), "printed no `status`"),
    "empty": (answer(more=1), "printed neither a token nor a certificate"),
    "number": (answer(token=5), "printed a `token` that is not a text"),
    "time": (answer(token=TOKEN, expirationTimestamp="tomorrow"), "an `expirationTimestamp` that is not a time"),
    "no zone": (answer(token=TOKEN, expirationTimestamp="2999-01-01T00:00:00"), "that is not a time"),
    "key alone": (answer(clientKeyData="x"), "printed a certificate or its key, and not both"),
    "no certificate": (answer(clientKeyData="x", clientCertificateData="y"), "client certificate of context `prod-eu`"),
    "two lines": (answer(token=f"{TOKEN}\r\nx: y"), "printed a token that is not one word"),
}


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD)
async def test_answers_that_kubectl_takes(situation: Situation, kubectl: Path, text: str) -> None:
    situation.prints(text)

    assert situation.kubectl(kubectl).returncode == 0
    await situation.reach()


@pytest.mark.parametrize(("text", "words"), BAD.values(), ids=BAD)
async def test_answers_that_kubectl_refuses_too(situation: Situation, kubectl: Path, text: str, words: str) -> None:
    situation.prints(text)

    assert situation.kubectl(kubectl).returncode != 0
    with pytest.raises(CredentialFailed) as caught:
        await situation.reach()
    assert words in caught.value.message
    assert (caught.value.exit_code, bool(caught.value.hint)) == (4, True)
    assert caught.value.message.isprintable()
    assert TOKEN not in caught.value.message
    assert situation.api.asked == []


ENTRIES = {
    "no mode": ({"interactiveMode": ...}, "has no `interactiveMode`"),
    "unknown mode": ({"interactiveMode": "Often"}, "has the interactiveMode `Often`"),
    "always": ({"interactiveMode": "Always"}, "must ask a person, and has no terminal here"),
    "old version": ({"apiVersion": "client.authentication.k8s.io/v1alpha1"}, "has the apiVersion `client.auth"),
    "no version": ({"apiVersion": ...}, "has the apiVersion ``"),
    "no command": ({"command": ""}, "has no `command`"),
    "number": ({"args": [5]}, "has `args` that are not texts"),
    "nameless": ({"env": [{"name": "", "value": "x"}]}, "has a variable in `env` without a name"),
}


@pytest.mark.parametrize(("entry", "words"), ENTRIES.values(), ids=ENTRIES)
def test_entries_that_kubectl_refuses_too(
    situation: Situation, kubectl: Path, entry: dict[str, Any], words: str
) -> None:
    situation.write(entry)

    assert situation.kubectl(kubectl).returncode != 0
    with pytest.raises((BadKubeconfig, KubeconfigRefused)) as caught:
        situation.target()
    assert words in caught.value.message
    assert situation.told() == []


def test_a_beta_plug_in_needs_no_mode(situation: Situation, kubectl: Path) -> None:
    situation.write({"apiVersion": BETA, "interactiveMode": ...})
    situation.prints(answer(BETA))

    assert situation.kubectl(kubectl).returncode == 0
    assert situation.target().plug_in is not None


@pytest.mark.parametrize(
    "beside", [{"token": TOKEN}, {"tokenFile": "token"}, {"username": "a", "password": "b"}], ids=str
)
def test_a_credential_of_the_kubeconfig_itself_goes_first(
    situation: Situation, kubectl: Path, beside: dict[str, str]
) -> None:
    (situation.folder / "token").write_text(TOKEN)
    situation.api.write(situation.config, {"exec": {"apiVersion": V1, "command": "./plug"} | _NEVER, **beside})

    assert situation.kubectl(kubectl).returncode == (0 if "username" not in beside else 1)
    assert situation.target().plug_in is None
    assert situation.told() == []


_NEVER = {"interactiveMode": "Never"}


# --- what goes wrong with programs ---


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("#!/bin/sh\nexit 3\n", "exited 3 and said nothing", id="fails"),
        pytest.param(
            "#!/bin/sh\nprintf 'first\\nsecond \\033[31m login\\n' >&2; exit 1\n",
            "exited 1: first second \\x1b[31m login",
            id="complains",
        ),
        pytest.param("#!/bin/sh\nkill -9 $$\n", "was ended by signal 9", id="killed"),
        pytest.param("#!/bin/sh\nread name || exit 7\necho hello\n", "exited 7", id="asks"),
        pytest.param("#!/bin/sh\nread name </dev/tty || exit 8\n", "exited", id="asks a terminal"),
        pytest.param("#!/nowhere/sh\n", "cannot be started: No such file or directory", id="no interpreter"),
        pytest.param("#!/bin/sh\nyes\n", "printed more than 1 MiB", id="endless"),
        pytest.param("#!/bin/sh\nyes >&2 & sleep 0.2; exit 4\n", "exited 4: ", id="loud"),
    ],
)
async def test_a_program_that_fails_is_said_with_the_end_of_its_complaint(
    situation: Situation, text: str, words: str
) -> None:
    situation.program(text)

    with pytest.raises(CredentialFailed) as caught:
        await situation.reach()
    assert caught.value.message.startswith("credential plug-in `./plug` of user `me` ")
    assert words in caught.value.message
    assert len(caught.value.message) < 400


async def test_a_program_that_is_not_there_is_said_with_its_hint(situation: Situation) -> None:
    situation.write({"command": "aws-iam", "installHint": "get it\nfrom there \x1b[1m"})
    with pytest.raises(CredentialFailed) as caught:
        await situation.reach()

    assert caught.value.message == "credential plug-in `aws-iam` of user `me` does not exist, or is not a program"
    assert caught.value.hint == "get it from there \\x1b[1m"


async def test_a_program_that_hangs_is_killed_with_what_it_has_started(
    situation: Situation, autojump_clock: MockClock
) -> None:
    autojump_clock.autojump_threshold, autojump_clock.rate = math.inf, 1
    pids = situation.folder / "pids"
    situation.program(f"#!/bin/sh\nsleep 1000 &\necho $$ $! > {pids}.half\nmv {pids}.half {pids}\nwait\n")

    async def ask() -> None:
        with pytest.raises(CredentialFailed, match="took more than 60 s") as caught:
            await situation.reach()
        assert caught.value.hint == "log in first: it has no terminal here, so it cannot ask"

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        while not pids.exists():
            await trio.sleep(0.05)
        autojump_clock.jump(TIMEOUT)
    with trio.fail_after(10):  # a signal takes its time, too
        while any(map(_lives, pids.read_text().split())):
            await trio.sleep(0.05)


async def test_whoever_cancels_ends_the_program(situation: Situation) -> None:
    situation.program("#!/bin/sh\necho $$ > ${0%/*}/pids\nsleep 1000\n")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(situation.reach)
        while not (situation.folder / "pids").exists() or not (situation.folder / "pids").read_text():
            await trio.sleep(0.05)
        nursery.cancel_scope.cancel()

    assert not _lives((situation.folder / "pids").read_text().strip())


def _lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_program_that_leaves_a_daemon_behind_is_not_waited_for(situation: Situation) -> None:
    situation.program(f"#!/bin/sh\nprintf '%s' '{answer()}'\nsetsid sleep 20 &\n")
    with trio.fail_after(18):
        await situation.reach()


# --- how long a credential is good for ---


async def test_a_credential_is_asked_for_once_and_hidden_from_all_that_is_written(situation: Situation) -> None:
    for _ in range(3):
        await situation.reach()

    assert len(situation.told()) == 1
    assert situation.redact.text(f"got {TOKEN}") == "got [redacted:credential of prod-eu]"
    assert situation.redact.late == ()


async def test_a_credential_is_renewed_before_its_end(situation: Situation) -> None:
    start = time.time()
    end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(start + 900))
    situation.prints(answer(token=TOKEN, expirationTimestamp=end))
    counts = []
    for after in (0, 800, 880, 895, 2000):
        situation.now = lambda after=after: start + after
        situation.later()
        await situation.reach()
        counts.append(len(situation.told()))

    assert counts == [1, 1, 1, 2, 3]


async def test_a_credential_that_ended_already_is_shown_once_as_kubectl_does(
    situation: Situation, kubectl: Path
) -> None:
    """The clock of this host may be wrong; the cluster decides."""
    situation.prints(answer(token=TOKEN, expirationTimestamp="2001-01-01T00:00:00Z"))

    assert situation.kubectl(kubectl).returncode == 0
    await situation.reach()
    situation.api.tokens = set()
    assert "You must be logged in to the server" in situation.kubectl(kubectl).stderr
    with pytest.raises(ClusterDenied) as caught:
        await situation.reach()
    assert caught.value.hint is not None
    assert "`./plug`" in caught.value.message


async def test_a_refused_credential_is_asked_for_again_once(situation: Situation) -> None:
    """Even if an agent goes on asking: a program is not run for each of its requests."""
    situation.program(
        f"count = len(open(here + '/told').readlines())\nsys.stdout.write({answer(token='token-COUNT')!r}"
        ".replace('COUNT', '0' * count))"
    )
    situation.api.tokens = {"token-0"}
    async with situation.line() as line:
        first = await line.get(PODS)
        situation.api.tokens = {"token-00"}
        situation.later()
        statuses = [(await line.get(PODS)).status for _ in range(3)]
        situation.just_asked()
        situation.api.tokens = set()
        refused = [(await line.get(PODS)).status for _ in range(5)]

    assert (first.status, statuses, refused) == (200, [200] * 3, [401] * 5)
    assert len(situation.told()) == 2


async def test_a_program_that_fails_under_way_is_not_run_for_each_request(situation: Situation) -> None:
    situation.prints(answer(token=TOKEN, expirationTimestamp="2999-01-01T00:00:00Z"))
    async with situation.line() as line:
        assert (await line.get(PODS)).status == 200
        situation.program("sys.stderr.write('/home/me/.aws is gone'); sys.exit(1)")
        situation.now = lambda: 99e9
        situation.later()
        heard = [await line.get(PODS)]
        situation.just_asked()
        heard += [await line.get(PODS) for _ in range(3)]

    assert [one.status for one in heard] == [502] * 4
    assert dict(line.session.credential_errors) == {
        "credential plug-in `./plug` of user `me` exited 1: /home/me/.aws is gone": "cluster.credential"
    }
    assert {one.json()["message"] for one in heard} == {"runner: the cluster cannot be reached: its credential is gone"}
    assert len(situation.told()) == 2


async def test_client_certificates_of_a_program_are_shown_and_replaced(situation: Situation, authority: Path) -> None:
    pem = {f"client{name}Data": (authority / f"client.{end}").read_text() for name, end in _PARTS}
    situation.prints(answer(**pem, expirationTimestamp="2999-01-01T00:00:00Z"))
    async with situation.line() as line:
        first = await line.get(PODS)
        situation.prints(answer(token=TOKEN))
        situation.later()
        situation.now = lambda: 99e9
        second = await line.get(PODS)

    assert (first.status, second.status) == (200, 200)
    assert ["authorization" in one.headers for one in situation.api.asked] == [False, True]
    assert "PRIVATE" not in situation.redact.text(pem["clientKeyData"])


_PARTS = (("Certificate", "pem"), ("Key", "key"))


# --- whose kubeconfig it is ---


@pytest.mark.parametrize(
    ("places", "words"),
    [
        pytest.param({"": "in the repository of the manifest"}, "is in the repository of the manifest", id="inside"),
        pytest.param({"sub": "in the incident's directory"}, None, id="elsewhere"),
        pytest.param({"": "", "..": "in the repository of the manifest"}, None, id="usual place"),
        pytest.param({"": "in the incident's directory", "..": ""}, "in the incident's directory", id="nearer"),
    ],
)
def test_no_program_is_named_by_a_kubeconfig_of_others(
    situation: Situation, places: dict[str, str], words: str | None
) -> None:
    foreign = {(situation.folder / name).resolve(): what for name, what in places.items()}
    if words is None:
        assert read_target(str(situation.config), None, None, {}, foreign=foreign).plug_in is not None
        return
    with pytest.raises(KubeconfigRefused, match=words) as caught:
        read_target(str(situation.config), None, None, {}, foreign=foreign)
    assert "none is run from there" in caught.value.message
    assert "--reader-manifest" in str(caught.value.hint)


def test_a_foreign_file_among_several_stops_the_programs_of_all(situation: Situation) -> None:
    """Its context could lead the credential of another file's program to a server of its own."""
    put(situation.folder / "theirs" / "config", "{}", 0o600)
    files = f"{situation.config}:{situation.folder}/theirs/config"

    with pytest.raises(KubeconfigRefused):
        read_target(files, None, None, {}, foreign={(situation.folder / "theirs").resolve(): "beside the manifest"})


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"command": "./other"}, id="command"),
        pytest.param({"args": ["--as", "admin"]}, id="arguments"),
        pytest.param({"env": [{"name": "AWS_PROFILE", "value": "admin"}]}, id="variable"),
        pytest.param(None, id="no program"),
    ],
)
async def test_a_program_that_is_not_the_planned_one_is_not_run(
    situation: Situation, change: dict[str, Any] | None
) -> None:
    grant = situation.grant()
    if change is None:
        situation.api.write(situation.config)
    else:
        situation.write(change)

    with pytest.raises(InputChanged, match="context `prod-eu` has its credential from ") as caught:
        await situation.clusters.check(grant)
    assert caught.value.hint == "plan again"
    assert situation.told() == []


async def test_a_program_that_is_new_in_a_kubeconfig_is_not_run(situation: Situation) -> None:
    situation.api.write(situation.config)
    grant = situation.grant()
    situation.write()

    with pytest.raises(InputChanged, match=r"from credential plug-in `\./plug` of user `me` now"):
        await situation.clusters.check(grant)
    assert situation.told() == []


def test_what_may_be_secret_of_an_entry_is_shown_nowhere(situation: Situation) -> None:
    situation.write({"args": ["--client-secret=s3cret"], "env": [{"name": "A", "value": "s3cret"}]})

    assert "s3cret" not in repr(situation.target())
    situation.write({"args": ["s3cret", 5]})
    with pytest.raises(BadKubeconfig) as caught:
        situation.target()
    assert "s3cret" not in f"{caught.value.message}{caught.value.hint}"
