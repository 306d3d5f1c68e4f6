#!/usr/bin/env bash
# codex: Codex on the prompt that comes by standard input. The workspace is its sandbox; it cannot have another in it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

require_env LLM_MODEL

emit_command codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -m "$LLM_MODEL" --json -
