# shellcheck shell=bash
# What every sub-runner is written with. A sub-runner prints one command line; it never runs it.

fail() {
    printf 'error[%s]: %s\n' "$1" "$2" >&2
    exit 2
}

require_env() {
    local name
    for name in "$@"; do
        [[ -n "${!name:-}" ]] || fail agent.missing-variable "$name must be set for ${AGENT_CLI:-this agent}"
    done
}

# One line that Bash reads back as exactly these words (%q may emit $'...', so not plain sh).
emit_command() {
    printf '%q ' "$@"
    printf '\n'
}
