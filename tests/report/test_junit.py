"""JUnit: what CIs read is what happened, for any run and any bytes."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from runner.core.errors import BadValue, Place, Rejected
from runner.core.model import Outcome, Reason, Status, failed, succeeded
from runner.events import events as ev
from runner.report import junit
from tests.support.run_files import CHECKS, NASTY, account, bad, good

# What the schemas of Ant and of Jenkins both ask of an element: its attributes, and its children in order.
ATTRIBUTES = {
    "testsuites": {},
    "testsuite": dict.fromkeys(("name", "package", "hostname"), r"\S.*")
    | dict.fromkeys(("id", "tests", "failures", "errors", "skipped"), r"\d+")
    | {"timestamp": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", "time": r"\d+\.\d{3}"},
    "properties": {},
    "property": {"name": r"\S+", "value": r"(?s).*"},
    "testcase": {"name": r"\S.*", "classname": r"\S+", "time": r"\d+\.\d{3}"},
    "failure": {"type": r"\S+", "message": r"(?s).*"},
    "error": {"type": r"\S+", "message": r"(?s).*"},
    "skipped": {"message": r"(?s).*"},
    "system-out": {},
    "system-err": {},
}
CHILDREN = {
    "testsuites": r"(testsuite )*",
    "testsuite": r"properties (testcase )*system-out system-err ",
    "properties": r"(property )*",
    "testcase": r"((skipped|failure|error) )?",
}


def parsed(document: str) -> ElementTree.Element:
    """A document that both schemas allow, and whose numbers are those of its cases."""
    root = ElementTree.fromstring(document.encode())
    for element in root.iter():
        wanted = ATTRIBUTES[element.tag]
        assert set(element.keys()) == set(wanted), element.tag
        assert all(re.fullmatch(wanted[name], value) for name, value in element.items()), element.attrib
        assert re.fullmatch(CHILDREN.get(element.tag, ""), "".join(f"{child.tag} " for child in element))
    for number, suite in enumerate(root):
        paths = ("testcase", "testcase/failure", "testcase/error", "testcase/skipped")
        counts = [len(suite.findall(path)) for path in paths]
        assert [int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")] == counts
        assert suite.attrib["id"] == str(number)
    return root


def cases(document: str) -> dict[str, str]:
    """What became of each case, by its name."""
    return {case.attrib["name"]: case[0].tag if len(case) else "passed" for case in parsed(document).iter("testcase")}


def test_each_step_and_each_check_is_a_case() -> None:
    document = junit.render([account(good(CHECKS))])

    assert cases(document) == {
        "provision": "passed",
        "agent": "passed",
        "verify": "passed",
        "verify: report r.md": "passed",
        "verify: report section `Cause`": "passed",
        "verify: report section `Fix`": "failure",
        "verify: `make check`": "failure",
        "save": "passed",
    }
    suite = parsed(document)[0]
    assert suite.attrib["name"] == "work"
    properties = {each.attrib["name"]: each.attrib["value"] for each in suite.iter("property")}
    assert (
        properties.items()
        >= {
            "run": "r1",
            "plan": "sha256:4b1f",
            "provider": "local",
            "isolation": "namespaces (local); nothing was read back",
            "commands": "19 commands, 2 of them cut, 1 refused",
            "tokens": "48000",
            "cost_usd": "0.3100",
            "exit_code": "0",
        }.items()
    )


def test_a_failure_has_its_reason_its_details_and_the_end_of_the_output() -> None:
    document = junit.render([account(bad(details=("one", "two")), tails={"agent": ["last", "words"]})])

    failure = parsed(document).find(".//testcase[@name='agent']/failure")
    assert failure.attrib == {"type": "exit", "message": "exited 3"}
    assert failure.text == "one\ntwo\n\nthe end of its output:\nlast\nwords"
    assert cases(document)["verify"] == "skipped"


STOPPED = ev.RunEnded(Outcome(status=Status.CANCELLED, reason=Reason.CANCELLED, message="stopped by a signal"), 130)
CANCELLED = ev.StepEnded("agent", Outcome(status=Status.CANCELLED, reason=Reason.CANCELLED, message="stopped"))
LOST = ev.StepEnded("agent", Outcome(status=Status.UNKNOWN, reason=Reason.UNKNOWN, message="lost"))


@pytest.mark.parametrize(
    ("end", "case"),
    [
        pytest.param([], ("run", "error"), id="under way"),
        pytest.param([STOPPED], ("run", "failure"), id="stopped between steps"),
        pytest.param([CANCELLED, STOPPED], ("agent", "failure"), id="stopped in a step"),
        pytest.param([LOST], ("agent", "failure"), id="unknown"),
        pytest.param(
            [ev.RunEnded(Outcome(status=Status.SKIPPED, message="needs x"), 1)], ("agent", "skipped"), id="skipped"
        ),
    ],
)
def test_a_run_that_did_not_get_far_is_no_success(end: list[ev.Event], case: tuple[str, str]) -> None:
    assert case in cases(junit.render([account(end)])).items()


def test_a_run_that_has_lost_its_runner_is_an_error() -> None:
    lost = account([])
    lost.record.status = Status.LOST

    assert cases(junit.render([lost]))["run"] == "error"


def test_a_failed_check_has_the_end_of_the_output_and_its_step_has_failed() -> None:
    """The step was shown as skipped, as one that never ran."""
    end = [
        ev.StepEnded("agent", succeeded("turn completed")),
        ev.ChecksFinished("verify", CHECKS),
        ev.StepEnded("verify", failed(Reason.VERIFY, "2 of 4 checks failed: report section `Fix`")),
        ev.RunEnded(Outcome(status=Status.FAILED, reason=Reason.VERIFY, message="verify: 2 of 4 checks failed"), 1),
    ]

    document = junit.render([account(end, tails={"verify": ["make: *** [check]"]})])

    assert parsed(document)[0].attrib["failures"] == "3"
    assert cases(document)["verify"] == "failure"
    ends = [str(each.text).endswith("make: *** [check]") for each in parsed(document).iter("failure")]
    assert ends == [False, True, False]


def test_whatever_bytes_a_run_says_the_document_is_xml() -> None:
    document = junit.render([account(bad(NASTY, (NASTY,)), tails={"agent": [NASTY]})])

    failure = parsed(document).find(".//failure")
    assert "\\x1b[31m\\x00\\x0b\\ud800\\ufffe]]> <b a='1'>&amp; | `x`" in failure.attrib["message"]
    assert "\\u202e" in failure.text
    assert "😀" in failure.text


def test_several_runs_are_several_suites() -> None:
    assert [suite.attrib["name"] for suite in parsed(junit.render([account(good(), name=n) for n in ("a", "b")]))] == [
        "a",
        "b",
    ]


def test_what_kept_runs_from_starting_is_a_suite_with_a_case_a_finding() -> None:
    findings = [BadValue("`4X` is not a size", at=Place("a.yaml", 7, 3), hint="for example 4G"), BadValue(NASTY)]

    document = junit.render([], Rejected(findings))

    assert cases(document) == {
        "manifest.bad-value a.yaml:7:3": "failure",
        "manifest.bad-value": "failure",
    }
    assert "hint: for example 4G" in str(parsed(document)[0][1][0].text)
    assert cases(junit.render([], BadValue("alone"))) == {"manifest.bad-value": "failure"}
