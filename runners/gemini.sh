#!/usr/bin/env bash
# gemini: Gemini CLI on the prompt that comes by standard input. A policy file in its home says which tools run unasked.
set -euo pipefail
source "${BASH_SOURCE[0]%/*}/common.sh"

require_env LLM_MODEL SESSION_ID

argv=(gemini --session-id "$SESSION_ID" -m "$LLM_MODEL" -o stream-json)
# It connects to no MCP server in a folder that it does not trust. By this it trusts the folder after it has read all
# settings, so that the repository's are left out all the same.
[[ -z "${AGENT_MCP_SERVERS:-}" ]] || argv+=(--skip-trust)
emit_command "${argv[@]}"
