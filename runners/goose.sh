#!/usr/bin/env bash
# goose: Goose on the prompt that comes by standard input, with the tools of a developer only.
set -euo pipefail
source "${BASH_SOURCE[0]%/*}/common.sh"

require_env LLM_MODEL SESSION_ID

argv=(goose run -q --output-format stream-json --model "$LLM_MODEL" -n "$SESSION_ID")
[[ -n "${AGENT_MCP_SERVERS:-}" ]] || argv+=(--no-profile) # a profile is what names MCP servers
argv+=(--with-builtin "developer${AGENT_SKILLS:+,skills}")
[[ -z "${AGENT_MAX_TURNS:-}" ]] || argv+=(--max-turns "$AGENT_MAX_TURNS")
emit_command "${argv[@]}" -i -
