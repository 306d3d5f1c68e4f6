#!/usr/bin/env bash
# gemini: the transcripts of this session, for its archive. Runs in the workspace, and prints paths below AGENT_HOME.
shopt -s nullglob
cd -- "$AGENT_HOME" || exit 0

found=(.gemini/tmp/*/chats/session-*-"${SESSION_ID:0:8}".jsonl)
[[ "${#found[@]}" -gt 0 ]] || echo "no session $SESSION_ID below .gemini/tmp" >&2
printf '%s\n' "${found[@]}"
