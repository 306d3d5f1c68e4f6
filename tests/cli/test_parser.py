"""What somebody meets who types at the command line: help, near misses, and where manifests are found."""

from __future__ import annotations

import os
import shlex
from argparse import SUPPRESS, ArgumentParser
from dataclasses import astuple
from pathlib import Path

import pytest

import runner.cli.verbs
from runner.cli.parser import GROUPS, parser_of, parsers
from runner.cli.requests import nearest_manifests
from runner.core import plugins
from tests.support.bad_input import called
from tests.support.needs import ROOT
from tests.support.situations import document

VERBS = plugins.names(runner.cli.verbs)
AGENT = document("AgentType", "fixer", "agent: script\nscript: {files: []}\nworkspace: {enabled: true}")


def run(*arguments: str) -> tuple[int, str, str]:
    return astuple(called(*arguments))


def every_parser() -> list[ArgumentParser]:
    return [parser for parser in parsers(parser_of(VERBS)) if parser.prog != "runner"]


def examples_of(parser: ArgumentParser) -> list[str]:
    return (parser.epilog or "").splitlines()[1:]


# --- help --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parser", every_parser(), ids=lambda parser: parser.prog)
def test_every_help_has_an_example_and_each_example_parses(parser: ArgumentParser) -> None:
    examples = examples_of(parser)

    assert examples
    for example in examples:
        program, *words = shlex.split(example)
        assert program == "runner"
        parser_of(VERBS).parse_args(words[2:] if words[0] == "-C" else words)


@pytest.mark.parametrize("parser", every_parser(), ids=lambda parser: parser.prog)
def test_every_argument_says_what_it_is_for(parser: ArgumentParser) -> None:
    silent = [action.dest for action in parser._actions if action.help is None and action.choices is None]

    assert silent == []


def test_the_help_shows_every_verb_in_one_group() -> None:
    shown = parser_of(()).format_help()
    modules = [plugins.load(runner.cli.verbs, name) for name in VERBS]

    assert {module.GROUP for module in modules} == set(GROUPS)
    assert [shown.count(f"\n  {name} ") for name in VERBS] == [1] * len(VERBS)
    assert shown.index("start here:") < shown.index("  init ") < shown.index("  apply ") < shown.index("runs:")
    assert max(map(len, shown.splitlines())) <= 120


# --- near misses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "told", "hint"),
    [
        ("paln", "`paln` is not a verb", "did you mean `plan`?"),
        ("run", "`run` is not a verb", "did you mean `apply`?"),
        ("runs ls", "`ls` is not a verb of `runner runs`", "did you mean `list`?"),
        ("workspace rm x", "`rm` is not a verb of `runner workspace`", "did you mean `destroy`?"),
        (
            "workspace nothing",
            "`nothing` is not a verb of `runner workspace`",
            "valid choices: create, delete, destroy",
        ),
        ("triage --workspce x", "`--workspce` is not an option of `runner triage`", "did you mean `--workspace`?"),
        ("triage --incident x", "`--incident` is not an option of `runner triage`", "did you mean `--workspace`?"),
        ("plan --outptu=json", "`--outptu` is not an option of `runner plan`", "did you mean `--output`?"),
        ("runs branch x --to y", "`--to` is not an option of `runner runs branch`", "did you mean `--into`?"),
        ("plan --to x", "`--to` is not an option of `runner plan`", "see `runner plan --help`"),
        ("plan --zzz", "`--zzz` is not an option of `runner plan`", "see `runner plan --help`"),
        ("plan a b", "`b` is an argument too many for `runner plan`", "see `runner plan --help`"),
        ("plan -C x", "`-C` is not an option of `runner plan`", "write it first: runner -C DIR plan"),
        ("plan --output jsn", "`jsn` is not a value of `--output`", "did you mean `json`?"),
        ("completion tcsh", "`tcsh` is not a value of `SHELL`", "valid choices: bash, fish, zsh"),
        ("runs show", "RUN is missing", "see `runner runs show --help`"),
        ("plan --save", "`--save` needs a value", "see `runner plan --help`"),
        ("pool resize many", "`N` takes a number, not `many`", "see `runner pool resize --help`"),
        ("triage --print --check", "`--check` and `--print` exclude each other", "see `runner triage --help`"),
        ("plan --offline=1", "`--offline` takes no value", "see `runner plan --help`"),
    ],
)
def test_what_does_not_fit_is_told_in_our_words_with_the_near_miss(typed: str, told: str, hint: str) -> None:
    code, out, err = run(*typed.split())

    assert (code, out) == (2, "")
    assert err.startswith(f"error[cli.usage]: {told}\n  = hint: {hint}")


def test_an_argument_given_as_an_option_is_answered_with_its_place() -> None:
    _, _, err = run("recover", "--run", "last")

    assert err.endswith("= hint: write it without `--run`: runner recover RUN\n")


def test_a_suppressed_option_is_never_proposed() -> None:
    hidden = [
        a.option_strings[0] for p in every_parser() for a in p._actions if a.help == SUPPRESS and a.option_strings
    ]

    for option in hidden:
        assert f"`{option}`" not in run("triage", f"{option}x", "y")[2].partition("hint")[2]


# --- where manifests are -----------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The top of a repository with a ``.runner``; we stand in a directory two below."""
    top = tmp_path / "top"
    (top / "src" / "deep").mkdir(parents=True)
    (top / ".git").mkdir()
    (top / ".runner").mkdir()
    (top / ".runner" / "agent.runner.yaml").write_text(AGENT)
    monkeypatch.chdir(top / "src" / "deep")
    return top


def test_manifests_are_found_from_below_and_named_as_seen_from_there(repository: Path) -> None:
    (repository / ".runner" / "broken.runner.yaml").write_text(AGENT.replace("enabled", "enabld"))

    code, _, err = run("validate")

    assert code == 2
    assert "--> ../../.runner/broken.runner.yaml:" in err


@pytest.mark.parametrize("here", ["src/deep", "src", ".", ".runner", ".git"])
def test_they_are_found_from_anywhere_in_the_repository(
    repository: Path, here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository / here)

    assert run("validate")[:2] == (0, "1 document fine\n")


def test_the_nearest_of_two_is_taken(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "src" / ".runner").mkdir()

    assert nearest_manifests() == Path("../.runner")


def test_none_is_taken_from_above_the_repository(repository: Path) -> None:
    (repository / "src" / ".git").touch()  # as a submodule has it

    assert nearest_manifests() == Path(".runner")
    assert "hint: `runner init` writes it" in run("validate")[2]


def test_none_is_looked_for_outside_of_any_repository(repository: Path) -> None:
    (repository / ".git").rmdir()

    assert nearest_manifests() == Path(".runner")


@ROOT.mark
@pytest.mark.parametrize("whose", ["top", "top/src"])
def test_none_is_taken_from_a_directory_of_somebody_else(repository: Path, whose: str) -> None:
    """Else whoever may write to a directory above ours, such as /tmp, would say what our agents do."""
    os.chown(repository.parent / whose, 1001, 1001)

    assert nearest_manifests() == Path(".runner")


@ROOT.mark
def test_they_are_found_by_root_in_a_repository_of_another(repository: Path) -> None:
    for path in (repository, repository / "src", repository / "src" / "deep"):
        os.chown(path, 1001, 1001)

    assert nearest_manifests() == Path("../../.runner")


def test_a_directory_that_was_removed_is_no_bug(repository: Path) -> None:
    os.rmdir(repository / "src" / "deep")

    assert run("validate")[0] == 2


@pytest.mark.parametrize("words", [["-C", "../.."], ["-C../.."], ["-C", "..", "-C", ".."]], ids=" ".join)
def test_a_directory_to_start_in_is_where_every_path_is_read_and_shown(repository: Path, words: list[str]) -> None:
    assert run(*words, "validate", ".runner/agent.runner.yaml")[:2] == (0, "1 document fine\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-C", "nowhere", "plan"], "`-C nowhere`: no such file or directory"),
        (["-C"], "`-C` needs a directory"),
        (["-C", "", "plan"], "`-C` needs a directory"),
    ],
)
def test_a_directory_that_there_is_not_is_bad_input(repository: Path, words: list[str], told: str) -> None:
    code, _, err = run(*words)

    assert code == 2
    assert told in err


# --- what is refused at once ------------------------------------------------------------------------


def test_a_name_that_holds_no_plan_is_refused_before_the_plan_is_shown(repository: Path) -> None:
    code, out, err = run("plan", "--save", "p.plan")

    assert (code, out) == (2, "")
    assert "`p.plan` cannot hold a plan" in err
    assert "= hint: name a file that ends in .json" in err


def test_a_directory_in_place_of_the_prompt_is_taken_for_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "INC-1").mkdir()

    code, _, err = run("triage", "INC-1")

    assert code == 2
    assert "= hint: did you mean -w INC-1?" in err


def test_a_collection_of_nothing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_HOME", str(tmp_path / "home"))

    assert run("gc", "--dry-run")[:2] == (0, "nothing would be removed\n")
    assert run("gc")[:2] == (0, "nothing removed\n")
