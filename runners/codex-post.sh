#!/usr/bin/env bash
# codex: the transcripts of this session, for its archive. Runs in the workspace, and prints paths below AGENT_HOME.
# They are named by the time and an id of codex's own; what is newer than the prompt is of this session.
shopt -s nullglob
cd -- "$AGENT_HOME" || exit 0

found=()
for rollout in .codex/sessions/*/*/*/rollout-*.jsonl; do
    [[ ! "$rollout" -nt "$PROMPT_FILE" ]] || found+=("$rollout")
done
[[ "${#found[@]}" -gt 0 ]] || echo "no session of this run below .codex/sessions" >&2
printf '%s\n' "${found[@]}"
