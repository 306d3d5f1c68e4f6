#!/usr/bin/env bash
# run-agent.sh: the triage of an incident by an agent's CLI, with the flags and variables of the triage document.
# `runner triage` is what does it; this is its name of old.
set -euo pipefail

if ! command -v runner >/dev/null; then
    printf 'error[cli.no-runner]: runner is not on PATH\n  = hint: %s\n' \
        'install it, or add the bin directory of its environment to PATH' >&2
    exit 2
fi
exec runner triage "$@"
