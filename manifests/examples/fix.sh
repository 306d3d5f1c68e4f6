#!/usr/bin/env bash
# Plays the agent's part: one new file.
set -euo pipefail

mkdir -p docs
printf 'Kept by a run of the example.\n' >docs/example.md
