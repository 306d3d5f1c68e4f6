#!/usr/bin/env bash
# diagnose_pod.sh: one pod: why it is not running or not ready, with the log of the run that died.
#
#   diagnose_pod.sh -n NS POD [--context NAME] [--kubeconfig FILE] [--timeout 25s]
#
# Reads the pod, its events, its node, what it uses now, and the logs of four containers that are or were unwell, those
# before all that run; of the others it says that they were not read. Values that look like credentials are masked.
#
# Exit: 0 printed; 2 wrong usage; 3 the API server or the pod could not be read; 4 there is no such pod.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

options "$@"
one POD
pod=${positional[0]}

kube 1-pod get pods -n "$namespace" --field-selector "metadata.name=$pod" -o "go-template-file=$here/templates/pods.gotmpl"
wanted 1-pod "the pod $pod"
grep -q '^P' "$work/1-pod" || fail "there is no pod $pod in $namespace; it may have been replaced: kubectl -n $namespace get pods" 4
node=$(awk -F'\t' '$1 == "P" { print $5 }' "$work/1-pod")

kube 2-spec get pods -n "$namespace" --field-selector "metadata.name=$pod" -o "go-template-file=$here/templates/podspec.gotmpl" &
kube 3-events get events -n "$namespace" --field-selector "involvedObject.name=$pod" -o "go-template-file=$here/templates/events.gotmpl" &
if [[ -n "$node" ]]; then
    kube 4-node get nodes --field-selector "metadata.name=$node" -o "go-template-file=$here/templates/nodes.gotmpl" &
fi
kube 3-use get pods.metrics.k8s.io "$pod" -n "$namespace" -o "go-template-file=$here/templates/use.gotmpl" &
# The run that died has the answer more often than the one that lives; a container that never ran has no log.
n=5
awk -f "$here/lib.awk" -f /dev/stdin -v now="$now" "$work/1-pod" >"$work/unwell" <<'AWK'
BEGIN { FS = "\t" }
$1 == "A" { sidecar[$2] = 1 }
$1 == "C" { line[++n] = $2 "\t" $3 "\t" $6 "\t" $12 "\t" ($4 == "true"); kind[n] = $2; name[n] = $3; state[n] = $6 " " $8; died[n] = $12 != ""; ready[n] = $4 == "true" }
END {
    # An init container that has ended well is done; one that runs on is what the others wait for.
    for (i = 1; i <= n; i++) if (kind[i] == "init" && state[i] != "terminated 0" && (!(name[i] in sidecar) || !ready[i] || died[i])) print line[i]
    for (i = 1; i <= n; i++) if (kind[i] != "init" && (!ready[i] || died[i])) print line[i]
}
AWK
while IFS=$'\037' read -r name state previous; do
    [[ -z "$previous" ]] || kube "$n-log-$name-previous" logs "$pod" -n "$namespace" -c "$name" --previous --tail=40 &
    [[ "$state" == waiting ]] || kube "$((n + 1))-log-$name" logs "$pod" -n "$namespace" -c "$name" --tail=40 &
    n=$((n + 2))
done < <(awk -F'\t' 'NR <= 4 { print $2 "\037" $3 "\037" $4 }' "$work/unwell")
wait

heading "POD $namespace/$pod"
awk -f "$here/lib.awk" -f /dev/stdin -v now="$now" "$work/3-use" "$work/1-pod" <<'AWK'
BEGIN { FS = "\t" }
$1 == "U" { uses[$4] = "uses now " int(quantity($5) * 1000 + 0.5) "m CPU, " int(quantity($6) / 1048576) "Mi"; cpu[$4] = quantity($5) }
$1 == "P" {
    of = workload($7, $3, $11)
    print "  phase " $4 ", " (of == "Pod/" $3 ? "no owner: nothing will replace it" : "of " of) ", node " ($5 == "" ? "none" : $5) ", age " age(now - epoch($6))
    if ($8 != "") print "  being deleted since " $8
    if ($9 != "") print "  " plain($9) ": " plain($10)
}
$1 == "c" && $3 != "True" { print "  condition " $2 "=" $3 " " plain($4) " " plain($5) }
$1 == "L" { limits[$2] = "  memory limit " ($3 == "" ? "none" : $3) ", request " ($4 == "" ? "none" : $4) ", cpu request " ($5 == "" ? "none" : $5) ", cpu limit " ($6 == "" ? "none" : $6); most[$2] = quantity($6) }
$1 == "A" { sidecar[$2] = 1 }
$1 == "C" { containers[++n] = $0 }
END {
    for (i = 1; i <= n; i++) {
        split(containers[i], c, "\t")
        print "  " (c[3] in sidecar ? "sidecar" : c[2]) " container " c[3] ": " c[6] " " plain(c[7]) (c[8] == "" ? "" : ", exit " c[8] " (" meaning(c[8]) ")") ", ready " c[4] ", restarts " c[5]
        if (c[9] != "") print "      says: " clip(plain(c[9]), 400)
        if (c[12] != "") print "      before: " plain(c[11]) ", exit " c[12] " (" meaning(c[12]) "), ended " c[13]
        if (c[6] == "running") print "      since " c[10] " (" age(now - epoch(c[10])) ")" (c[2] == "init" && !(c[3] in sidecar) ? ": the pod waits for it to end" : "")
        print "      image " plain(c[14])
        if (c[3] in limits) print "    " limits[c[3]]
        if (c[3] in uses) print "      " uses[c[3]] (most[c[3]] > 0 && cpu[c[3]] >= 0.95 * most[c[3]] ? ": at its CPU limit, so it is throttled" : "")
    }
}
AWK

[[ "$(fate 3-use)" == ok ]] || echo "  use of CPU and memory: not read ($(fate 3-use))"

heading 'Probes, volumes and what it wants of a node'
body 2-spec 50

events 3-events

if [[ -n "$node" ]]; then
    heading "Node $node"
    if told 4-node; then
        awk -f "$here/lib.awk" -f /dev/stdin "$work/4-node" <<'AWK'
BEGIN { FS = "\t" }
$1 == "N" { print "  " ($4 == "" ? "schedulable" : $4) ", kubelet " $5 ", allocatable " $6 " CPU, " $7 " memory" }
$1 == "c" && unwell($2, $3) { bad = 1; print "  " $2 "=" $3 " since " $6 ": " plain($4) " " plain($5) }
$1 == "N" { found = 1 }
END { if (!found) print "  there is no such node any more"; else if (!bad) print "  Ready, no pressure" }
AWK
    fi
fi

for file in "$work"/*-log-*.fate; do
    [[ -e "$file" ]] || continue
    file=${file##*/} file=${file%.fate}
    heading "Log ${file#*-log-} (last 40 lines)"
    body "$file"
done
awk -F'\t' 'NR > 4 { names = names " " $2; n++ } END { if (n) print "\nLogs not read: of " n " more containers that are or were unwell:" names }' "$work/unwell"
commands
