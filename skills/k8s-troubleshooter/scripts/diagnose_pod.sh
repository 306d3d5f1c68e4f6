#!/usr/bin/env bash
# diagnose_pod.sh: one pod: why it is not running or not ready, with the log of the run that died.
#
#   diagnose_pod.sh -n NS POD [--context NAME] [--kubeconfig FILE] [--timeout 25s]
#
# Reads the pod, its events, its node, the logs of each container that is or was unwell. Values that look like
# credentials are masked.
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

kube 2-describe describe pod "$pod" -n "$namespace" --show-events=false &
kube 3-events get events -n "$namespace" --field-selector "involvedObject.name=$pod" -o "go-template-file=$here/templates/events.gotmpl" &
if [[ -n "$node" ]]; then
    kube 4-node get nodes --field-selector "metadata.name=$node" -o "go-template-file=$here/templates/nodes.gotmpl" &
fi
# The run that died has the answer more often than the one that lives; a container that never ran has no log.
n=5
while IFS=$'\t' read -r name state previous; do
    [[ -z "$previous" ]] || kube "$n-log-$name-previous" logs "$pod" -n "$namespace" -c "$name" --previous --tail=40 &
    [[ "$state" == waiting ]] || kube "$((n + 1))-log-$name" logs "$pod" -n "$namespace" -c "$name" --tail=40 &
    n=$((n + 2))
done < <(awk -F'\t' '$1 == "C" && ($4 != "true" || $12 != "") && n++ < 4 { print $3 "\t" $6 "\t" $12 }' "$work/1-pod")
wait

heading "POD $namespace/$pod"
awk -f "$here/lib.awk" -f /dev/stdin -v now="$now" "$work/1-pod" <<'AWK'
BEGIN { FS = "\t" }
$1 == "P" {
    print "  phase " $4 ", " (workload($7, $3) == "Pod/" $3 ? "no owner: nothing will replace it" : "of " workload($7, $3)) ", node " ($5 == "" ? "none" : $5) ", age " age(now - epoch($6))
    if ($8 != "") print "  being deleted since " $8
    if ($9 != "") print "  " plain($9) ": " plain($10)
}
$1 == "c" && $3 != "True" { print "  condition " $2 "=" $3 " " plain($4) " " plain($5) }
$1 == "L" { limits[$2] = "  memory limit " ($3 == "" ? "none" : $3) ", request " ($4 == "" ? "none" : $4) ", cpu request " ($5 == "" ? "none" : $5) }
$1 == "C" { containers[++n] = $0 }
END {
    for (i = 1; i <= n; i++) {
        split(containers[i], c, "\t")
        print "  " c[2] " container " c[3] ": " c[6] " " plain(c[7]) (c[8] == "" ? "" : ", exit " c[8] " (" meaning(c[8]) ")") ", ready " c[4] ", restarts " c[5]
        if (c[9] != "") print "      says: " clip(plain(c[9]), 400)
        if (c[12] != "") print "      before: " plain(c[11]) ", exit " c[12] " (" meaning(c[12]) "), ended " c[13]
        print "      image " c[14]
        if (c[3] in limits) print "    " limits[c[3]]
    }
}
AWK

heading 'Probes, volumes and what it wants of a node'
if told 2-describe; then
    awk '/^    (Liveness|Readiness|Startup):/ || /^Node-Selectors:/ { sub(/exec \[.*\]/, "exec [...]"); print "  " $0; next }
        /^Volumes:|^Tolerations:/ { on = 1 } /^[A-Z][A-Za-z ]*:/ && !/^(Volumes|Tolerations):/ { on = 0 }
        on && /(Type|ClaimName|Name|SecretName|Optional):|^  [a-z]|^Volumes|^Tolerations/ { print "  " $0 }' "$work/2-describe" | head -n 50
fi

events 3-events

if [[ -n "$node" ]]; then
    heading "Node $node"
    if told 4-node; then
        awk -f "$here/lib.awk" -f /dev/stdin "$work/4-node" <<'AWK'
BEGIN { FS = "\t" }
$1 == "N" { print "  " ($4 == "" ? "schedulable" : $4) ", kubelet " $5 ", allocatable " $6 " CPU, " $7 " memory" }
$1 == "c" && (($2 == "Ready") != ($3 == "True")) { bad = 1; print "  " $2 "=" $3 " since " $6 ": " plain($4) " " plain($5) }
END { if (!bad) print "  Ready, no pressure" }
AWK
    fi
fi

for file in "$work"/*-log-*.fate; do
    [[ -e "$file" ]] || continue
    file=${file##*/} file=${file%.fate}
    heading "Log ${file#*-log-} (last 40 lines)"
    body "$file"
done
commands
