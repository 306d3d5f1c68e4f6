"""Older versions become today's: golden pairs, what is refused, and that nothing is half-applied."""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path

import pytest

from runner.core.errors import UnwritableManifest
from runner.manifest.convert import convert, write
from runner.manifest.kinds import agent_type
from runner.manifest.load import load
from runner.report.diagnostics import render

CASES = Path(__file__).parent.parent / "cases" / "convert"
PAIRS = sorted(path.name.removesuffix(".before.yaml") for path in CASES.glob("*.before.yaml"))

HEAD = "apiVersion: runner/v1alpha1\nkind: AgentType\nmetadata: {name: fixer}\nspec:\n"
BODY = "  agent: script\n  script: {files: []}\n"
POLICY = "apiVersion: runner/v1\nkind: Policy\nmetadata: {name: house}\nspec: {}\n"


def golden(name: str, text: str, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-cases"):
        (CASES / name).write_text(text)
    assert text == (CASES / name).read_text()


@pytest.mark.parametrize("case", [case for case in PAIRS if case != "refused"])
def test_a_document_of_an_older_version_becomes_one_of_today(
    case: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    ((conversion,), found) = convert(CASES / f"{case}.before.yaml")

    assert found == []
    golden(f"{case}.after.yaml", conversion.after, request)
    (tmp_path / "after.yaml").write_text(conversion.after)
    assert load(tmp_path / "after.yaml")[1] == []


@pytest.mark.parametrize("case", [case for case in PAIRS if case != "refused"])
def test_every_comment_is_kept(case: str) -> None:
    ((conversion,), _) = convert(CASES / f"{case}.before.yaml")

    comments = [sorted(re.findall(r"# .*", text)) for text in (conversion.before, conversion.after)]
    assert comments[0] == comments[1]


def test_what_cannot_be_converted_is_shown_where_it_is_written(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CASES)

    _, found = convert(Path("refused.before.yaml"))

    golden("refused.txt", render(found) + "\n", request)


def converted(folder: Path, spec: str) -> agent_type.Spec:
    (folder / "f.yaml").write_text(HEAD + BODY + spec)
    conversions, found = convert(folder / "f.yaml")
    assert found == []
    write(conversions)
    ((document,), errors) = load(folder / "f.yaml")
    assert errors == []
    assert isinstance(document.spec, agent_type.Spec)
    return document.spec


@pytest.mark.parametrize(
    ("spec", "on_failure"),
    [
        pytest.param("  enabled: true\n  setup_commands: [a]\n", "warn", id="flat"),
        pytest.param("  workspace: {enabled: true, setup_commands: [a]}\n", "warn", id="in braces"),
        pytest.param("  workspace: {enabled: true}\n  setup_commands: [a]\n", "warn", id="half and half"),
        pytest.param("  workspace: {enabled: true, setup_commands: [a]}\n  provider: local\n", "warn", id="spread"),
        pytest.param("  enabled: true\n", "fail", id="no setup commands"),
    ],
)
def test_setup_commands_may_go_on_failing(tmp_path: Path, spec: str, on_failure: str) -> None:
    """In ``v1alpha1`` a failed command is a warning; without commands there is nothing to keep."""
    assert converted(tmp_path, spec).workspace.setup.on_failure == on_failure


LAYOUTS = {
    "explicit key": "  enabled: true\n  ? provider\n  : local\n",
    "quoted over two lines": '  enabled: true\n  "setup_commands": ["a\n  # b", c]\n  provider: local\n',
    "texts": "  enabled: true\n  setup_commands:\n  - |+\n    a\n\n  # c\n  - >-\n     b\n  provider: local\n",
    "other indentation": "  provider: local\n  workspace:\n        # deep\n        enabled: true\n",
    "no line break at the end": "  enabled: true\n  setup_commands: [a,\n  b]\n  provider: local",
    "comments": "  enabled: true\n  repo_source:\n    type: none\n      # deeper\n  # next\n  provider: local\n",
    "last line": "  workspace: {enabled: true}\n  provider: local",
}


@pytest.mark.parametrize("spec", LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout_is_converted_with_its_values_or_refused(tmp_path: Path, spec: str) -> None:
    (tmp_path / "f.yaml").write_text(HEAD + BODY + spec)

    ((conversion,), found) = convert(tmp_path / "f.yaml")

    if [f.code for f in found] != ["manifest.not-convertible"]:
        assert found == []
        assert sorted(re.findall("# .*", conversion.after)) == sorted(re.findall("# .*", conversion.before))


def test_a_document_of_today_is_left_alone_whatever_is_wrong_with_it(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(POLICY + "nonsense: 1\n")

    ((conversion,), found) = convert(tmp_path / "f.yaml")

    assert (conversion.changed, found) == (False, [])


def test_a_hopeless_document_has_a_bounded_report(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(HEAD + BODY + "".join(f"  f{i}: 1\n" for i in range(20_000)))

    assert len(convert(tmp_path / "f.yaml")[1]) == 100


def test_a_file_that_is_not_yaml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(HEAD + BODY + "  enabled: [\n")

    assert [f.code for f in convert(tmp_path / "f.yaml")[1]] == ["manifest.syntax"]


def test_writing_keeps_mode_link_line_breaks_and_byte_order_mark(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link.yaml"
    real.write_bytes(b"\xef\xbb\xbf" + (HEAD + BODY + "  enabled: true\n").replace("\n", "\r\n").encode())
    real.chmod(0o640)
    link.symlink_to("real")

    conversions, _ = convert(link)
    write(conversions)

    raw = real.read_bytes()
    assert raw.startswith(b"\xef\xbb\xbfapiVersion: runner/v1\r\n")
    assert raw.count(b"\n") == raw.count(b"\r\n") == 8
    assert (stat.S_IMODE(real.stat().st_mode), link.is_symlink()) == (0o640, True)
    assert sorted(os.listdir(tmp_path)) == ["link.yaml", "real"]


def test_when_one_file_cannot_be_written_none_is(tmp_path: Path) -> None:
    before = HEAD + BODY + "  enabled: true\n"
    (tmp_path / ".runner").mkdir()
    for name in ("a.runner.yaml", ".runner/b.yaml"):
        (tmp_path / name).write_text(before)
    conversions, _ = convert(tmp_path)
    shutil.rmtree(tmp_path / ".runner")

    with pytest.raises(UnwritableManifest, match=r"b\.yaml` cannot be written: no such file"):
        write(conversions)

    assert os.listdir(tmp_path) == ["a.runner.yaml"]
    assert (tmp_path / "a.runner.yaml").read_text() == before


def test_loading_an_older_version_says_how_to_convert_it(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(HEAD + BODY)

    (error,) = load(tmp_path / "f.yaml")[1]

    assert (error.code, error.hint) == ("manifest.api-version", "`runner convert` rewrites it as runner/v1")
