#!/usr/bin/env bash
# goose: the transcript of this session, for its archive. Runs in the workspace, and prints paths below AGENT_HOME.
# Goose keeps all sessions in one database, so this one is exported first.
cd -- "$AGENT_HOME" || exit 0

exports=.local/share/goose/exports
mkdir -p -- "$exports"
if goose session export -n "$SESSION_ID" --format json -o "$exports/$SESSION_ID.json" >&2; then
    printf '%s\n' "$exports/$SESSION_ID.json"
fi
