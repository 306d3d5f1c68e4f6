#!/usr/bin/env bash
# script: plays AGENT_SCRIPT, a path as seen inside the workspace.
set -euo pipefail
source "${BASH_SOURCE[0]%/*}/common.sh"

require_env AGENT_SCRIPT

emit_command bash "$AGENT_SCRIPT"
