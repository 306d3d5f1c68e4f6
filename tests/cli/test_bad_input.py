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
from tests.support.situations import Project, document

WORK = document("IncidentRun", "work", "agent_type: worker")
LOCAL = "repo_source: {type: local, path: repo}"


def text(content: str | bytes) -> Make:
    """A project of one manifest with this content."""

    def make(project: Project) -> None:
        raw = content.encode() if isinstance(content, str) else content
        (project.folder / "all.runner.yaml").write_bytes(raw)

    return make


def worker(*lines: str, workspace: str = "", run: str = "", script: str = "{path: agent.sh}") -> Make:
    """A project of one run whose agent type has these further lines."""

    def make(project: Project) -> None:
        project.script("echo ran", workspace=workspace, run=run, agent="\n".join(lines))
        if script != "{path: agent.sh}":
            manifest = project.folder / "all.runner.yaml"
            manifest.write_text(manifest.read_text().replace("{path: agent.sh}", script))

    return make


def named(name: str) -> Make:
    return text(document("IncidentRun", "work", "agent_type: worker").replace("name: work", f"name: {name}"))


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)

DOCUMENTS = {
    "1 a key twice": (text(WORK + "  prompt: a\n  prompt: b\n"), "manifest.duplicate-key"),
    "2 aliases that multiply": (text(BOMB), "manifest.too-large"),
    "4 an alias of itself": (text("a: &a [*a]\n"), "manifest.syntax"),
    "5 a tag that calls": (text("!!python/object/apply:os.system ['touch pwned']\n"), "manifest.tag"),
    "6 nested 10,000 deep": (text("a: " + "[" * 10_000), "manifest.too-large"),
    "6 one line of a mebibyte": (text("a: " + "x" * (1 << 20)), "manifest.too-large"),
    "7 a leading zero": (worker(workspace="resource_limits: {cpu: 010}"), "manifest.bad-value"),
    "7 minutes and seconds": (worker(run="timeout: 1:30"), "manifest.bad-value"),
    "7 a word for false": (worker(workspace="checkout_on_start: no"), "manifest.bad-value"),
    "8 a misspelt field": (worker(workspace="protected_path: [a]"), "manifest.unknown-field"),
    "9 a version of the future": (text(WORK.replace("runner/v1", "runner/v9")), "manifest.api-version"),
    "9 no version": (text(WORK.replace("apiVersion: runner/v1\n", "")), "manifest.api-version"),
    "11 a reference in another case": (worker(run="policy: House"), "manifest.unknown-reference"),
    "13 a name that climbs": (named("../x"), "manifest.name"),
    "13 a name with a slash": (named("a/b"), "manifest.name"),
    "13 no name": (named('""'), "manifest.name"),
    "13 a name of 300": (named("a" * 300), "manifest.name"),
    "13 a name with a line break": (named('"a\\nb"'), "manifest.name"),
    "13 a name like an option": (named("-rf"), "manifest.name"),
    "13 a name with a face": (named("\U0001f600"), "manifest.name"),
    "15 a memory of minus one": (worker(workspace="resource_limits: {memory: -1}"), "manifest.bad-value"),
    "15 processors without end": (worker(workspace="resource_limits: {cpu: .inf}"), "manifest.bad-value"),
    "15 a unit that there is none of": (worker(workspace="resource_limits: {memory: 4X}"), "manifest.bad-value"),
    "15 no processes": (worker(workspace="resource_limits: {pids: 0}"), "manifest.bad-value"),
    "15 more processes than Linux has": (
        worker(workspace="resource_limits: {pids: 99999999999}"),
        "manifest.bad-value",
    ),
    "16 not UTF-8": (text(b"a: \xff\n"), "manifest.encoding"),
    "16 UTF-16": (text("a: b\n".encode("utf-16")), "manifest.encoding"),
    "16 half a character": (text('a: "\\ud800"\n'), "manifest.encoding"),
    "26 attributes in a template": (worker("env: {A: '{{ run.__class__ }}'}"), "manifest.template"),
    "26 a call in a template": (worker("env: {A: '{{ run.name.format(1) }}'}"), "manifest.template"),
    "28 a template that multiplies": (worker("env: {A: \"{{ 'a' * 1000000000 }}\"}"), "manifest.template"),
    "31 a NUL in the prompt": (worker(run='prompt: "a\\0b"'), "manifest.encoding"),
    "31 a NUL in a variable": (worker('env: {A: "a\\0b"}'), "manifest.encoding"),
    "39 a depth beyond counting": (
        worker(workspace="repo_source: {type: local, path: repo, depth: 9223372036854775807}"),
        "manifest.bad-value",
    ),
    "76 a protected path that climbs": (worker(workspace="protected_paths: [../x]"), "manifest.bad-value"),
    "76 an absolute protected path": (worker(workspace="protected_paths: [/etc]"), "manifest.bad-value"),
    "76 everything protected": (worker(workspace="protected_paths: [.]"), "manifest.bad-value"),
    "76 a protected pattern": (worker(workspace='protected_paths: ["*.md"]'), "manifest.bad-value"),
    "61 a group in a forbidden pattern": (
        lambda project: project.script("true", policy="forbidden_patterns: ['*.@(pem|key)']"),
        "manifest.bad-value",
    ),
    "61 a group in an allowed pattern": (
        lambda project: project.script("true", policy="allowed_paths: ['src/(a|b)/**']"),
        "manifest.bad-value",
    ),
    "61 a group in a file to verify": (worker(run="verify: {files: {forbidden: ['!(a)']}}"), "manifest.bad-value"),
    "61 a group in a file that must be there": (
        worker(run="verify: {files: {required: ['+(a)']}}"),
        "manifest.bad-value",
    ),
    "76 a group that is protected": (worker(workspace="protected_paths: ['@(a|b)']"), "manifest.bad-value"),
    "76 an empty protected path": (worker(workspace='protected_paths: [""]'), "manifest.bad-value"),
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


def test_every_bad_value_is_in_one_report(project: Project) -> None:
    """Case 15."""
    project.script("", workspace='resource_limits: {cpu: -1, memory: 4X, disk: .nan, pids: 0}\nisolation: "2 "')

    assert refused(project, "plan", project.folder).errors == ["manifest.bad-value"] * 5


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


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "sub/../../x"])
def test_a_script_outside_the_project_is_refused(project: Project, path: str) -> None:
    """Case 25."""
    worker(script=f"{{path: {path}}}")(project)

    said = refused(project, "apply", project.folder)

    assert (said.code, said.errors) == (3, ["manifest.path-escape"])


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


def test_an_incident_outside_the_project_is_refused(project: Project) -> None:
    """Case 25."""
    worker(run="incident: {directory: inc}")(project)
    (project.folder / "inc").symlink_to("/etc")

    said = refused(project, "apply", project.folder)

    assert (said.code, said.errors) == (3, ["manifest.path-escape"])


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


@pytest.mark.parametrize(
    "field",
    [
        "env: {A: '{{ incident.title }}'}",
        "prompt: {system: '{{ incident.title }}', user: ''}",
    ],
    ids=["variable", "prompt"],
)
def test_a_nul_in_an_incident_ends_no_word(project: Project, field: str) -> None:
    """Case 31: behind a NUL in a variable's value, what follows would be read as arguments of the sandbox."""
    worker(field, run="incident: {directory: inc}")(project)
    folder_with("incident.json", rb'{"title": "a\u0000--bind\u0000/\u0000/tmp"}')(project.folder / "inc")  # type: ignore[arg-type]

    said = refused(project, "apply", project.folder)

    assert (said.code, said.errors) == (2, ["manifest.template"])
    assert "U+0000" in said.err


@pytest.mark.parametrize("branch", ["a..b", "-x", "x.lock", "a b", "HEAD", "{{ incident.title }}"])
def test_a_snapshot_for_what_is_no_branch_is_refused(project: Project, branch: str) -> None:
    """Case 40."""
    worker(run=f"incident: {{directory: inc}}\nsnapshot: {{branch: '{branch}'}}")(project)
    folder_with("incident.json", b'{"title": "x; rm -rf /"}')(project.folder / "inc")  # type: ignore[arg-type]

    said = refused(project, "apply", project.folder)

    assert (said.code, said.errors) == (2, ["git.ref"])
    assert "= hint:" in said.err


# --- sources ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "ext::sh -c touch% pwned",
        "file:///etc",
        "fd::17",
        "--upload-pack=touch pwned",
        "ssh://-oProxyCommand=touch",
        "https://e.org/..%2f",
        "http://e.org/x",
        '"https://e.org/\\nx"',
    ],
)
def test_a_url_outside_the_grammar_is_refused(project: Project, url: str) -> None:
    """Case 39."""
    quoted = url if url.startswith('"') else json.dumps(url)
    worker(workspace=f"repo_source: {{type: fixed, url: {quoted}}}")(project)

    said = refused(project, "apply", project.folder)

    assert (said.code, said.errors) == (2, ["git.url"])
    assert "= hint:" in said.err
    assert not (project.folder / "pwned").exists()


@pytest.mark.parametrize("verb", ["validate", "plan", "apply"])
def test_a_password_in_a_url_is_refused_and_not_shown(project: Project, verb: str) -> None:
    """Case 47."""
    worker(workspace="repo_source: {type: fixed, url: 'https://me:hunter2@e.org/x'}")(project)

    said = refused(project, verb, project.folder)

    assert (said.code, said.errors) == (2, ["git.url"])
    assert "hunter2" not in said.err


@pytest.mark.parametrize("branch", ["--upload-pack=x", "-b", "a..b", "@{-1}", "x.lock", "x\\r"])
def test_a_branch_outside_the_grammar_is_refused(project: Project, branch: str) -> None:
    """Case 40."""
    committed(project)
    worker(workspace=f'repo_source: {{type: local, path: repo, branch: "{branch}"}}')(project)

    said = refused(project, "apply", project.folder)

    assert (said.code, said.errors) == (2, ["git.ref"])
    assert "= hint:" in said.err


def replaced_by_fifo(name: str) -> Make:
    def make(project: Project) -> None:
        path = committed(project) / name
        path.unlink(missing_ok=True)
        os.mkfifo(path)

    return make


def empty(project: Project) -> None:
    from tests.support.situations import git

    (project.folder / "repo").mkdir()
    git(project.folder / "repo", "init", "-q")


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
    "no commit": (empty, "git.unknown-commit"),
    "a .git that leads nowhere": (git_file("gitdir: /nowhere\n"), "git.source"),
    "a .git with a NUL": (git_file("gitdir: a\0b\n"), "git.source"),
    "55 borrowed objects": (borrowing, "git.source"),
    "an index that would wait": (replaced_by_fifo(".git/index"), "git.source"),
    "a configuration that would wait": (replaced_by_fifo(".git/config"), "git.source"),
    "packed refs that would wait": (replaced_by_fifo(".git/packed-refs"), "git.source"),
    "a HEAD that would wait": (replaced_by_fifo(".git/HEAD"), "git.source"),
}


@pytest.mark.parametrize(("make", "code"), SOURCES.values(), ids=SOURCES)
def test_a_source_that_is_no_sound_repository_is_refused(project: Project, make: Make, code: str) -> None:
    make(project)
    worker(workspace=LOCAL)(project)

    said = refused(project, "apply", project.folder)

    assert said.errors == [code]
    assert "all.runner.yaml:" in said.err


def test_a_branch_that_is_not_there_is_not_found(project: Project) -> None:
    committed(project)
    worker(workspace="repo_source: {type: local, path: repo, branch: nope}")(project)

    said = refused(project, "apply", project.folder)

    assert (said.code, said.errors) == (6, ["git.unknown-commit"])


# --- providers, limits, toolchains, policies -------------------------------------------------------


@pytest.mark.parametrize(
    ("providers", "hint"),
    [
        ("[nope]", "valid choices: docker, gvisor, local, process"),
        ("[local, proces]", "did you mean `process`?"),
        ("[fake]", "valid choices"),
        ("[spawn]", "valid choices"),
        ("[_bwrap]", "valid choices"),
        ('["local\\e[31m"]', "did you mean `local`?"),
    ],
)
def test_a_provider_that_there_is_none_of_is_refused_at_its_place(project: Project, providers: str, hint: str) -> None:
    worker()(project)
    manifest = project.folder / "all.runner.yaml"
    manifest.write_text(manifest.read_text().replace("providers: [local]", f"providers: {providers}"))

    said = refused(project, "apply", project.folder)

    assert (said.code, said.errors) == (2, ["plugin.unknown"])
    assert "all.runner.yaml:10:" in said.err
    assert hint in said.err


def test_a_provider_that_the_policy_does_not_allow_is_refused(project: Project) -> None:
    project.script("", policy="providers: [process]")

    said = refused(project, "apply", project.folder)

    assert (said.code, said.errors) == (3, ["policy.provider"])
    assert "= hint: allowed: process" in said.err


@pytest.mark.parametrize("floor", ["isolation: vm", "isolation: kernel"])
def test_more_isolation_than_the_provider_gives_is_refused(project: Project, floor: str) -> None:
    worker(workspace=floor)(project)

    said = refused(project, "apply", project.folder)

    assert (said.code, said.errors) == (3, ["policy.isolation"])
    assert "= hint:" in said.err


def test_a_written_limit_that_can_not_be_enforced_is_refused_unless_best_effort_will_do(project: Project) -> None:
    project.script("echo ran", provider="process", workspace="resource_limits: {disk: 1G}")
    said = refused(project, "apply", project.folder)
    assert (said.code, said.errors) == (2, ["plan.unenforceable"])

    lenient = "resource_limits: {disk: 1G, enforcement: best_effort}"
    project.script("echo ran", provider="process", workspace=lenient)
    said = say(project, "plan", project.folder)
    assert said.code == 0
    assert "warning[plan.not-enforced]" in said.err


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/nope", "not a directory here"),
        ("/etc/hostname", "not a directory here"),
        ("/", "cannot be shown"),
        ("/proc", "cannot be shown"),
        ("/proc/1", "cannot be shown"),
        ("/dev", "cannot be shown"),
        ("/run", "cannot be shown"),
        ("/workspace/x", "cannot be shown"),
        ("/usr/../etc", "has a `..` part"),
    ],
)
def test_a_toolchain_that_can_not_be_shown_is_refused(project: Project, path: str, words: str) -> None:
    """The host's processes, devices and sockets are no toolchain."""
    worker(workspace=f"toolchains: [{path}]")(project)

    said = refused(project, "apply", project.folder)

    assert said.code == 2
    assert set(said.errors) <= {"manifest.bad-value", "provider.toolchain-missing"}
    assert words in said.err


def test_a_toolchain_behind_a_link_is_refused(project: Project) -> None:
    (project.folder / "real").mkdir()
    (project.folder / "link").symlink_to("real")
    (project.home / "opt").symlink_to(project.folder / "real")
    worker(workspace=f"toolchains: [{project.home}/opt]")(project)

    said = refused(project, "apply", project.folder)

    assert said.code == 2
    assert "name the real path" in said.err


def test_a_run_that_there_is_none_of_is_refused_with_the_near_miss(project: Project) -> None:
    worker()(project)

    said = refused(project, "apply", project.folder, "--run", "wrok")

    assert (said.code, said.errors) == (2, ["manifest.unknown-reference"])
    assert "did you mean `work`?" in said.err
