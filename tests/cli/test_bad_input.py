"""Bad documents and bad files beside them, at the command line: refused at once with a code, and nothing is made.

The number in front of a case is its number in the catalogue of hazards.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.support.bad_input import Make, committed, refused, say
from tests.support.situations import REPO, Project, document, git

WORK = document("IncidentRun", "work", "agent_type: worker")
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


def text(content: str | bytes) -> Make:
    """A project of one manifest with this content."""
    raw = content.encode() if isinstance(content, str) else content
    return lambda project: project.manifest.write_bytes(raw)


def worker(*lines: str, workspace: str = "", run: str = "", script: str = "{path: agent.sh}") -> Make:
    """A project of one run whose agent type has these further lines."""

    def make(project: Project) -> None:
        project.script("echo ran", workspace=workspace, run=run, agent="\n".join(lines))
        project.edit("{path: agent.sh}", script)

    return make


DOCUMENTS = {  # of each code one; all that a document can have wrong with it is in tests/manifest
    "1 a key twice": (text(WORK + "  prompt: a\n  prompt: b\n"), "manifest.duplicate-key"),
    "2 aliases that multiply": (text(BOMB), "manifest.too-large"),
    "4 an alias of itself": (text("a: &a [*a]\n"), "manifest.syntax"),
    "5 a tag that calls": (text("!!python/object/apply:os.system ['touch pwned']\n"), "manifest.tag"),
    "7 minutes and seconds": (worker(run="timeout: 1:30"), "manifest.bad-value"),
    "8 a misspelt field": (worker(workspace="protected_path: [a]"), "manifest.unknown-field"),
    "9 a version of the future": (text(WORK.replace("runner/v1", "runner/v9")), "manifest.api-version"),
    "11 a reference in another case": (worker(run="policy: House"), "manifest.unknown-reference"),
    "13 a name that climbs": (text(WORK.replace("name: work", "name: ../x")), "manifest.name"),
    "16 not UTF-8": (text(b"a: \xff\n"), "manifest.encoding"),
    "26 attributes in a template": (worker("env: {A: '{{ run.__class__ }}'}"), "manifest.template"),
    "28 a template that multiplies": (worker("env: {A: \"{{ 'a' * 1000000000 }}\"}"), "manifest.template"),
    "76 everything protected": (worker(workspace="protected_paths: [.]"), "manifest.bad-value"),
    "61 a group in a forbidden pattern": (
        lambda project: project.script("true", policy="forbidden_patterns: ['*.@(pem|key)']"),
        "manifest.bad-value",
    ),
    "61 a group in a file to verify": (worker(run="verify: {files: {forbidden: ['!(a)']}}"), "manifest.bad-value"),
}


@pytest.mark.parametrize("verb", ["plan", "apply"])
@pytest.mark.parametrize(("make", "code"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_a_bad_document_is_refused(project: Project, make: Make, code: str, verb: str) -> None:
    make(project)

    said = refused(project, verb, project.folder)

    assert said.code == 2
    assert code in said.errors
    assert "-->" in said.err
    assert not (project.folder / "pwned").exists()


def fifo(path: Path) -> None:
    os.mkfifo(path)


def circle(path: Path) -> None:
    path.symlink_to(path.name)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [fifo, Path.mkdir, endless, circle], ids=["FIFO", "folder", "device", "circle"])
@pytest.mark.parametrize("verb", ["validate", "plan", "apply"])
def test_a_manifest_that_is_no_file_is_refused(project: Project, make: Make, verb: str) -> None:
    """Case 17."""
    path = project.folder / "x.runner.yaml"
    make(path)  # type: ignore[arg-type]

    assert refused(project, verb, path).code == 2


@pytest.mark.parametrize(
    ("make", "code", "exit_code"),
    [
        (fifo, "manifest.bad-value", 2),
        (Path.mkdir, "manifest.bad-value", 2),
        (circle, "manifest.bad-value", 2),
        (lambda path: None, "manifest.bad-value", 2),
        (endless, "manifest.path-escape", 3),
        (lambda path: path.symlink_to("/etc/hostname"), "manifest.path-escape", 3),
        (lambda path: path.write_bytes(b"x" * (17 << 20)), "manifest.bad-value", 2),
    ],
    ids=["FIFO", "folder", "circle", "missing", "device", "outside", "17 MiB"],
)
def test_a_script_that_can_not_be_played_is_refused(project: Project, make: Make, code: str, exit_code: int) -> None:
    """Cases 17 and 25."""
    worker(script="{path: other.sh}")(project)
    make(project.folder / "other.sh")  # type: ignore[arg-type]

    said = refused(project, "apply", project.folder)

    assert (said.code, said.errors) == (exit_code, [code])
    assert "all.runner.yaml:6:" in said.err


# --- incidents -------------------------------------------------------------------------------------


def folder_with(name: str | bytes, content: bytes) -> Make:
    def make(path: Path) -> None:
        path.mkdir()
        with open(os.path.join(os.fsencode(path), os.fsencode(name)), "wb") as file:
            file.write(content)

    return make  # type: ignore[return-value]


def crowded(path: Path) -> None:
    path.mkdir()
    for number in range(2_000):
        (path / str(number)).touch()


def deep(path: Path) -> None:
    path.mkdir()
    here = os.open(path, os.O_RDONLY)
    for _ in range(1_500):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def waiting(path: Path) -> None:
    path.mkdir()
    os.mkfifo(path / "events")


def linked(path: Path) -> None:
    path.mkdir()
    (path / "told").write_text("{}")
    (path / "incident.json").symlink_to("told")


INCIDENTS = {
    "missing": (lambda path: None, "not a directory"),
    "a file": (lambda path: path.write_text(""), "not a directory"),
    "a circle": (circle, "not a directory"),
    "a link as incident.json": (linked, "`incident.json`: a link, and none is followed"),
    "a directory as incident.json": (lambda path: (path / "incident.json").mkdir(parents=True), "`: a directory"),
    "an incident.json of 17 MiB": (folder_with("incident.json", b" " * (17 << 20)), "`: larger than 16 MiB"),
    "35 no JSON": (folder_with("incident.json", b"{"), "incident.json is not JSON"),
    "35 deep JSON": (folder_with("incident.json", b'{"a":' * 400 + b"1" + b"}" * 400), "nested too deeply"),
    "35 JSON without end": (folder_with("incident.json", b"[" * 100_000), "nested too deeply"),
    "35 a list": (folder_with("incident.json", b"[]"), "not an object"),
    "35 no number": (folder_with("incident.json", b'{"a": NaN}'), "`NaN` is not a number"),
    "35 not UTF-8": (folder_with("incident.json", b'{"a": "\xff"}'), "not UTF-8"),
    "35 half a character": (folder_with("incident.json", b'{"a": "\\ud800"}'), "half a character"),
}


@pytest.mark.parametrize(("make", "words"), INCIDENTS.values(), ids=INCIDENTS)
def test_an_incident_that_can_not_be_read_is_refused(project: Project, make: Make, words: str) -> None:
    worker(run="incident: {directory: inc}\nprompt: '{{ incident.title }}'")(project)
    make(project.folder / "inc")  # type: ignore[arg-type]

    said = refused(project, "apply", project.folder)

    assert (said.code, said.errors) == (2, ["manifest.bad-value"])
    assert words in said.err


ODD = {
    "a FIFO": (waiting, "left-out", "`events` (not a regular file)"),
    "2,000 files": (crowded, "large", "`1088` and 1899 more are"),
    "folders 1,500 deep": (deep, None, ""),
    "a file of 20 MiB": (folder_with("log", b"x" * (20 << 20)), "large", "the incident's `log` is in /incident only"),
    "a name that is no text": (folder_with(b"\xff", b""), "left-out", r"`\udcff` (a name that is not plain text)"),
    "a name with a line break": (folder_with("a\nb\x1b[31m", b""), "left-out", r"`a\nb\x1b[31m`"),
}


@pytest.mark.parametrize(("make", "code", "words"), ODD.values(), ids=ODD)
def test_nothing_else_in_an_incident_stops_a_run(project: Project, make: Make, code: str | None, words: str) -> None:
    worker(run="incident: {directory: inc}")(project)
    make(project.folder / "inc")  # type: ignore[arg-type]

    said = say(project, "plan", project.folder)

    assert said.code == 0, said.err
    assert re.findall(r"warning\[triage.([\w-]+)\]", said.err) == ([code] if code else [])
    assert words in said.err


def test_an_incident_by_its_absolute_path_is_for_trusted_manifests(project: Project) -> None:
    """A manifest of a fork must not choose what of this host an agent sees."""
    (project.home / "inc").mkdir()
    worker(run=f"incident: {{directory: {project.home / 'inc'}}}")(project)

    trusted = say(project, "plan", project.folder)
    said = refused(project, "plan", project.folder, "--untrusted")

    assert trusted.code == 0, trusted.err
    assert (said.code, said.errors) == (3, ["policy.untrusted"])


def test_links_in_an_incident_are_not_followed(project: Project) -> None:
    worker(run="incident: {directory: inc}")(project)
    inc = project.folder / "inc"
    inc.mkdir()
    (inc / "passwd").symlink_to("/etc/passwd")
    (inc / "etc").symlink_to("/etc")
    (inc / "pods.txt").write_text("")

    said = say(project, "plan", project.folder, "--output", "json")

    assert said.code == 0, said.err
    (provision,) = [step for step in json.loads(said.out)["runs"][0]["steps"] if step["kind"] == "provision"]
    assert [name for name, _ in provision["body"]["incident"]] == ["pods.txt"]
    assert "left out of the incident: `etc` (a link, and none is followed), `pass" in said.err


# --- sources ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["validate", "plan", "apply"])
def test_a_password_in_a_url_is_refused_and_not_shown(project: Project, verb: str) -> None:
    """Case 47."""
    worker(workspace="repo_source: {type: fixed, url: 'https://me:hunter2@e.org/x'}")(project)

    said = refused(project, verb, project.folder)

    assert (said.code, said.errors) == (2, ["git.url"])
    assert "hunter2" not in said.err


def replaced_by_fifo(name: str) -> Make:
    def make(project: Project) -> None:
        path = committed(project) / name
        path.unlink(missing_ok=True)
        os.mkfifo(path)

    return make


def git_file(content: str) -> Make:
    def make(project: Project) -> None:
        (project.folder / "repo").mkdir()
        (project.folder / "repo" / ".git").write_text(content)

    return make


def borrowing(project: Project) -> None:
    (committed(project) / ".git" / "objects" / "info" / "alternates").write_text("/srv/secret/objects\n")


SOURCES = {
    "missing": (lambda project: None, "git.source"),
    "a file": (lambda project: (project.folder / "repo").write_text(""), "git.source"),
    "no repository": (lambda project: (project.folder / "repo").mkdir(), "git.source"),
    "a circle": (lambda project: circle(project.folder / "repo"), "git.source"),
    "no commit": (lambda project: git(project.folder, "init", "-q", "repo"), "git.unknown-commit"),
    "a .git that leads nowhere": (git_file("gitdir: /nowhere\n"), "git.source"),
    "a .git with a NUL": (git_file("gitdir: a\0b\n"), "git.source"),
    "55 borrowed objects": (borrowing, "git.source"),
    "an index that would wait": (replaced_by_fifo(".git/index"), "git.source"),
    "a configuration that would wait": (replaced_by_fifo(".git/config"), "git.source"),
    "packed refs that would wait": (replaced_by_fifo(".git/packed-refs"), "git.source"),
    "a HEAD that would wait": (replaced_by_fifo(".git/HEAD"), "git.source"),
}


@pytest.mark.scenario("WSM-27")
@pytest.mark.parametrize(("make", "code"), SOURCES.values(), ids=SOURCES)
def test_a_source_that_is_no_sound_repository_is_refused(project: Project, make: Make, code: str) -> None:
    make(project)
    worker(workspace=REPO)(project)

    said = refused(project, "apply", project.folder)

    assert said.errors == [code]
    assert "all.runner.yaml:" in said.err


# --- what else a run may ask for -------------------------------------------------------------------


def providers(written: str) -> Make:
    def make(project: Project) -> None:
        worker()(project)
        project.edit("providers: [local]", f"providers: {written}")

    return make


def incident(of: str, *lines: str, run: str = "") -> Make:
    """A run on an incident that is a link, or of this title."""

    def make(project: Project) -> None:
        worker(*lines, run=f"incident: {{directory: inc}}\n{run}")(project)
        if of.startswith("/"):
            (project.folder / "inc").symlink_to(of)
        else:
            folder_with("incident.json", json.dumps({"title": of}).encode())(project.folder / "inc")  # type: ignore[arg-type]

    return make


def local(more: str) -> Make:
    def make(project: Project) -> None:
        committed(project)
        worker(workspace=f"repo_source: {{type: local, path: repo, {more}}}")(project)

    return make


def behind_a_link(project: Project) -> None:
    (project.home / "opt").symlink_to(project.folder)
    worker(workspace=f"toolchains: [{project.home}/opt]")(project)


NUL = "a\0--bind\0/\0/tmp"  # behind it, what follows in a variable would be read as arguments of the sandbox
ASKED = {  # of each rule one or two; all that it refuses is in the tests of the rule
    "25 a script that climbs": (worker(script="{path: ../x}"), 3, "manifest.path-escape", "path: ../x"),
    "25 a script elsewhere": (worker(script="{path: /etc/passwd}"), 3, "manifest.path-escape", "/etc/passwd"),
    "25 an incident outside": (incident("/etc"), 3, "manifest.path-escape", "inc"),
    "31 a NUL in a variable": (incident(NUL, "env: {A: '{{ incident.title }}'}"), 2, "manifest.template", "U+0000"),
    "31 a NUL in a prompt": (
        incident(NUL, "prompt: {system: '{{ incident.title }}', user: ''}"), 2, "manifest.template", "U+0000",
    ),
    "39 a URL of a helper": (
        worker(workspace="repo_source: {type: fixed, url: 'ext::sh -c touch% pwned'}"), 2, "git.url", "= hint:",
    ),
    "40 a branch that is an option": (local("branch: --upload-pack=x"), 2, "git.ref", "= hint:"),
    "40 a snapshot for what is no branch": (
        incident("x; rm -rf /", run="snapshot: {branch: '{{ incident.title }}'}"), 2, "git.ref", "= hint:",
    ),
    "a branch that is not there": (local("branch: nope"), 6, "git.unknown-commit", "nope"),
    "a provider that there is none of": (
        providers("[nope]"), 2, "plugin.unknown", "docker, gvisor, kubernetes, local, process",
    ),
    "a provider that is misspelt": (providers("[local, proces]"), 2, "plugin.unknown", "did you mean `process`?"),
    "a provider of the tests": (providers("[fake]"), 2, "plugin.unknown", "valid choices"),
    "a module beside providers": (providers("[_bwrap]"), 2, "plugin.unknown", "valid choices"),
    "a provider with colours": (providers('["local\\e[31m"]'), 2, "plugin.unknown", "did you mean `local`?"),
    "a provider that the policy does not allow": (
        lambda project: project.script("", policy="providers: [process]"), 3, "policy.provider", "allowed: process",
    ),
    "more isolation than there is": (worker(workspace="isolation: vm"), 3, "policy.isolation", "= hint:"),
    "a toolchain that is missing": (
        worker(workspace="toolchains: [/nope]"), 2, "provider.toolchain-missing", "not a directory here",
    ),
    "a toolchain that is a file": (
        worker(workspace="toolchains: [/etc/hostname]"), 2, "provider.toolchain-missing", "not a directory here",
    ),
    "a toolchain behind a link": (behind_a_link, 2, "provider.toolchain-missing", "name the real path"),
    "the host's processes as a toolchain": (
        worker(workspace="toolchains: [/proc/1]"), 2, "manifest.bad-value", "cannot be shown",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "code", "error", "words"), ASKED.values(), ids=ASKED)
def test_what_cannot_be_had_is_refused_at_its_place(
    project: Project, make: Make, code: int, error: str, words: str
) -> None:
    make(project)

    said = refused(project, "apply", project.folder)

    assert (said.code, said.errors) == (code, [error])
    assert words in said.err
    assert "all.runner.yaml:" in said.err
    assert not (project.folder / "pwned").exists()


def test_a_run_that_there_is_none_of_is_refused_with_the_near_miss(project: Project) -> None:
    worker()(project)

    said = refused(project, "apply", project.folder, "--run", "wrok")

    assert (said.code, said.errors) == (2, ["manifest.unknown-reference"])
    assert "did you mean `work`?" in said.err
