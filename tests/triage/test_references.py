"""What a report cites is looked at: lines of files strictly, and nothing that only looks like a citation."""

from __future__ import annotations

import pytest

from runner.triage.references import claimed, fault, not_run, references

PODS = "one\ntwo  words\nthree\n"
FILES: dict[str, list[str | None]] = {"kubectl/pods.txt": [PODS], "pods.txt": ["a\nb\nc", PODS], "big.log": [None]}


def faults(report: str) -> list[str]:
    found = ((one, fault(one, lambda path: FILES.get(path, []), ["kubectl"])) for one in references(report))
    return [f"{one.text}: {why}" for one, why in found if why is not None]


@pytest.mark.parametrize(
    "text",
    [
        "- **FACT-1** x (`kubectl/pods.txt:3`)",
        "(`kubectl/pods.txt:1-2,3`)",
        '(`pods.txt:2`: "two words")',
        '(`pods.txt:1-3`: "one ... three")',
        '(`pods.txt:1-3`: "e ... three")',
        "pods.txt:3 says so",
        "`big.log:99999`",
        "panic at cart.go:118, and `cart.go:118` too",
        "`nginx:1.25`, `10.0.0.1:8080`, `registry.example.com:443`, `registry.io/shop/app.v2:17`",
        "error in config.yaml:12: no mapping",
        "`error in config.yaml:12: no mapping`",
        "```\nkubectl/none.txt:3\n`kubectl/pods.txt:99`\n```",
        "https://grafana.example/d/pods.txt:9",
        "02:41:07, 3:4, a:1",
    ],
)
def test_what_is_right_or_no_citation_is_left_alone(text: str) -> None:
    assert faults(text) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("(`kubectl/pods.txt:14`)", "kubectl/pods.txt:14: there is no line 14: it has 3"),
        ("pods.txt:4 says so", "pods.txt:4: there is no line 4: it has 3"),
        ("(`kubectl/pods.txt:2-14`)", "kubectl/pods.txt:2-14: there is no line 14: it has 3"),
        ("(`kubectl/pods.txt:0`)", "kubectl/pods.txt:0: these are not lines"),
        ("(`kubectl/pods.txt:3-1`)", "kubectl/pods.txt:3-1: these are not lines"),
        ("(`kubectl/none.log:1`)", "kubectl/none.log:1: there is no such file"),
        ("(`kubectl/none.x:1`)", "kubectl/none.x:1: there is no such file"),
        ("(`kubectl/none.log:1`)\n\nmore", "kubectl/none.log:1: there is no such file"),
        (f'(`pods.txt:1`: "{"x" * 90}")', f'pods.txt:1: it does not hold "{"x" * 80}"'),
        ("(`describe.txt:26`)", "describe.txt:26: there is no such file"),
        ("see /incident/none.conf:3", "/incident/none.conf:3: there is no such file"),
        ("(`describe.pod.txt:26`)", "describe.pod.txt:26: there is no such file"),
        ('(`pods.txt:1-3`: "three ... one")', 'pods.txt:1-3: it does not hold "three ... one"'),
        ('(`pods.txt:1`: "two words")', 'pods.txt:1: it does not hold "two words"'),
    ],
)
def test_what_is_not_there_is_named(text: str, said: str) -> None:
    assert faults(text) == [said]


LISTED = """\
## Commands Executed

- `kubectl -n payments get pods`
- `kubectl get events -n payments ...`
- `kubectl get secrets` (refused)
- `cat /incident/incident.json`
- `helm history checkout`
"""


def test_commands_of_a_cluster_are_claims_unless_they_are_said_not_to_have_run() -> None:
    assert claimed(LISTED) == [
        "kubectl -n payments get pods",
        "kubectl get events -n payments ...",
        "helm history checkout",
    ]
    assert claimed("## Commands Executed\n`$ oc  get pods`, `kubectlx y`, `$  `") == ["oc get pods"]


@pytest.mark.parametrize(
    ("commands", "shown", "missing"),
    [
        (["kubectl get pods -n payments | head; helm history checkout"], "$ kubectl get events -n payments", []),
        (["kubectl get po -n=payments", "kubectl get ev -n payments", "helm history checkout --max 3"], "", []),
        (["kubectl get pods -n payments"], "", ["kubectl get events -n payments ...", "helm history checkout"]),
        (
            ["helm history checkout"],
            "$ kubectl get events\n$ kubectl -n payments get pods",
            ["kubectl get events -n payments ..."],
        ),
        (["/skills/x/scripts/incident_triage.sh"], "", []),
        (["for p in a b; do kubectl logs $p; done"], "", []),
    ],
    ids=[
        "in another order and at the start",
        "by short names",
        "not at all",
        "not in one line",
        "a script that runs others",
        "a loop",
    ],
)
def test_a_claim_that_no_command_bears_out_is_told(commands: list[str], shown: str, missing: list[str]) -> None:
    assert not_run(claimed(LISTED), commands, shown) == missing


def test_a_line_without_an_end_costs_little() -> None:
    for piece in ("a/", "a.", "a=", "`a.b:1", "a.b:1,", "x.y:1 "):
        assert len(references(piece * 500_000)) <= 500
