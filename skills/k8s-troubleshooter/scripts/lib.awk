# Functions for awk programs here. Plain awk: mawk, gawk and busybox run it.

# plain(Q): the text that Go's %q quoted, on one line; escapes that are no text become a blank.
function plain(q) {
    if (q !~ /^".*"$/) return q
    q = substr(q, 2, length(q) - 2)
    gsub(/\\\\/, "\001", q)
    gsub(/\\"/, "\"", q)
    gsub(/\\x1b\[[0-9;?]*[A-Za-z]/, "", q)
    gsub(/\\[abfnrtv]/, " ", q)
    gsub(/\\(x[0-9a-f][0-9a-f]|u[0-9a-f][0-9a-f][0-9a-f][0-9a-f])/, " ", q)
    gsub(/\001/, "\\", q)
    gsub(/  +/, " ", q)
    return q
}

function clip(text, most) { return length(text) > most ? substr(text, 1, most - 3) "..." : text }

function json(text) {
    gsub(/\\/, "\\\\", text)
    gsub(/"/, "\\\"", text)
    gsub(/[\001-\037]/, " ", text)
    return "\"" text "\""
}

# epoch(T): seconds since 1970 of 2026-11-21T02:51:08Z; 0 when there is no time.
function epoch(t,   y, m, d) {
    if (t !~ /^[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]T/) return 0
    y = substr(t, 1, 4) + 0; m = substr(t, 6, 2) + 0; d = substr(t, 9, 2) + 0
    if (m < 3) { y--; m += 12 }
    d += 365 * y + int(y / 4) - int(y / 100) + int(y / 400) + int((153 * (m - 3) + 2) / 5) - 719469
    return d * 86400 + substr(t, 12, 2) * 3600 + substr(t, 15, 2) * 60 + substr(t, 18, 2)
}

function age(seconds) {
    if (seconds < 120) return int(seconds) "s"
    if (seconds < 7200) return int(seconds / 60) "m"
    if (seconds < 172800) return int(seconds / 3600) "h"
    return int(seconds / 86400) "d"
}

# quantity(Q): a Kubernetes quantity as a number.
function quantity(q,   n, unit) {
    n = q + 0
    unit = q
    sub(/^[0-9.]+/, "", unit)
    if (unit == "n") return n / 1000000000
    if (unit == "u") return n / 1000000
    if (unit == "m") return n / 1000
    if (unit == "k") return n * 1000
    if (unit == "M") return n * 1000000
    if (unit == "G") return n * 1000000000
    if (unit == "T") return n * 1000000000000
    if (unit == "Ki") return n * 1024
    if (unit == "Mi") return n * 1048576
    if (unit == "Gi") return n * 1073741824
    if (unit == "Ti") return n * 1099511627776
    return n
}

# meaning(CODE): what an exit code usually says.
function meaning(code) {
    if (code == 0) return "ended by itself"
    if (code == 1) return "the program's own error"
    if (code == 126) return "command found but not executable"
    if (code == 127) return "command not found in the image"
    if (code == 128) return "could not start"
    if (code == 134) return "SIGABRT"
    if (code == 137) return "SIGKILL"
    if (code == 139) return "SIGSEGV"
    if (code == 143) return "SIGTERM"
    return "the program's own code"
}

# name_of(Q): a name that somebody may have written freely, without what a shell would take for more than a name.
function name_of(q) {
    q = plain(q)
    gsub(/[^A-Za-z0-9.:_\/-]/, "_", q)
    return q
}

# workload(OWNER, POD, KIND): Deployment/checkout of ReplicaSet/checkout-7c9d64bf5b, or the KIND that has it instead; a
# pod without owner is its own.
function workload(owner, pod, kind) {
    owner = name_of(owner)
    if (owner == "") return "Pod/" pod
    if (owner ~ /^ReplicaSet\/.*-[0-9a-z]+$/) { sub(/^ReplicaSet/, kind == "" ? "Deployment" : kind, owner); sub(/-[0-9a-z]+$/, "", owner) }
    return owner
}

# unwell(TYPE, STATUS): whether a node's condition says that something is wrong. Of the kubelet's own all but Ready are
# so when True; of those that others add, the name says which.
function unwell(type, status) {
    if (type == "Ready") return status != "True"
    if (type ~ /(Ready|Healthy)$/ && type !~ /(Not|Un)(Ready|Healthy|healthy)$/) return status == "False"
    return status == "True" && type ~ /Pressure$|Unavailable$|Deadlock|Read[Oo]nly|^Frequent|Corrupt|Problem|Shutdown|Fatal|Error|Fail|Hung|Unhealthy$|NotReady$|EventScheduled$/
}
