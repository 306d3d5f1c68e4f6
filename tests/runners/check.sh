#!/usr/bin/env bash
# Tests of the sub-runners with nothing but Bash: each prints one line that Bash reads back as the words meant.
set -euo pipefail
runners="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../runners" && pwd)"
passed=0

check() { # check NAME EXPECTED ACTUAL
    if [[ "$2" != "$3" ]]; then
        printf 'FAILED %s\n  expected: %q\n  actual:   %q\n' "$1" "$2" "$3" >&2
        exit 1
    fi
    passed=$((passed + 1))
}

words() { # the words of a printed line, one in brackets each
    local -a argv
    eval "argv=($1)"
    printf '[%s]' "${argv[@]}"
}

line=$(AGENT_SCRIPT=/run/runner/script bash "$runners/script.sh")
check "script plays its script" "bash /run/runner/script " "$line"

# shellcheck disable=SC2016  # nothing of these may expand
for path in "it's here.sh" 'a b' '$(touch pwn)' 'x";touch pwn;"' $'a\nb' $'\x1b]0;c\a' '*' '~' 'é'; do
    line=$(AGENT_SCRIPT="$path" bash "$runners/script.sh")
    check "$path is one line" 1 "$(printf '%s\n' "$line" | wc -l | tr -d ' ')"
    check "$path is one word" "[bash][$path]" "$(words "$line")"
done

status=0
said=$(AGENT_CLI=script bash -c 'unset AGENT_SCRIPT; source "$1"' runner "$runners/script.sh" 2>&1) || status=$?
check "a missing variable ends it" 2 "$status"
check "a missing variable is named" "error[agent.missing-variable]: AGENT_SCRIPT must be set for script" "$said"

printf '%s passed\n' "$passed"
