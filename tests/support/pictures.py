"""The pictures of the documentation, drawn from what the command prints on a terminal."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import runner.agents
from runner.core import plugins
from runner.core.npm_package import pinned_version
from tests.support import components
from tests.support.situations import Project, git
from tests.support.terminal import on_terminal

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "docs/pictures"
COLUMNS = 104
FIXER = """\
apiVersion: runner/v1
kind: AgentType
metadata: {name: fixer}
spec:
  agent: claude
  model: sonnet
  budget: {cost_usd: 3, turns: 50}
  workspace:
    enabled: true
    providers: [local]
    toolchains: [AGENTS]
    repo_source: {type: local, path: ..}
    protected_paths: [.runner/]
"""
FULL = FIXER.replace("  workspace:\n", "  post_hooks: [[ls]]\n  workspace:\n    setup_commands: [[ls]]\n")
TRIAGE = "runner triage -w INC-4821 --files-only --provider local --turns triage.turns.yaml checkout pods restart"

_STYLES = {"1": "bold", "31": "red", "32": "green", "33": "yellow"}
_WIDTH, _LINE, _EDGE = 8.0, 19, 18  # pixels of a character, of a line, around the text

Span = tuple[str, str]  # text and style


def lines_of(svg: str) -> list[str]:
    """The lines of text in a picture."""
    return ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def plan(project: Project) -> str:
    with tempfile.TemporaryDirectory() as toolchain:
        _example(project, FIXER, Path(toolchain))
        svg = _screen(project, "runner plan")
        return re.sub(rf"{toolchain}( ro)?", lambda it: f"/opt/agents{it[1] or ''}".ljust(len(it[0])), svg)


def triage(project: Project) -> str:
    """Draw a rehearsal: the real CLI, sandbox and checks, with a script in the model's place."""
    shutil.copytree(ROOT / "manifests/quickstart/incident", project.folder / "INC-4821")
    shutil.copy(PLACE / "triage.turns.yaml", project.folder)
    project.env["PATH"] = f"{components.AGENTS}/bin:{project.variables['PATH']}"
    return _screen(project, TRIAGE)


def steps(project: Project) -> str:
    """Draw the steps of a plan where they run: what sees mounts runs in a sandbox, all else in the runner."""
    with tempfile.TemporaryDirectory() as toolchain:
        _example(project, FULL, Path(toolchain))
        return _diagram(json.loads(project.runner("plan", "--output", "json").out)["runs"][0]["steps"])


PICTURES: dict[str, Callable[[Project], str]] = {"plan": plan, "triage": triage, "steps": steps}


def _example(project: Project, fixer: str, toolchain: Path) -> None:
    """Make the Python example of an agent that works with a model; of its CLI a plan sees no more than the version."""
    shutil.copytree(ROOT / "manifests/examples/python", project.folder, dirs_exist_ok=True)
    (project.folder / ".runner/fixer.runner.yaml").write_text(fixer.replace("AGENTS", str(toolchain)))
    project.env["ANTHROPIC_API_KEY"] = "stands-for-a-key"
    agent = plugins.load(runner.agents, "claude").agent
    cli = toolchain / "lib/node_modules" / agent.package
    cli.mkdir(parents=True)
    (cli / "package.json").write_text(json.dumps({"name": agent.package, "version": pinned_version(agent.package)}))
    (cli / agent.program).touch(0o755)
    (toolchain / "bin").mkdir()
    (toolchain / "bin" / agent.program).symlink_to(cli / agent.program)
    for words in (["init", "-qb", "main"], ["add", "-A"], ["commit", "-qm", "cart"]):
        git(project.folder, *words)


def _screen(project: Project, command: str) -> str:
    """Draw a command and what it leaves on a terminal."""
    project.env["PYTHONPATH"] = str(ROOT)
    with on_terminal(project, *command.split()[1:], columns=COLUMNS) as terminal:
        printed = terminal.rest()
    assert terminal.process.returncode == 0, printed
    left = [re.sub(r".*(\r|\x1b\[2K)", "", line.removesuffix("\r")) for line in printed.rstrip().split("\n")]
    return _terminal(command, [list(_spans(line)) for line in left])


def _spans(line: str) -> Iterator[Span]:
    style = ""
    for text, codes in re.findall(r"([^\x1b]*)(?:\x1b\[([0-9;]*)m)?", line):
        if text:
            yield text, style
        style = next((_STYLES[code] for code in codes.split(";") if code in _STYLES), "") if codes else style


def _terminal(title: str, lines: list[list[Span]]) -> str:
    prompt: list[Span] = [("$ ", "green"), (title, "bold")]
    width = round(2 * _EDGE + _WIDTH * COLUMNS)
    height = 2 * _EDGE + _LINE * (len(lines) + 1)
    texts = "\n".join(_text(_EDGE, _EDGE + 14 + _LINE * row, line) for row, line in enumerate([prompt, *lines]) if line)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">
<title>{escape(title)}</title>
<style>
text {{ font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #d4d8de; white-space: pre }}
.bold {{ fill: #fff; font-weight: bold }}
.red {{ fill: #ff7b72 }} .green {{ fill: #56d364 }} .yellow {{ fill: #e3b341 }}
</style>
<rect width="{width}" height="{height}" rx="8" fill="#161b22"/>
{texts}
</svg>
"""


def _text(x: float, y: float, line: list[Span]) -> str:
    spans = "".join(f'<tspan class="{style}">{escape(text)}</tspan>' if style else escape(text) for text, style in line)
    length = _WIDTH * sum(len(text) for text, _ in line)
    wide = f'textLength="{length:g}" lengthAdjust="spacingAndGlyphs" xml:space="preserve"'
    return f'<text x="{x}" y="{y}" {wide}>{spans}</text>'


def _diagram(steps: list[dict[str, Any]]) -> str:
    """Draw the steps from left to right in three rows: the sandbox, the runner, the clean sandbox of the checks."""
    box, gap, lane = 66, 5, 84
    left, rows = 118, {"sandbox": 52, "runner": 52 + lane, "clean": 52 + 2 * lane}
    width, height = left + len(steps) * (box + gap) + _EDGE, 52 + 3 * lane + 8
    lanes = {
        "sandbox": ("the sandbox", "no network, no model key"),
        "runner": ("runner", "on your host"),
        "clean": ("a clean sandbox", "of the commit alone"),
    }
    parts = [_label(_EDGE, 30, "manifests  →  plan, with a digest  →  run  →  record, patch, branch, report", "head")]
    for name, (title, note) in lanes.items():
        parts.append(f'<rect x="8" y="{rows[name]}" width="{width - 16}" height="{lane - 8}" rx="6" class="{name}"/>')
        parts += [_label(_EDGE, rows[name] + 34, title, "head"), _label(_EDGE, rows[name] + 52, note, "note")]
    last: tuple[float, float] | None = None
    for number, step in enumerate(steps):
        x, row = left + number * (box + gap), _row(step)
        y = rows[row] + 20
        if last is not None:
            parts.append(f'<path d="M{last[0]} {last[1]} L{x} {y + 18}" class="line"/>')
        last = x + box, y + 18
        parts.append(f'<rect x="{x}" y="{y}" width="{box}" height="36" rx="5" class="step"/>')
        parts.append(_label(x + box / 2, y + 23, str(step["kind"]).replace("_", " "), "kind"))
        if step["network"] == "model gateway":
            below = rows["runner"] + 12
            parts.append(f'<path d="M{x + box / 2} {y + 36} V{below}" class="line"/>')
            parts.append(f'<rect x="{x - 40}" y="{below}" width="{box + 80}" height="52" rx="5" class="gateway"/>')
            parts.append(_label(x + box / 2, below + 22, "model gateway", "kind"))
            parts.append(_label(x + box / 2, below + 40, "key, models, budget", "middle"))
    drawn = "\n".join(parts)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">
<title>The steps of a run, and where they run</title>
<style>
text {{ font: 13px system-ui, sans-serif; fill: #1f2328 }}
.head {{ font-weight: 600 }} .note, .middle {{ fill: #59636e; font-size: 12px }}
.kind, .middle {{ text-anchor: middle }} .kind {{ font-size: 12px }}
.sandbox {{ fill: #ddf4ff }} .runner {{ fill: #f6f8fa }} .clean {{ fill: #dafbe1 }}
.step {{ fill: #fff; stroke: #59636e }}
.gateway {{ fill: #fff8c5; stroke: #9a6700 }} .line {{ stroke: #59636e; fill: none }}
</style>
<rect width="{width}" height="{height}" rx="8" fill="#fff" stroke="#d1d9e0"/>
{drawn}
</svg>
"""


def _row(step: dict[str, Any]) -> str:
    """Find where a step runs: what sees mounts runs in a sandbox, and verify in one of its own."""
    if not step["mounts"]:
        return "runner"
    return "clean" if step["kind"] == "verify" else "sandbox"


def _label(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(text)}</text>'
