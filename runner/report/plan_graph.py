"""Plan as a graph: Mermaid for pages that render it, DOT for graphviz.

Nodes are numbered, and every label is escaped, since it may contain anything that a manifest can. A run's finalize
phase begins after its work has ended, whatever the outcome: those edges are dotted.
"""

from __future__ import annotations

from collections.abc import Iterator

from runner.core.sanitize import excerpt
from runner.plan.model import Plan, RunPlan
from runner.report.format import duration

_CUT = 120  # characters of a label


def render_mermaid(plan: Plan) -> str:
    """Render a Mermaid flowchart, without a final line break."""
    lines = ["flowchart LR"]
    for r, run in enumerate(plan.runs):
        lines.append(f'  subgraph r{r}["{_mermaid(_title(run))}"]')
        for s, (title, detail) in enumerate(_labels(run)):
            lines.append(f'    r{r}s{s}["{_mermaid(title)}<br/>{_mermaid(detail)}"]')
        lines += (f"    r{r}s{a} {'-->' if firm else '-.->'} r{r}s{b}" for a, b, firm in step_edges(run))
        lines.append("  end")
    lines += (f"  r{a} --> r{b}" for a, b in run_edges(plan))
    return "\n".join(lines)


def render_dot(plan: Plan) -> str:
    """Render a DOT digraph, without a final line break."""
    lines = ["digraph plan {", "  rankdir=LR; compound=true; node [shape=box];"]
    for r, run in enumerate(plan.runs):
        lines.append(f'  subgraph cluster_r{r} {{ label="{_dot(_title(run))}";')
        for s, (title, detail) in enumerate(_labels(run)):
            lines.append(f'    r{r}s{s} [label="{_dot(title)}\\n{_dot(detail)}"];')
        lines += (f"    r{r}s{a} -> r{r}s{b}{'' if firm else ' [style=dotted]'};" for a, b, firm in step_edges(run))
        lines.append("  }")
    for a, b in run_edges(plan):
        last = len(plan.runs[a].steps) - 1
        lines.append(f"  r{a}s{last} -> r{b}s0 [ltail=cluster_r{a}, lhead=cluster_r{b}];")
    lines.append("}")
    return "\n".join(lines)


def _title(run: RunPlan) -> str:
    return f"{run.name}, over after {duration(run.worst_case()[1])} at the latest"


def _labels(run: RunPlan) -> Iterator[tuple[str, str]]:
    return ((f"{step.id} {duration(step.deadline_seconds)}", step.what) for step in run.steps)


def step_edges(run: RunPlan) -> Iterator[tuple[int, int, bool]]:
    """Yield from, to, and whether it is a need; else it leads from the end of work to the start of finalizing."""
    number = {step.id: position for position, step in enumerate(run.steps)}
    for step in run.steps:
        yield from ((number[need], number[step.id], True) for need in step.needs)
    needed = {need for step in run.steps for need in step.needs}
    ends = [step.id for step in run.phase("work") if step.id not in needed]
    begins = [step.id for step in run.phase("finalize") if not step.needs]
    yield from ((number[end], number[begin], False) for end in ends for begin in begins)


def run_edges(plan: Plan) -> Iterator[tuple[int, int]]:
    number = {run.name: position for position, run in enumerate(plan.runs)}
    return ((number[need], number[run.name]) for run in plan.runs for need in run.needs)


def _mermaid(text: str) -> str:
    """Escape all but letters, digits and harmless signs as Mermaid's character codes."""
    return "".join(c if c.isalnum() or c in " .,:/_-+=" else f"#{ord(c)};" for c in excerpt(text, _CUT))


def _dot(text: str) -> str:
    """Escape for a quoted DOT string, where a backslash begins ``\\N`` and the like, and ``&`` an HTML entity."""
    return excerpt(text, _CUT).replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;")
