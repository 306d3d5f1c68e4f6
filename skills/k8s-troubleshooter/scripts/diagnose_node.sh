#!/usr/bin/env bash
# diagnose_node.sh: one node: its conditions, what runs on it, what is wrong with that, and whether other nodes share it.
#
#   diagnose_node.sh NODE [--context NAME] [--kubeconfig FILE] [--timeout 25s]
#
# Exit: 0 printed; 2 wrong usage; 3 the API server or the node could not be read; 4 there is no such node.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

options "$@"
((${#positional[@]} == 1)) || fail "wanted: NODE; see --help"
node=${positional[0]}

kube 1-nodes get nodes -o "go-template-file=$here/templates/nodes.gotmpl" &
kube 2-describe describe node "$node" &
kube 3-pods get pods --all-namespaces --field-selector "spec.nodeName=$node" -o "go-template-file=$here/templates/pods.gotmpl" &
kube 4-top top node "$node" &
wait
wanted 1-nodes "the nodes"
grep -q "^N	$node	" "$work/1-nodes" || fail "there is no node $node: kubectl get nodes" 4

heading "NODE $node, and the others"
awk -f "$here/lib.awk" -f /dev/stdin -v want="$node" -v now="$now" "$work/1-nodes" <<'AWK'
BEGIN { FS = "\t" }
$1 == "N" { name = $2; n++; if ($2 == want) print "  " ($4 == "" ? "schedulable" : $4) ", kubelet " $5 ", age " age(now - epoch($3)) ", allocatable " $6 " CPU, " $7 " memory, " $8 " pods" }
$1 == "c" && unwell($2, $3) {
    if (name == want) print "  " $2 "=" $3 " since " $6 " (" age(now - epoch($6)) "): " plain($4) " " plain($5)
    else others = others "\n    " name "  " $2 "=" $3 " since " $6
}
END { print "  others of " n " nodes that are unwell:" (others == "" ? " none" : others) }
AWK

heading 'Taints, requests against what it has, events'
if told 2-describe; then
    awk '/^Taints:/ { on = 1 } /^Unschedulable:/ { on = 0 } /^Lease:/ { on = 1 } /^Conditions:/ { on = 0 }
        /^Allocated resources:/ { on = 1 } on { print "  " substr($0, 1, 300) }' "$work/2-describe" | head -n 45
fi

heading 'Use now'
body 4-top

heading 'Pods on it that are unwell'
told 3-pods && awk -f "$here/lib.awk" -f /dev/stdin "$work/3-pods" <<'AWK'
BEGIN { FS = "\t" }
$1 == "P" { pods++; pod = $2 "/" $3; phase = $4; if ($9 != "" || $8 != "") say(($8 == "" ? "" : "being deleted since " $8 " ") plain($9) " " plain($10)) }
$1 == "C" && ($4 != "true" || $12 == 137) && phase != "Succeeded" { say("container " $3 " " $6 " " plain($7) ", restarts " $5 ($12 == "" ? "" : ", before: " plain($11) " exit " $12)) }
$1 == "L" && $3 == "" && $7 != "init" { unlimited++ }
function say(text) { if (n++ < 25) print "  " pod ": " clip(text, 200) }
END { if (n > 25) print "  ... " n - 25 " more"; print "  " pods + 0 " pods in all; " unlimited + 0 " containers without a memory limit" }
AWK
commands
