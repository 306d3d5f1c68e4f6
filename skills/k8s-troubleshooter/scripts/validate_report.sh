#!/usr/bin/env bash
# validate_report.sh: whether a report says what it must, and every claim has its evidence.
#
#   validate_report.sh [-o text|json] FILE
#
# Errors: a missing or empty section (Summary, Root Cause, Evidence, Blast Radius or Impact, Commands Executed,
# Next Steps, Unchecked); facts that are not numbered FACT-1, FACT-2, ... or that name no source in backquotes; a citation
# of a fact that is not there; a Root Cause that cites no fact; no command listed; a command (kubectl, its alias k, oc,
# helm) that is not read only or that reads a secret; something that looks like a credential. Warnings: no Timeline;
# facts that nothing cites; placeholders left over.
#
# Sections are judged as the runner judges them: number, emphasis, case and level of a heading do not matter, deeper
# headings do not end a section, and what has no letter and no digit is empty.
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
awk -f "$here/lib.awk" -f "$here/mask.awk" -f /dev/stdin -v output="$output" "$file" <<'AWK'
function problem(level, text) { n_problems++; levels[n_problems] = level; texts[n_problems] = text; n[level]++ }

# known_as(TITLE): without case, number, emphasis, closing marks and colon; a synonym as the title it stands for.
function known_as(title) {
    title = tolower(title)
    gsub(/[*_`]/, "", title)
    sub(/[ \t#]+$/, "", title)
    gsub(/[ \t]+/, " ", title)
    sub(/^ /, "", title)
    sub(/^[0-9]+(\.[0-9]+)*[.):]? (- )?/, "", title)
    sub(/:$/, "", title)
    sub(/ +$/, "", title)
    return title == "impact" ? "blast radius" : title
}

# within(TITLE): whether the line is below that heading: deeper headings do not end a section.
function within(title,   level) { for (level in above) if (above[level] == title) return 1; return 0 }

function begin_section(line,   level, other, old) {
    match(line, /#+/)
    level = RLENGTH
    sub(/^ *#+[ \t]+/, "", line)
    for (other = level; other <= 6; other++) delete above[other]
    above[level] = known_as(line)
    seen[above[level]] = 1
}

# past_flags(I): the first of the words from I on that is no flag nor the value of one.
function past_flags(i) {
    for (; word[i] ~ /^-/; i++) if (word[i] ~ TAKES_VALUE) i++
    return i
}

# judge_command(TEXT): a finding for each kubectl, oc or helm in it whose verb does more than read, or reads a secret.
function judge_command(text,   n_words, i, j, first, program, verb, reads) {
    gsub(/["'()`]/, " ", text)
    gsub(/[;|&]+/, " ; ", text)
    sub(/^[ \t]+/, "", text)
    n_words = split(text, word, /[ \t]+/)
    word[n_words + 1] = ""
    first = 1
    for (i = 1; i <= n_words; i++) {
        program = word[i]
        sub(/^.*\//, "", program)
        if (program !~ /^(kubectl|oc|helm)$/ && !(first && program == "k")) {
            first = word[i] == ";" || (first && word[i] ~ /^([$]|sudo|time|watch|env|exec|nohup|xargs|[A-Za-z_]+=.*|-.*)$/)
            continue
        }
        first = 0
        j = past_flags(i + 1)
        verb = word[j]
        if (verb == "" || verb == ";") continue
        if (verb ~ /^(rollout|auth|config|adm|plugin)$/) { j = past_flags(j + 1); verb = verb " " word[j] }
        reads = program == "helm" ? HELM_READS : program == "oc" ? OC_READS : KUBECTL_READS
        if (verb !~ reads) problem("error", "a command that is not read only (" verb "), line " FNR)
        else if (program != "helm" && reads_secret(verb, j + 1)) problem("error", "a command that reads a secret, line " FNR)
    }
}

# reads_secret(VERB, I): whether what VERB is asked for, by the words from I on, is a credential.
function reads_secret(verb, i,   n_named, kinds, n_kinds, k) {
    for (; word[i] != "" && word[i] != ";"; i++) {
        if (verb == "config view" && word[i] ~ /^--raw/) return 1
        if (verb == "whoami" && word[i] ~ /^(-t|--show-token)/) return 1
        if (verb !~ /^(get|describe)$/) continue
        if (word[i] ~ /^--raw/ && (word[i] word[i + 1]) ~ /\/secrets/) return 1
        if (word[i] ~ /^-/) { if (word[i] ~ TAKES_VALUE) i++; continue }
        if (n_named++ && word[i] !~ /\//) continue
        n_kinds = split(tolower(word[i]), kinds, ",")
        for (k = 1; k <= n_kinds; k++) if (kinds[k] ~ /^secrets?([.\/]|$)/) return 1
    }
    return 0
}

# judge_unquoted(LINE): the cells or items of a line without backquotes that begin with a program.
function judge_unquoted(line,   cells, n_cells, i, cell) {
    n_cells = split(line, cells, "|")
    for (i = 1; i <= n_cells; i++) {
        cell = cells[i]
        sub(/^[ \t]*(([-*]|[0-9]+[.)])[ \t]+)?([0-9T:.-]+Z?[ \t]+)?/, "", cell)
        if (cell !~ /^((sudo )?([^ ]*\/)?(kubectl|oc|helm)|k|[^ ]*[a-z]+_[a-z]+\.sh)[ \t]/) continue
        listed++
        if (cell !~ /not run|refused|denied/) judge_command(cell)
    }
}

# holds_value(LINE): whether something called a password, a token and so on has a value that is no name and no mask.
function holds_value(line,   at, name, value) {
    if (tolower(line) ~ /--(kube-)?(password|token)[ \t]+[^- \t<$*\001]/) return 1
    while (at = value_at(line)) {
        line = substr(line, at)
        name = value_name
        sub(/\\?["']?[:=]$/, "", name)
        sub(/^.*[^a-z0-9_-]/, "", name)
        if (!match(line, /^[^] \t",;&\\{[`'()\001]+/)) continue
        value = substr(line, 1, RLENGTH)
        if (name ~ /(name|names|ref|file|path|type|class|mount|volume|version|count)$/ || value ~ /^[*<$%.-]/) continue
        if (value_name ~ /=$/ ? length(value) > 2 : name !~ /^(secret|credential)/ && length(value) > 5 && value ~ /[0-9]/ && value ~ /[A-Za-z]/) return 1
    }
    return 0
}

BEGIN {
    KUBECTL_READS = "^(get|describe|logs|top|events|version|api-resources|api-versions|explain|cluster-info|wait|help|rollout (history|status)|auth (can-i|whoami)|config (view|current-context|get-contexts|get-clusters|get-users)|plugin list)$"
    OC_READS = KUBECTL_READS "|^(status|whoami|projects|adm top)$"
    HELM_READS = "^(list|ls|history|status|version|search|show|help)$"
    TAKES_VALUE = "^(-[nsvolLcf]|--(namespace|context|kube-context|kubeconfig|cluster|user|as|as-group|as-uid|as-user-extra|server|token|username|password|request-timeout|v|vmodule|cache-dir|certificate-authority|client-certificate|client-key|tls-server-name|profile|profile-output|log-flush-frequency|kuberc|kube-apiserver|kube-as-user|kube-as-group|kube-ca-file|kube-token|registry-config|repository-cache|repository-config|burst-limit|qps|output|selector|field-selector|label-columns|container|sort-by|template|chunk-size|filename|tail|since|since-time|timeout|for))$"
}

{ sub(/\r$/, "") }
/^ ? ? ?(```|~~~)/ { fenced = !fenced; next }
!fenced && /^ ? ? ?##?#?#?#?#?[ \t]/ { begin_section($0); next }
{
    text = $0
    gsub(/<!--[^>]*-->/, "", text)
    if (text ~ /[A-Za-z0-9\200-\377]/) for (level in above) filled[above[level]] = 1
}

# A fact is where its number is in bold or begins the line; everywhere else FACT-n is a citation.
within("evidence") && /^[ \t]*([-*|]|[0-9]+\.)?[ \t]*(\*\*)?\[?FACT-[0-9]+/ {
    match($0, /FACT-[0-9]+/)
    number = substr($0, RSTART + 5, RLENGTH - 5) + 0
    if (number in fact) problem("error", "FACT-" number " is there twice, line " FNR)
    fact[number] = FNR
    if (number > highest) highest = number
    if ($0 !~ /`[^`]+`/) problem("error", "FACT-" number " names no source in backquotes, line " FNR)
    cut = RSTART + RLENGTH
}
{
    rest = cut ? substr($0, cut) : $0
    cut = 0
    while (match(rest, /FACT-[0-9]+( (to|-) FACT-[0-9]+)?/)) {
        cited_as = substr(rest, RSTART, RLENGTH)
        rest = substr(rest, RSTART + RLENGTH)
        split(cited_as, ends, /[^0-9]+/)
        last = ends[3] == "" ? ends[2] : ends[3]
        for (i = ends[2] + 0; i <= last + 0 && i < ends[2] + 1000; i++) if (!(i in cited)) { cited[i] = FNR; order[++n_cited] = i }
        if (within("root cause")) grounds++
    }
}
within("commands executed") {
    quoted = /`[^`]+`/ || fenced || /^[ \t]*\$ /
    if (quoted || tolower($0) ~ /^none/) listed++
    if (!quoted) judge_unquoted($0)
    else if (tolower($0) ~ /not run|refused|denied/) { }
    else if (fenced || /^[ \t]*\$ /) judge_command($0)
    else { n_parts = split($0, parts, "`"); for (i = 2; i <= n_parts; i += 2) judge_command(parts[i]) }
}
{
    text = $0
    gsub(/\*\*\*|\[redacted\]/, "\001", text)
    n_keys = n_values = 0
    masked_keys(text)
    masked_words(text)
    if (n_keys + n_values || holds_value(text)) problem("error", "something that looks like a credential, line " FNR)
}
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
