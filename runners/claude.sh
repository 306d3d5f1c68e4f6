#!/usr/bin/env bash
# claude: Claude Code on the prompt that comes by standard input.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

require_env LLM_MODEL

tools="${AGENT_ALLOWED_TOOLS-Bash,Edit,Glob,Grep,Read,Skill,Write}"
argv=(claude -p --model "$LLM_MODEL" --output-format stream-json --verbose)
argv+=(--tools="$tools" --allowedTools="$tools") # the first says which tools there are, the second which run unasked
[[ -z "${AGENT_MAX_TURNS:-}" ]] || argv+=(--max-turns "$AGENT_MAX_TURNS")
emit_command "${argv[@]}"
