"""Pages of HTML as the command makes them, of real runs."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_rehearse import claude
from tests.cli.test_triage import DESCRIBED, REPORT, place, triage
from tests.support.situations import Project

__all__ = ["claude"]

CITING = REPORT.replace("(`cat /incident/incident.json`)", "(`kubectl/pods.txt:2`) <img src=x> [x](javascript:y)")
TURNS: list[dict[str, Any]] = [
    {"say": "I read the incident.", "run": "cat /incident/incident.json"},
    {"write": {"path": "/output/investigation.md", "content": CITING}},
    {"say": "The limit was cut.", "usage": {"input": 2000, "output": 20}},
]


@pytest.mark.slow
@pytest.mark.scenario("BEY-17", only="HTML report")
def test_a_triage_opens_its_page_where_each_cited_line_is_linked(project: Project, claude: Path) -> None:
    (project.folder / "INC-1" / "kubectl").mkdir(parents=True)
    (project.folder / "INC-1" / "kubectl" / "pods.txt").write_text("NAME\ncheckout <waits>\n")
    browser = project.folder / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {project.folder}/opened\n')
    browser.chmod(0o755)
    project.env["BROWSER"] = str(browser)

    done = triage(project, *DESCRIBED, *place(project, "local", claude), "--open", turns=TURNS)

    assert done.code == 0, done.out + done.err
    record = project.record()
    written = project.directory(record) / "index.html"
    assert (project.folder / "opened").read_text() == f"file://{written}\n"
    page = written.read_text()
    assert page == project.runner("runs", "show", "last", "--output", "html").out
    assert "stood for it.</p>" in page
    assert not re.search(r'<(script|img|iframe)|(src|href)="(?!#|data:,")|\son\w+=|\sstyle=', page)
    assert "<strong>Agent says</strong> Memory limit cut 512Mi -&gt; 256Mi" in page
    assert '(<a href="#lines-1"><code>kubectl/pods.txt:2</code></a>) &lt;img src=x&gt; [x](javascript:y)' in page
    assert '<tr class="meant"><th scope="row">2</th><td>checkout &lt;waits&gt;</td></tr>' in page
    assert '<td data-head="tokens out">' in page
    assert "<div><dt>network</dt><dd>" in page
    digest = hashlib.sha256((project.directory(record) / "run.json").read_bytes()).hexdigest()
    assert f"<code>{digest}</code>" in page

    del project.env["BROWSER"]
    assert project.runner("runs", "export", "last", "--to", "out").code == 0
    exported = (project.folder / "out" / "index.html").read_text()
    assert re.sub(r'(?s)<section id="evidence">.*?</section>', "", exported) == re.sub(
        r'(?s)<section id="evidence">.*?</section>', "", page
    )
    assert "<code>SHA256SUMS</code>" in exported
    assert digest not in exported


def test_a_page_without_a_browser_is_named(project: Project, claude: Path) -> None:
    done = triage(project, *DESCRIBED, *place(project, "local", claude), "--open", turns=TURNS[:1])

    assert done.code == 1
    assert f"page: {project.directory(project.record()) / 'index.html'}\n" in done.err


def test_a_run_that_failed_shows_why_what_it_printed_its_diff_and_what_to_do(
    project: Project, repository: Path
) -> None:
    report = "a `made.txt:1` b `/workspace/made.txt:1` c `made.txt:2`"
    project.script(
        f"echo '<b>' > made.txt; echo said; echo '{report}' > $RUNNER_OUTPUT/r.md",
        workspace="repo_source: {type: local, path: repo}",
        run="verify: {report: {path: r.md}, commands: [{run: [sh, -c, 'echo wrong; exit 3']}]}",
    )
    done = project.runner("apply", ".")
    id = project.record()["id"]

    page = project.runner("runs", "show", "last", "--output", "html").out
    plan = project.runner("plan", ".", "--output", "html").out

    assert done.code == 1
    assert '<span class="status failed">✗ FAILED</span> work' in page
    assert f"again from here <code>runner resume {id}</code>" in page
    assert "<details open><summary>what verify printed</summary>\n<pre><span>wrong\n</span>" in page
    assert '<span class="added">+&lt;b&gt;\n</span>' in page
    assert "<pre><span>said\n</span></pre>" in page
    link = '<a href="#lines-{}"><code>{}</code></a>'
    cited = f"a {link.format(1, 'made.txt:1')} b {link.format(2, '/workspace/made.txt:1')} c <code>made.txt:2</code>"
    assert cited in page
    assert '<tr class="meant"><th scope="row">1</th><td>&lt;b&gt;</td></tr>' in page
    assert '<th scope="row">verify</th><td>' in plan
    assert "all.runner.yaml:" in plan
    assert f"no difference since run {id}" in plan
