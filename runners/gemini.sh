#!/usr/bin/env bash
# gemini: Gemini CLI on the prompt that comes by standard input.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

require_env LLM_MODEL

emit_command gemini --approval-mode yolo -m "$LLM_MODEL" -o stream-json
