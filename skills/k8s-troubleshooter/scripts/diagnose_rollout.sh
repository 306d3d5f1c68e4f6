#!/usr/bin/env bash
# diagnose_rollout.sh: one Deployment, StatefulSet, DaemonSet or Argo Rollout: how far its rollout is, and what the last one changed.
#
#   diagnose_rollout.sh -n NS KIND/NAME [--context NAME] [--kubeconfig FILE] [--timeout 25s]
#
# Of a Deployment or Rollout the newest two revisions are compared field by field. Of what may hold a
# credential (variables, commands, arguments, headers of probes) only that it differs is printed.
#
# Exit: 0 printed; 2 wrong usage; 3 the API server or the workload could not be read; 4 there is no such workload.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

options "$@"
one KIND/NAME
[[ "${positional[0],,}" =~ ^(deployment|statefulset|daemonset|rollout)/[a-z0-9][-a-z0-9.]*$ ]] ||
    fail "\`${positional[0]}\` is no deployment/NAME, statefulset/NAME, daemonset/NAME or rollout/NAME"
kind=${positional[0]%%/*} kind=${kind,,} name=${positional[0]#*/}

resource=$kind owner=Deployment
if [[ "$kind" == rollout ]]; then
    resource=rollouts.argoproj.io owner=Rollout
fi

kube 1-workload get "$resource" "$name" -n "$namespace" -o "go-template-file=$here/templates/rollout.gotmpl"
wanted 1-workload "the $kind $name"
selector=$(sed -n 's/^selector\t//p' "$work/1-workload")

if [[ "$kind" == deployment || "$kind" == rollout ]]; then
    kube 2-revisions get replicasets -n "$namespace" -l "${selector%,}" -o "go-template-file=$here/templates/replicasets.gotmpl" &
fi
kube 3-pods get pods -n "$namespace" -l "${selector%,}" -o "go-template-file=$here/templates/pods.gotmpl" &
kube 4-events get events -n "$namespace" --field-selector "involvedObject.name=$name" -o "go-template-file=$here/templates/events.gotmpl" &
wait

heading "ROLLOUT $namespace/$kind/$name"
awk -f "$here/lib.awk" -f /dev/stdin "$work/1-workload" <<'AWK'
BEGIN { FS = "\t" }
$1 == "replicas" { print "  wanted " $2 ", ready " $3 ", of the newest revision " $4 }
$1 == "paused" { print "  paused: it will not move until somebody resumes it" }
$1 == "generation" && $2 != $3 { print "  generation " $2 " but the controller has seen " $3 ": the controller is behind" }
$1 == "phase" { print "  phase " $2 ($3 == "" ? "" : ": " plain($3)) }
$1 == "strategy" { print "  strategy " $2 }
$1 == "deadline" { print "  progress deadline " $2 " s" }
$1 == "c" { print "  " $2 "=" $3 " since " $6 ": " plain($4) " " plain($5) }
AWK

if [[ "$kind" == deployment || "$kind" == rollout ]]; then
    heading 'Revisions, newest first'
    if told 2-revisions; then
        awk -F'\t' -v owner="\"$owner/$name\"" '$1 == "R" && $7 == owner { gsub(/[^0-9]/, "", $3); print $3 "\t" $4 "\t" $2 "\t" $5 "\t" $6 "\t" $8 }' "$work/2-revisions" | sort -rn | head -n 6 >"$work/revisions"
        awk -F'\t' 'END { if (!NR) print "  none" } { print "  " $1 "  " $2 "  " $3 "  wanted " $4 ", ready " $5 "  " $6 }' "$work/revisions"
        heading 'What the newest revision changed'
        awk -F'\t' -f "$here/lib.awk" -f /dev/stdin "$work/revisions" "$work/2-revisions" <<'AWK'
NR == FNR { if (FNR == 1) now_is = $3; if (FNR == 2) before = $3; next }
$1 == "R" { side = $2 == now_is ? "new" : $2 == before ? "old" : "" }
$1 == "x" && side != "" { if (!($3 in fields)) { fields[$3] = $2; list[++n] = $3 } value[side, $3] = $4 }
END {
    if (before == "") { print "  there are no two revisions to compare"; exit }
    for (i = 1; i <= n; i++) {
        f = list[i]
        if (value["old", f] == value["new", f]) continue
        base = f
        if (sub(/ in full$/, "", base) && value["old", base] != value["new", base]) continue
        changed++
        if (fields[f] == "hidden") print "  " f ": " (!(("old", f) in value) ? "added" : !(("new", f) in value) ? "removed" : "changed") " (value not shown)"
        else print "  " f ": " (("old", f) in value ? plain(value["old", f]) : "none") " -> " (("new", f) in value ? plain(value["new", f]) : "none")
    }
    if (!changed) print "  nothing of what is compared: containers, resources, probes, variables, volumes"
}
AWK
    fi
fi

heading 'Pods'
told 3-pods && awk -f "$here/lib.awk" -f /dev/stdin -v now="$now" "$work/3-pods" <<'AWK'
BEGIN { FS = "\t" }
function tell() { if (pod != "" && n++ < 15) print "  " pod "  " phase "  " node "  age " aged said }
$1 == "P" { tell(); pod = $3; phase = $4; node = $5 == "" ? "no node" : $5; aged = age(now - epoch($6)); said = $8 == "" ? "" : "  being deleted since " $8 }
$1 == "c" && $2 == "PodScheduled" && $3 == "False" { said = said "  not scheduled: " clip(plain($5), 160) }
$1 == "C" { said = said "  " $3 ": " ($4 == "true" ? "ready" : $6 " " plain($7)) ", restarts " $5 ($12 == "" ? "" : ", before: " plain($11) " exit " $12) }
END { tell(); if (n > 15) print "  ... " n - 15 " more"; if (!n) print "  none" }
AWK

events 4-events
commands
