#!/usr/bin/env bash
# claude: Claude Code on the prompt that comes by standard input. What the repository has in `.claude` and `.mcp.json`
# changes neither its permissions nor what it runs.
set -euo pipefail
source "${BASH_SOURCE[0]%/*}/common.sh"

require_env LLM_MODEL SESSION_ID

tools="${AGENT_ALLOWED_TOOLS-Bash,Edit,Glob,Grep,Read,Skill,Write}"
argv=(claude -p --model "$LLM_MODEL" --output-format stream-json --verbose --session-id "$SESSION_ID")
argv+=(--setting-sources user --strict-mcp-config --permission-prompts none)
allowed="$tools"
if [[ -n "${AGENT_MCP_SERVERS:-}" ]]; then
    argv+=(--mcp-config "$AGENT_HOME/.claude/runner-mcp.json")
    allowed+=",mcp__${AGENT_MCP_SERVERS//,/,mcp__}"
fi
argv+=(--tools="$tools" --allowedTools="$allowed") # the first says which tools there are, the second which run unasked
[[ -z "${AGENT_MAX_TURNS:-}" ]] || argv+=(--max-turns "$AGENT_MAX_TURNS")
emit_command "${argv[@]}"
