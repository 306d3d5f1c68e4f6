"""Contents of pages of runs that never were: an ordinary one, and one whose every text is hostile and long."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from runner.core.model import (
    Check,
    CheckKind,
    Command,
    CommandStatus,
    Isolation,
    IsolationClass,
    Limits,
    NetworkRefusal,
    SavedWork,
    Violation,
)
from runner.events import events as ev
from runner.report.html.excerpt import Excerpt, end_of, start_of
from runner.report.html.investigation import CitedLines
from runner.report.html.run import RunContents, StoredFile
from runner.report.triage import Result
from tests.support.run_files import CHECKS, NASTY, account, bad, begin, good, record

REPORT = """\
# checkout restarts

## Root Cause

The limit was **cut** by rollout 118 [FACT-1].

## Evidence

- **FACT-1** 3 pods wait (`kubectl/pods.txt:2-3`), see also kubectl/pods.txt:2-3, not `gone.txt:9`

| pod | state |
| :-- | ----: |
| a | waits |

```
$ kubectl get pods
```
"""
PATCH = """\
diff --git a/src/app.py b/src/app.py
index 1..2 100644
--- a/src/app.py
+++ b/src/app.py
@@ -1,2 +1,2 @@
-limit = 256
+limit = 512
--- a line that looks like a header
 end
diff --git a/a picture.png b/a picture.png
new file mode 100644
GIT binary patch
literal 4
LcmZ=
"""
SEEN = Isolation(
    isolation=IsolationClass.NAMESPACES,
    provider="local",
    uid=1000,
    capabilities="none",
    no_new_privileges=True,
    shared_namespaces=(),
    interfaces=("lo",),
    read_only=("/workspace/AGENTS.md",),
    limits=Limits(2.0, 4 << 30, None, 512),
    filtered=True,
)


def connection(host: str, refusal: NetworkRefusal | None = None) -> ev.ConnectionEnded:
    sent = 0 if refusal else 2048
    return ev.ConnectionEnded(
        step="agent", host=host, port=443, address="", rule="", sent_bytes=sent, received_bytes=sent, seconds=0.1,
        refusal=refusal,
    )  # fmt: skip


def ordinary() -> RunContents:
    saved = SavedWork(commit="c0ffee", patch="work.patch", patch_sha256="ab" * 32, patch_bytes=9, changed=2)
    events = [
        ev.IsolationObserved("agent", SEEN),
        ev.AgentStarted("agent", ("claude", "-p"), "2.1.330"),
        connection("packages.example.org"),
        connection("evil.example", NetworkRefusal.NOT_ALLOWED),
        ev.WorkSaved(saved),
        *good(CHECKS),
    ]
    return RunContents(
        account=account(events),
        result=Result(REPORT, Path("/INC-1/output/r.md"), "It was the limit."),
        actions=[("look", "runner runs patch r1")],
        printed={"agent": Excerpt(("I look.", "$ ls"), 3), "verify": Excerpt(("ok",))},
        commands=[Command("kubectl get pods", 0), Command("kubectl get secret", status=CommandStatus.DENIED)],
        patch=Excerpt((*PATCH.splitlines(),)),
        cited=[
            CitedLines(
                id="lines-1",
                place="kubectl/pods.txt:2-3",
                lines=[(1, "NAME"), (2, "a\twaits"), (3, "b waits")],
                cited=frozenset({2, 3}),
            )
        ],
        files=[StoredFile("run.json", 5645, "cd" * 32)],
    )


HOSTILE = (
    f"{NASTY}</style></title><script>document.title=1</script><img src=http://203.0.113.9/ onerror=alert(1)>\u2066"
)
MARKDOWN = f"""\
# {HOSTILE}

[x](javascript:alert(1)) [y](http://203.0.113.9/) ![z](http://203.0.113.9/p.png) <b onclick=alert(1)>b</b>
<http://203.0.113.9/> [r]: http://203.0.113.9/ &#x202e; &lt;script&gt; `pods.txt:3` <details open ontoggle=alert(1)>

| a |
| :-: |
| {HOSTILE} |

```html
{HOSTILE}
```
"""


def hostile(many: int, long: int) -> RunContents:
    """``many`` events and items of each kind, and lines of ``long`` characters."""
    line = "x" * long
    several = (f"{number} {HOSTILE}" for number in range(many))
    texts = (*several, line)
    events: Sequence[ev.Event] = [
        *begin(HOSTILE, "r1"),
        ev.AgentStarted("agent", (HOSTILE, line), HOSTILE),
        *(connection(f"{number}.{HOSTILE}", NetworkRefusal.PRIVATE if number % 2 else None) for number in range(many)),
        *(ev.WarningIssued("a.b", text) for text in texts),
        ev.ChecksFinished("verify", tuple(Check(kind=CheckKind.COMMAND, what=text, ok=False) for text in texts)),
        ev.ViolationsFound("scan", tuple(Violation(text, HOSTILE) for text in texts)),
        *bad(HOSTILE, texts),
    ]
    patch = ["diff --git a/x b/x", "@@ -1 +1 @@", *(f"+{text}" for text in texts)]
    calm = ordinary()
    return RunContents(
        account=replace(account([]), record=record(events), directory=Path(HOSTILE)),
        result=Result(f"{MARKDOWN}\n{line}\n\n" + "[(" * long, Path(HOSTILE), HOSTILE),
        actions=[(HOSTILE, HOSTILE)],
        printed={"agent": end_of(texts, 2_000, 256 << 10)},
        commands=[Command(text, 1) for text in texts[:500]],
        patch=start_of(patch, 5_000, 512 << 10),
        cited=[replace(calm.cited[0], place="pods.txt:3", lines=[(3, HOSTILE)])],
        files=[StoredFile(text, 1, HOSTILE) for text in texts[:500]],
    )
