#!/usr/bin/env bash
# gemini: Gemini CLI on the prompt that comes by standard input. A policy file in its home says which tools run unasked.
set -euo pipefail
source "${BASH_SOURCE[0]%/*}/common.sh"

require_env LLM_MODEL SESSION_ID

emit_command gemini --session-id "$SESSION_ID" -m "$LLM_MODEL" -o stream-json
