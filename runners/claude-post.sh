#!/usr/bin/env bash
# claude: the transcripts of this session, for its archive. Runs in the workspace, and prints paths below AGENT_HOME.
shopt -s nullglob
cd -- "$AGENT_HOME" || exit 0

found=(.claude/projects/*/"$SESSION_ID".jsonl .claude/projects/*/"$SESSION_ID"/subagents/*.jsonl)
[[ "${#found[@]}" -gt 0 ]] || echo "no session $SESSION_ID below .claude/projects" >&2
printf '%s\n' "${found[@]}"
