#!/usr/bin/env bash
# validate_report.sh: whether a report says what it must, and every claim has its evidence.
#
#   validate_report.sh [-o text|json] FILE
#
# Errors: a missing or empty section (Summary, Root Cause, Evidence, Blast Radius or Impact, Commands Executed,
# Next Steps, Unchecked); facts that are not numbered FACT-1, FACT-2, ... or that name no source in backquotes; a citation
# of a fact that is not there; a Root Cause that cites no fact; no command listed; a command that is not read only;
# something that looks like a credential. Warnings: no Timeline; facts that nothing cites; placeholders left over.
#
# Text output is one finding a line, "error: ..." or "warning: ...", then a line that counts. It needs no cluster.
# Exit: 0 no error, though there may be warnings; 1 errors; 2 wrong usage or an unreadable file.
set -euo pipefail
export LC_ALL=C

fail() { printf 'error: %s\n' "$1" >&2; exit 2; }

output=text file=''
while (($#)); do
    case "$1" in
        -h | --help) sed -n '2,/^[^#]/{s/^# \{0,1\}//p;}' "$0"; exit 0 ;;
        -o | --output) output=${2:-}; shift ;;
        --output=*) output=${1#*=} ;;
        -*) fail "\`$1\` is no option; see --help" ;;
        *) [[ -z "$file" ]] || fail "one file at a time"; file=$1 ;;
    esac
    shift
done
[[ "$output" == text || "$output" == json ]] || fail "\`$output\` is no output; valid: text, json"
[[ -n "$file" ]] || fail "wanted: FILE; see --help"
[[ -f "$file" && -r "$file" ]] || fail "\`$file\` cannot be read"

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
awk -f "$here/lib.awk" -f /dev/stdin -v output="$output" "$file" <<'AWK'
function problem(level, text) { n_problems++; levels[n_problems] = level; texts[n_problems] = text; n[level]++ }

function known_section(title) {
    title = tolower(title)
    sub(/^[0-9]+[.)]? */, "", title)
    sub(/[ \t#]+$/, "", title)
    if (title == "impact") return "blast radius"
    return title
}

# judge_command(TEXT): a finding for each kubectl or helm in it whose verb does more than read.
function judge_command(text,   word, n_words, i, j, verb) {
    n_words = split(text, word, /[ \t]+/)
    for (i = 1; i <= n_words; i++) {
        if (word[i] !~ /(^|\/)(kubectl|helm)$/) continue
        for (j = i + 1; j <= n_words && word[j] ~ /^-/; j++) if (word[j] ~ /^(-n|--namespace|--context|--kube-context|--kubeconfig|--cluster|--user|--as|-s|--server)$/) j++
        verb = word[j]
        if (verb ~ /^(rollout|auth|config)$/) verb = verb " " word[j + 1]
        if (word[i] ~ /helm$/ ? verb !~ HELM_READS : verb !~ KUBECTL_READS) problem("error", "a command that is not read only (" verb "), line " FNR)
    }
}

BEGIN {
    KUBECTL_READS = "^(get|describe|logs|top|events|version|api-resources|api-versions|explain|cluster-info|rollout (history|status)|auth (can-i|whoami)|config (view|current-context|get-contexts))$"
    HELM_READS = "^(list|ls|history|status|version|search|show)$"
}

{ sub(/\r$/, "") }
/^(```|~~~)/ { fenced = !fenced }
/^#+[ \t]/ && !fenced { title = $0; sub(/^#+[ \t]+/, "", title); section = known_section(title); seen[section] = 1; next }
/[^ \t]/ { filled[section]++ }

# A fact is where its number is in bold or begins the line; everywhere else FACT-n is a citation.
section == "evidence" && /^[ \t]*([-*|]|[0-9]+\.)?[ \t]*(\*\*)?\[?FACT-[0-9]+/ {
    match($0, /FACT-[0-9]+/)
    number = substr($0, RSTART + 5, RLENGTH - 5) + 0
    if (number in fact) problem("error", "FACT-" number " is there twice, line " FNR)
    fact[number] = FNR
    if (number > highest) highest = number
    if ($0 !~ /`[^`]+`/) problem("error", "FACT-" number " names no source in backquotes, line " FNR)
    $0 = substr($0, RSTART + RLENGTH)
}
{
    rest = $0
    while (match(rest, /FACT-[0-9]+( (to|-) FACT-[0-9]+)?/)) {
        word = substr(rest, RSTART, RLENGTH)
        rest = substr(rest, RSTART + RLENGTH)
        split(word, ends, /[^0-9]+/)
        last = ends[3] == "" ? ends[2] : ends[3]
        for (i = ends[2] + 0; i <= last + 0 && i < ends[2] + 1000; i++) if (!(i in cited)) { cited[i] = FNR; order[++n_cited] = i }
        if (section == "root cause") grounds++
    }
}
section == "commands executed" && (/`[^`]+`/ || fenced || /^[ \t]*\$ /) && !/^(```|~~~)/ { listed++ }
section == "commands executed" && tolower($0) ~ /^none/ { listed++ }
section == "commands executed" && tolower($0) !~ /not run|refused|denied/ {
    if (fenced || /^[ \t]*\$ /) judge_command($0)
    else { n_parts = split($0, parts, "`"); for (i = 2; i <= n_parts; i += 2) judge_command(parts[i]) }
}
/-----BEGIN [A-Z ]*PRIVATE KEY|(AKIA|ASIA)[0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z]|eyJ[A-Za-z0-9_-]+\.eyJ[A-Za-z0-9_-]+\./ { problem("error", "something that looks like a credential, line " FNR) }
/TODO|TBD|<(cause|fact|name|command|file|section)[^>]*>|\.\.\. *fill/ && !fenced { problem("warning", "a placeholder, line " FNR) }

END {
    n_wanted = split("Summary|Root Cause|Evidence|Blast Radius|Commands Executed|Next Steps|Unchecked", wanted, "|")
    for (i = 1; i <= n_wanted; i++) {
        key = tolower(wanted[i])
        if (!(key in seen)) problem("error", "no section `" wanted[i] "`")
        else if (!filled[key]) problem("error", "section `" wanted[i] "` is empty")
        else sections++
    }
    if (!("timeline" in seen)) problem("warning", "no section `Timeline`")
    if (("evidence" in seen) && !highest) problem("error", "no numbered fact (FACT-1) under Evidence")
    for (i = 1; i < highest; i++) if (!(i in fact)) problem("error", "facts are not numbered through: FACT-" i " is missing")
    for (i = 1; i <= n_cited; i++) if (!(order[i] in fact)) problem("error", "FACT-" order[i] " is cited, line " cited[order[i]] ", but is not there")
    for (i = 1; i <= highest; i++) { if (i in fact) facts++; if ((i in fact) && !(i in cited)) problem("warning", "FACT-" i " is cited nowhere") }
    if (filled["root cause"] && !grounds) problem("error", "the Root Cause cites no fact")
    if (filled["commands executed"] && !listed) problem("error", "no command is listed under Commands Executed")

    if (output == "json") {
        print "{\"version\": 1, \"valid\": " (n["error"] ? "false" : "true") ", \"sections\": " sections + 0 ", \"sections_wanted\": " n_wanted ", \"facts\": " facts + 0 ", \"findings\": ["
        for (i = 1; i <= n_problems; i++) print "  {\"level\": " json(levels[i]) ", \"text\": " json(texts[i]) "}" (i < n_problems ? "," : "")
        print "]}"
    } else {
        for (i = 1; i <= n_problems; i++) print levels[i] ": " texts[i]
        print (n["error"] ? "not valid" : "valid") ": " sections + 0 " of " n_wanted " sections, " facts + 0 " facts, " n["error"] + 0 " errors, " n["warning"] + 0 " warnings"
    }
    exit n["error"] > 0
}
AWK
