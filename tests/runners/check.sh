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

# CLI, and the words of its line for a model and a run with names that Bash would not leave alone
model=$'so net\'s; rm -rf ~ $(id) \n*' session='6f2a5a0e-0000-4000-8000-000000000001'
expect() { # expect CLI WORD...
    local cli="$1"
    shift
    local line
    line=$(AGENT_CLI="$cli" LLM_MODEL="$model" SESSION_ID="$session" bash "$runners/$cli.sh")
    check "$cli is one line" 1 "$(printf '%s\n' "$line" | wc -l | tr -d ' ')"
    check "$cli has its words" "$(printf '[%s]' "$@")" "$(words "$line")"
}
tools=Bash,Edit,Glob,Grep,Read,Skill,Write
expect claude claude -p --model "$model" --output-format stream-json --verbose --session-id "$session" \
    --setting-sources user --strict-mcp-config --permission-prompts none --tools="$tools" --allowedTools="$tools"
expect codex codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -m "$model" --json -
expect gemini gemini --session-id "$session" -m "$model" -o stream-json
expect goose goose run -q --output-format stream-json --model "$model" -n "$session" \
    --no-profile --with-builtin developer -i -

for cli in claude codex gemini goose; do
    status=0
    said=$(AGENT_CLI="$cli" SESSION_ID=x bash "$runners/$cli.sh" 2>&1) || status=$?
    check "$cli without a model ends" 2 "$status"
    check "$cli says what it misses" "error[agent.missing-variable]: LLM_MODEL must be set for $cli" "$said"
done

# A stand-in for each CLI gets just these words; until then nothing of it has run.
bin=$(mktemp -d)
trap 'rm -r "$bin"' EXIT
for cli in claude codex gemini goose; do
    # shellcheck disable=SC2016  # for the stand-in
    printf '%s\n' '#!/usr/bin/env bash' 'printf "<%s>" "${0##*/}" "$@" | tee "${0%/*}/ran"' > "$bin/$cli"
    chmod +x "$bin/$cli"
    line=$(PATH="$bin:$PATH" LLM_MODEL="$model" SESSION_ID=x AGENT_MAX_TURNS=7 AGENT_ALLOWED_TOOLS='' bash "$runners/$cli.sh")
    check "$cli is not run by its sub-runner" no "$([[ -e "$bin/ran" ]] && echo yes || echo no)"
    eval "argv=($line)"
    # shellcheck disable=SC2154  # the line above sets it
    check "$cli runs as printed" "$(printf '<%s>' "${argv[@]}")" "$(PATH="$bin:$PATH" "${argv[@]}")"
    rm "$bin/ran"
    case "$cli" in
        claude) check "claude without tools" "[--tools=][--allowedTools=][--max-turns][7]" "$(printf '[%s]' "${argv[@]:(-4)}")" ;;
        goose) check "goose is told its turns" "[--max-turns][7][-i][-]" "$(printf '[%s]' "${argv[@]:(-4)}")" ;;
    esac
done

for skilled in ':[--tools=]' 'Read:[--tools=Read]' 'Read,Skill:[--tools=Read,Skill]'; do
    line=$(LLM_MODEL=m SESSION_ID=x AGENT_SKILLS=one AGENT_ALLOWED_TOOLS="${skilled%%:*}" bash "$runners/claude.sh")
    eval "argv=($line)"
    check "claude has exactly the tools that are listed" "${skilled#*:}" "[${argv[-2]}]"
done

printf '%s passed\n' "$passed"
