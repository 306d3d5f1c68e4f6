"""Manifests that ``runner init`` writes, as text with a comment on each line that a person may want to change."""

from __future__ import annotations

import json

from runner.manifest import schema
from runner.ops.init.installs import Install
from runner.ops.init.survey import Survey
from runner.ops.init.trial import Trial


def manifests_of(seen: Survey, taken: Trial) -> dict[str, str]:
    """Return the files of ``.runner/``, by name."""
    own = ""
    if taken.way.tools:
        own += f"    toolchains: {_flow(taken.way.tools)}   # programs on the PATH of whoever applies; read-only\n"
    if taken.installs:
        hosts = ", ".join(dict.fromkeys(one.network for one in taken.installs))
        own += f"    network: {{dependencies: {{allow: [{hosts}]}}}}   # of these commands only\n"
        own += "    dependencies:                             # made once, kept for the next runs\n"
        own += "".join(f"      - {json.dumps(path)}   # yours; never changed\n" for path in seen.dependencies)
        own += "".join(map(_command, taken.installs))
    elif seen.dependencies:
        own += f"    dependencies: {_flow(seen.dependencies)}   # ignored by git, installed by you; never changed\n"
    verify = ""
    if taken.way.setup:
        lines = "".join(f"      - {json.dumps(line)}\n" for line in taken.way.setup)
        verify = f"    setup:                                    # before the commands\n{lines}"
    command = taken.way.command
    words = json.dumps(command) if isinstance(command, str) else _flow(command)
    return {
        "agent.runner.yaml": _head("AgentType", "agent") + _AGENT + own,
        "agent.sh": _SCRIPT,
        "policy.runner.yaml": _head("Policy", "house") + _POLICY,
        "check.runner.yaml": _head("IncidentRun", "check") + _CHECK.replace("SETUP", verify).replace("COMMAND", words),
        **{
            f"schemas/{name}": schema.text_of(schema.as_draft_07(content)) for name, content in schema.schemas().items()
        },
    }


def _command(one: Install) -> str:
    """Return the entry of a command that installs dependencies."""
    files, keep = _flow(one.command.files), _flow(one.command.keep)
    return f"      - run: {json.dumps(one.words)}\n        from: {files}\n        keep: {keep}\n"


def _flow(words: tuple[str, ...]) -> str:
    """Return a list as YAML on one line."""
    return json.dumps(list(words), ensure_ascii=False)


def _head(kind: str, name: str) -> str:
    modeline = f"# yaml-language-server: $schema=schemas/{schema.file_of(kind)}\n"
    return f"{modeline}apiVersion: runner/v1\nkind: {kind}\nmetadata: {{name: {name}}}\nspec:\n"


_AGENT = """\
  agent: script
  script: {path: agent.sh}
  workspace:
    enabled: true
    providers: [local]
    repo_source: {type: local, path: ..}      # always a private clone of HEAD
    protected_paths: [.runner/, .github/, .gitlab-ci.yml, .pre-commit-config.yaml]
"""
_SCRIPT = """\
#!/usr/bin/env bash
# Plays the agent's part, in a private clone of this repository. What it changes there is judged by the
# policy, committed outside your checkout, and tested.
set -euo pipefail

echo 'nothing to change yet: see .runner/agent.sh'
"""
_POLICY = """\
  allowed_paths: ["**"]                       # narrow this to what an agent may change
  max_file_size: 1M
  min_isolation: namespaces
"""
_CHECK = """\
  agent_type: agent
  policy: house
  prompt: Keep the tests passing.
  verify:
SETUP    commands:                                 # on a clean checkout of the result, without a network
      - run: COMMAND
  timeout: 30m
"""
