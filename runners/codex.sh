#!/usr/bin/env bash
# codex: Codex on the prompt that comes by standard input. The workspace is its sandbox; it cannot have another in it.
# Settings and rules of the repository are left alone, since nobody has told it to trust that.
set -euo pipefail
source "${BASH_SOURCE[0]%/*}/common.sh"

require_env LLM_MODEL

emit_command codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -m "$LLM_MODEL" --json -
