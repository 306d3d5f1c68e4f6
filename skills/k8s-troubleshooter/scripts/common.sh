# shellcheck shell=bash
# shellcheck disable=SC2034  # the scripts that source this read what the options say
# Shared by the scripts beside it: options, kubectl calls that can only read, redaction. Not run by itself.
set -euo pipefail
export LC_ALL=C TZ=UTC

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
now=${TRIAGE_NOW:-$(printf '%(%s)T' -1)}   # seconds since 1970: set it to judge recorded evidence by its own time
namespace='' resource='' output=text timeout=25 since=3600
globals=() positional=()

fail() { printf 'error: %s\n' "$1" >&2; exit "${2:-2}"; }

# usage: prints the comment at the top of the script, which is its manual.
usage() { sed -n '2,/^[^#]/{/^# shellcheck/d;s/^# \{0,1\}//p;}' "$0"; }

# seconds DURATION: 90, 90s, 15m, 2h or 1d in seconds.
seconds() {
    [[ "$1" =~ ^([1-9][0-9]{0,6})([smhd]?)$ ]] || fail "\`$1\` is no duration; say 90s, 15m, 2h or 1d"
    case "${BASH_REMATCH[2]}" in
        m) echo $((BASH_REMATCH[1] * 60)) ;;
        h) echo $((BASH_REMATCH[1] * 3600)) ;;
        d) echo $((BASH_REMATCH[1] * 86400)) ;;
        *) echo "${BASH_REMATCH[1]}" ;;
    esac
}

# options WORD...: reads the options that all scripts share; what is no option goes to `positional`.
options() {
    local word
    while (($#)); do
        word=$1
        shift
        if [[ "$word" == --*=* ]]; then
            set -- "${word#*=}" "$@"
            word=${word%%=*}
        fi
        case "$word" in
            -h | --help) usage; exit 0 ;;
            -A | --all-namespaces) namespace='*' ;;
            -n | --namespace | --context | --kubeconfig | --resource | --since | -o | --output | --timeout)
                (($#)) || fail "$word wants a value; see --help"
                option "$word" "$1"
                shift
                ;;
            -*) fail "\`$word\` is no option; see --help" ;;
            *) positional+=("$word") ;;
        esac
    done
    globals+=("--request-timeout=${timeout}s")
    command -v kubectl >/dev/null || fail "kubectl is not on PATH" 3
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
}

option() {
    case "$1" in
        -n | --namespace)
            [[ "$2" =~ ^[a-z0-9]([-a-z0-9]*[a-z0-9])?$ ]] || fail "\`$2\` is no name of a namespace"
            namespace=$2
            ;;
        --context | --kubeconfig) globals+=("$1=$2") ;;
        --resource)
            [[ "$2" =~ ^[A-Za-z]+/[a-z0-9][-a-z0-9.]*$ ]] || fail "\`$2\` is no KIND/NAME, such as deployment/checkout"
            resource=$2
            ;;
        --since) since=$(seconds "$2") ;;
        -o | --output)
            [[ "$2" == text || "$2" == json ]] || fail "\`$2\` is no output; valid: text, json"
            output=$2
            ;;
        --timeout) timeout=$(seconds "$2") ;;
    esac
}

# one WHAT: ends the script unless there is one name on the command line, and a namespace for it.
one() {
    ((${#positional[@]} == 1)) || fail "wanted: -n NS $1; see --help"
    [[ -n "$namespace" && "$namespace" != '*' ]] || fail "wanted: -n NS $1; see --help"
}

# clean [FILE]: masks what looks like a credential, within its value, and drops control characters but newline and
# tab. What was masked goes to FILE, in words.
clean() {
    sed -E $'s/\e\\[[0-9;?]*[A-Za-z]//g' | tr -d '\000-\010\013-\037\177' | cut -b 1-32769 |
        awk -f "$here/mask.awk" -f "$here/clean.awk" -v told="${1:-}"
}

# shown WORD...: a call as a person would type it: without the limits and templates that only the scripts need.
shown() {
    local word line='kubectl'
    for word in "$@"; do
        [[ "$word" == --request-timeout=* || "$word" == go-template-file=* ]] && continue
        line+=" $(quoted "$word")"
    done
    printf '%s\n' "${line% -o}"
}

# quoted WORD: WORD as a shell reads it back.
quoted() {
    if [[ "$1" =~ ^[A-Za-z0-9_./=:,@%+-]+$ ]]; then
        printf '%s' "$1"
    else
        printf "'%s'" "${1//\'/\'\\\'\'}"
    fi
}

# kube FILE WORD...: one call. Its cleaned output goes to $work/FILE, its fate and the command to FILE.fate.
# A call that fails is no error here: its fate says why (refused, absent, late, unreachable, failed).
kube() {
    local file="$work/$1" ends=(0 0) fate=ok left=$((timeout - SECONDS)) limit=()
    shift
    [[ ! ",${2:-}" =~ ,secrets?([,./]|$) ]] || fail "secrets are not read here: $*" 70
    case "$1 ${2:-}" in
        get\ * | describe\ * | logs\ * | top\ * | config\ view) ;;
        *) fail "not a call that only reads: $*" 70 ;;
    esac
    ((left > 0)) || left=1
    if command -v timeout >/dev/null; then
        limit=(timeout -k 1 "$left")
    fi
    ${limit[@]+"${limit[@]}"} kubectl "${globals[@]}" "$@" 2>"$file.err" </dev/null | clean "$file.masked" >"$file" ||
        ends=("${PIPESTATUS[@]}")
    if [[ "${ends[0]}" == 0 && "${ends[1]}" != 0 ]]; then
        fate=failed
        printf 'what it printed could not be masked\n' >"$file.err"
    elif ((ends[0])); then
        fate=$(fate_of "${ends[0]}" "$file.err")
    fi
    printf '%s\t%s\t%s\t%s\n' "$fate" "$(shown "${globals[@]}" "$@")" \
        "$(clean <"$file.err" | grep -vE '^(Warning|[EIW][0-9]{4} )' | head -n 5 | cut -c1-300 | tr '\n\t' '  ')" \
        "$(cat "$file.masked" 2>/dev/null)" >"$file.fate"
}

# The API server's answer counts before the exit code: one command may read several kinds, and some of them be refused.
fate_of() {
    if (($1 == 124 || $1 == 137)) || grep -qE 'context deadline exceeded|Client.Timeout|timed out|TLS handshake timeout' "$2"; then
        echo late
    elif grep -q '(Forbidden)' "$2"; then
        echo refused
    elif grep -qE '\(NotFound\)' "$2"; then
        echo missing
    elif grep -qE "doesn't have a resource type|could not find the requested resource" "$2"; then
        echo absent
    elif grep -qE 'connection refused|no such host|no route to host|Unable to connect|i/o timeout|was refused|x509:|Unauthorized|must be logged in|context .* does not exist|no configuration has been provided|stat .*: no such file' "$2"; then
        echo unreachable
    else
        echo failed
    fi
}

fate() { cut -f1 "$work/$1.fate"; }

# why FILE: what the call of FILE was told instead, in a line.
why() {
    local told
    told=$(cut -f3 "$work/$1.fate")
    printf '%s' "${told:-it said nothing}"
}

# reachable FILE: ends the script when the call of FILE met no API server that talks to us.
reachable() {
    [[ "$(fate "$1")" == unreachable ]] || return 0
    fail "the API server cannot be asked: $(why "$1")" 3
}

# wanted FILE WHAT: ends the script when WHAT itself could not be read.
wanted() {
    reachable "$1"
    case "$(fate "$1")" in
        ok) ;;
        missing) fail "$2 does not exist: $(why "$1")" 4 ;;
        late) fail "$2 was not read within $timeout s" 3 ;;
        *) fail "$2 could not be read: $(why "$1")" 3 ;;
    esac
}

bold='' plain=''
if [[ -t 1 && -z "${NO_COLOR:-}" && "${TERM:-dumb}" != dumb ]]; then
    bold=$'\e[1m' plain=$'\e[0m'
fi

heading() { printf '\n%s%s%s\n' "$bold" "$1" "$plain"; }

# body FILE [LINES]: what a call printed, indented and cut; or why it printed nothing.
body() {
    local most=${2:-40}
    if [[ "$(fate "$1")" != ok && ! -s "$work/$1" ]]; then
        printf '  (%s: %s)\n' "$(fate "$1")" "$(why "$1")"
    elif [[ ! -s "$work/$1" ]]; then
        printf '  (nothing)\n'
    else
        awk -v most="$most" 'NR <= most { print "  " substr($0, 1, 400) } END { if (NR > most) print "  ... " NR - most " more lines" }' "$work/$1"
    fi
}

# told FILE: whether the call of FILE succeeded; when not, why is printed in the place of what it would have told.
told() {
    [[ "$(fate "$1")" == ok ]] || { body "$1"; return 1; }
}

# events FILE: the latest 15 of what templates/events.gotmpl printed.
events() {
    heading 'Events (latest last)'
    told "$1" || return 0
    awk -f "$here/lib.awk" -f /dev/stdin "$work/$1" <<'AWK' | sort | tail -n 15 | awk '{ print } END { if (!NR) print "  none" }'
BEGIN { FS = "\t" }
$1 == "E" { print "  " $8 " x" $7 + 0 "  " $3 " " plain($4) ": " clip(plain($9), 300) }
AWK
}

# commands: every call so far, and its fate when it did not succeed.
commands() {
    local file
    heading 'Commands executed'
    for file in "$work"/*.fate; do
        awk -F'\t' '{ print "  " $2 ($1 == "ok" ? "" : "   [" $1 "]") ($4 == "" ? "" : "   [masked: " $4 "]") }' "$file"
    done
}
