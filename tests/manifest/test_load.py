"""Loading files and folders: what is found, completed, located, and reported."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner.manifest.kinds import agent_type as agent_types
from runner.manifest.kinds import incident_run, policy
from runner.manifest.load import FINDINGS, Document, defaults, load
from tests.support.manifest_text import agent_type, document, load_data, load_text, run

POLICY = "apiVersion: runner/v1\nkind: Policy\nmetadata: {name: NAME}\nspec: {}\n"
AGENT = """\
apiVersion: runner/v1
kind: AgentType
metadata: {name: fixer}
spec:
  agent: script
  script: {path: play.sh}
  workspace:
    enabled: true
    provider: local
    setup_commands:
      - [npm, ci]
"""


def agent_spec(found: Document) -> agent_types.Spec:
    assert isinstance(found.spec, agent_types.Spec)
    return found.spec


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Document:
    monkeypatch.chdir(tmp_path)
    Path("f.yaml").write_text(AGENT)
    (found,), errors = load(Path("f.yaml"))
    assert not errors
    return found


def test_what_is_not_written_is_the_default(agent: Document) -> None:
    spec = agent_spec(agent)

    assert spec.timeouts.agent == 900.0
    assert spec.workspace.resource_limits.pids == 512
    assert spec.workspace.isolation == "none"
    assert agent.data["spec"] == {  # type: ignore[comparison-overlap]
        "agent": "script",
        "script": {"path": "play.sh"},
        "workspace": {"enabled": True, "providers": ["local"], "setup_commands": [["npm", "ci"]]},
    }


def test_a_new_agent_type_has_no_workspace(tmp_path: Path) -> None:
    (found,), _ = load_data(tmp_path, agent_type())

    assert agent_spec(found).workspace.enabled is False


def test_mappings_are_merged_and_lists_and_scalars_replaced(tmp_path: Path) -> None:
    (found,), _ = load_data(
        tmp_path, agent_type({"enabled": True, "setup": {"on_failure": "warn"}, "providers": ["e2b"]})
    )

    workspace = agent_spec(found).workspace
    assert (workspace.setup.timeout, workspace.setup.on_failure) == (300.0, "warn")
    assert workspace.providers == ["e2b"]


def test_a_block_that_may_be_left_out_has_its_defaults_only_where_it_is_written(tmp_path: Path) -> None:
    documents, _ = load_data(
        tmp_path, run(), run() | {"metadata": {"name": "b"}} | {"spec": {"agent_type": "a", "verify": {}}}
    )

    without, with_it = (d.spec for d in documents)
    assert isinstance(without, incident_run.Spec)
    assert isinstance(with_it, incident_run.Spec)
    assert without.verify is None
    assert with_it.verify == incident_run.Verify(files=None, report=None, commands=[], setup=[])


def test_the_default_policy_is_a_whole_policy() -> None:
    spec = defaults()["Policy"].spec

    assert isinstance(spec, policy.Spec)
    assert spec.max_file_size == 10 << 20
    assert len(spec.forbidden_patterns) == 7
    assert defaults()["Policy"].origin("max_file_size") == "defaults"


@pytest.mark.parametrize(
    ("keys", "place", "wrote", "origin"),
    [
        pytest.param((), "f.yaml:4:1", True, "f.yaml:4", id="spec"),
        pytest.param(("agent",), "f.yaml:5:10", True, "f.yaml:5", id="scalar"),
        pytest.param(("workspace", "setup_commands", 0, 1), "f.yaml:11:15", True, "f.yaml:11", id="item"),
        pytest.param(("workspace", "isolation"), "f.yaml:7:3", False, "defaults", id="default"),
        pytest.param(("timeouts", "agent"), "f.yaml:4:1", False, "defaults", id="default of an unwritten block"),
        pytest.param(("workspace", "providers"), "f.yaml:9:15", True, "f.yaml:9", id="list written as one"),
        pytest.param(("workspace", "providers", 0), "f.yaml:9:15", True, "f.yaml:9", id="its item"),
    ],
)
def test_a_document_knows_where_it_says_what(
    agent: Document, keys: tuple[str | int, ...], place: str, wrote: bool, origin: str
) -> None:
    assert (str(agent.place(*keys)), agent.wrote(*keys), agent.origin(*keys)) == (place, wrote, origin)


def test_three_faults_are_three_errors_at_their_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f.yaml").write_text(
        "apiVersion: runner/v1\nkind: IncidentRun\nmetadata: {name: fix}\nspec:\n"
        "  agent_typ: fixer\n  timeout: 4X\n  verify: {report: {min_bytes: 1}, commands: []}\n"
    )

    documents, found = load(Path("f.yaml"))

    assert not documents
    assert [(f.code, str(f.at), f.hint) for f in found] == [
        ("manifest.unknown-field", "f.yaml:5:3", "did you mean `agent_type`?"),
        ("manifest.bad-value", "f.yaml:6:12", "for example 90s, 5m or 1h30m"),
        ("manifest.missing-field", "f.yaml:7:12", "add `path`: the report's path"),
    ]


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        pytest.param("debug", "it is a field of `IncidentRun`", id="of another kind"),
        pytest.param("timeout", "did you mean `timeouts`? it is a field of `IncidentRun`", id="near one, too"),
    ],
)
def test_a_field_of_another_kind_is_said_to_be_one(tmp_path: Path, field: str, hint: str) -> None:
    _, (found,) = load_text(tmp_path, AGENT.replace("spec:\n", f"spec:\n  {field}: true\n"))

    assert (found.code, found.hint) == ("manifest.unknown-field", hint)


def test_every_error_of_every_file_is_in_one_report_by_place(tmp_path: Path) -> None:
    (tmp_path / "b.runner.yaml").write_text("a: [\n---\n" + POLICY.replace("{}", "{x: 1, y: 2}"))
    (tmp_path / "a.runner.yaml").write_text("kind: Job\n")

    documents, found = load(tmp_path)

    assert not documents
    names = [(Path(f.at.file).name, f.at.line) for f in found if f.at]
    assert names == sorted(names)
    assert [f.code.partition(".")[2] for f in found if f.at and f.at.file.endswith("b.runner.yaml")] == [
        "syntax",
        "name",
        "unknown-field",
        "unknown-field",
    ]


def test_what_is_wrong_as_yaml_does_not_hide_what_is_wrong_as_a_manifest(tmp_path: Path) -> None:
    _, found = load_text(
        tmp_path, POLICY.replace("NAME", "a").replace("{}", "{max_file_size: 010, min_isolation: vms}")
    )

    assert [(f.code, f.at and f.at.column) for f in found] == [("manifest.bad-value", 23), ("manifest.bad-value", 43)]


def test_a_value_in_a_message_is_short_and_cannot_drive_a_terminal(tmp_path: Path) -> None:
    _, (found,) = load_data(tmp_path, run(timeout="\x1b[2J" + "x" * 10_000))

    assert len(found.message) < 120
    assert found.message.startswith("`\\x1b[2J")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(POLICY.replace("{}", "\n" + "".join(f"  f{i}: 1\n" for i in range(20_000))), id="unknown fields"),
        pytest.param(POLICY.replace("{}", "\n  providers: [\n" + "a,\n" * 40_000 + "]"), id="repeated items"),
        pytest.param("{" + "a: 1, " * 40_000 + "}", id="one key again and again"),
        pytest.param(
            AGENT + "  env:\n" + "".join(f"    a-{i}: x\n" for i in range(20_000)), id="bad names of variables"
        ),
    ],
)
def test_a_hopeless_file_has_a_bounded_report(tmp_path: Path, text: str) -> None:
    before = time.process_time()
    _, found = load_text(tmp_path, text.replace("NAME", "a"))

    assert len(found) == FINDINGS + 1
    assert found[0].code == "manifest.too-large"
    print(f"{time.process_time() - before:.2f} s CPU")


def test_one_fault_behind_two_aliases_is_one_error(tmp_path: Path) -> None:
    _, found = load_text(
        tmp_path, "apiVersion: runner/v1\nkind: Policy\nmetadata: {name: a}\nspec:\n  allowed_paths: [&a 1, *a]"
    )

    assert len(found) == 1


@pytest.mark.parametrize(
    ("names", "count"),
    [(("a", "a"), 1), (("a", "a", "a"), 2), (("a", "b"), 0)],
    ids=["two", "three", "different"],
)
def test_names_are_unique_within_a_kind(tmp_path: Path, names: tuple[str, ...], count: int) -> None:
    _, found = load_data(tmp_path, *(document("Policy", name) for name in names), agent_type())

    assert [f.code for f in found] == ["manifest.duplicate-name"] * count
    assert all(f.also for f in found)


def test_a_duplicate_name_is_found_although_one_of_the_two_is_bad(tmp_path: Path) -> None:
    _, found = load_data(tmp_path, document("Policy", "a"), document("Policy", "a", x=1))

    assert {f.code for f in found} == {"manifest.duplicate-name", "manifest.unknown-field"}


def test_the_fields_of_another_version_are_not_judged(tmp_path: Path) -> None:
    _, found = load_data(tmp_path, {"apiVersion": "runner/v9", "kind": "Job", "steps": []})

    assert [(f.code, f.hint) for f in found] == [("manifest.api-version", "known versions: runner/v1")]


@pytest.mark.parametrize("text", ["- a\n", "word\n", "5\n"], ids=["list", "text", "number"])
def test_a_document_is_a_mapping(tmp_path: Path, text: str) -> None:
    _, found = load_text(tmp_path, text)

    assert [f.code for f in found] == ["manifest.bad-value"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with manifests in it and in ``.runner``, and other files beside them."""
    monkeypatch.chdir(tmp_path)
    for name in ("b.runner.yaml", "a.runner.yml", ".runner/d.yaml", ".runner/c.runner.yaml"):
        path = Path(name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(POLICY.replace("NAME", path.name[0]))
    for name in ("values.yaml", ".runner/notes.md", ".runner/.hidden.yaml"):
        Path(name).write_text("not: ours")
    Path("deeper").mkdir()
    Path("deeper/e.runner.yaml").write_text("not: ours")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "files"),
    [
        (".", ["a.runner.yml", "b.runner.yaml", ".runner/c.runner.yaml", ".runner/d.yaml"]),
        (".runner", [".runner/c.runner.yaml", ".runner/d.yaml"]),
        (".runner/../.runner", [".runner/../.runner/c.runner.yaml", ".runner/../.runner/d.yaml"]),
        (".runner/d.yaml", [".runner/d.yaml"]),
    ],
)
def test_a_folder_means_its_manifests(project: Path, path: str, files: list[str]) -> None:
    documents, found = load(Path(path))

    assert not found
    assert [document.file for document in documents] == files
    assert documents[-1].directory == Path(files[-1]).parent


def test_inside_the_folder_dot_is_the_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(".runner")

    assert [document.file for document in load(Path("."))[0]] == ["c.runner.yaml", "d.yaml"]


def test_a_link_out_of_the_folder_is_refused(project: Path) -> None:
    Path(".runner/link.yaml").symlink_to("../b.runner.yaml")
    Path(".runner/within.yaml").symlink_to("d.yaml")

    _, found = load(Path(".runner"))

    assert [f.code for f in found] == ["manifest.path-escape", "manifest.duplicate-name"]
    assert "link.yaml" in found[0].message


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch], ids=["empty folder", "empty file"])
def test_nothing_is_an_error(tmp_path: Path, make: object) -> None:
    assert callable(make)
    make(tmp_path / "x")

    assert [f.code for f in load(tmp_path / "x")[1]] == ["manifest.nothing-to-run"]


def test_loading_needs_no_event_loop() -> None:
    script = "import runner.manifest.load, sys; sys.exit('trio' in sys.modules or 'jinja2' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_thousand_documents_load_in_under_a_second(tmp_path: Path) -> None:
    """The time is printed; a shared machine is no place to assert it."""
    (tmp_path / "f.yaml").write_text("---\n".join(AGENT.replace("fixer", f"fixer-{i}") for i in range(1000)))

    before = time.process_time()
    documents, found = load(tmp_path / "f.yaml")

    assert (len(documents), found) == (1000, [])
    print(f"{time.process_time() - before:.2f} s CPU for 1,000 documents")


def test_a_size_that_no_machine_can_address_is_refused(tmp_path: Path) -> None:
    """The schema, whose pattern counts digits, takes it."""
    _, (error,) = load_data(tmp_path, document("Policy", max_file_size="999999999999999T"))

    assert error.message == "`999999999999999T` is not a size below 8 million T"
