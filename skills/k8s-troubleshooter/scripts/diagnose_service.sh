#!/usr/bin/env bash
# diagnose_service.sh: one service, hop by hop: selector, pods, readiness, ports, endpoints, network policies, ingresses.
#
#   diagnose_service.sh -n NS SERVICE [--context NAME] [--kubeconfig FILE] [--timeout 25s]
#
# It reads objects only: whether a packet gets through has to be asked from a client's side.
#
# Exit: 0 printed; 2 wrong usage; 3 the API server or the service could not be read; 4 there is no such service.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

options "$@"
one SERVICE
service=${positional[0]}

kube 1-service get service "$service" -n "$namespace" -o "go-template-file=$here/templates/service.gotmpl"
wanted 1-service "the service $service"
selector=$(sed -n 's/^selector\t//p' "$work/1-service")

if [[ -n "$selector" ]]; then
    kube 2-pods get pods -n "$namespace" -l "${selector%,}" -o "go-template-file=$here/templates/ports.gotmpl" &
fi
kube 3-slices get endpointslices -n "$namespace" -l "kubernetes.io/service-name=$service" -o "go-template-file=$here/templates/slices.gotmpl" &
kube 4-policies get networkpolicies -n "$namespace" -o "go-template-file=$here/templates/policies.gotmpl" &
kube 5-dns get pods -n kube-system -l k8s-app=kube-dns -o "go-template-file=$here/templates/pods.gotmpl" &
wait

heading "SERVICE $namespace/$service"
sed 's/^/  /; s/\t/ /g; s/,$//' "$work/1-service"
[[ -n "$selector" ]] || echo '  no selector: somebody else must write its endpoints'

heading 'Pods of the selector'
if [[ -n "$selector" ]]; then
    if told 2-pods; then
        awk -F'\t' -f /dev/stdin "$work/1-service" "$work/2-pods" <<'AWK'
NR == FNR { if ($1 == "port") { port = $0; sub(/^port\t[^\t]*\t/, "", port); target[++n] = $3 } next }
$1 == "P" { pods++; ready += $4 == "True"; if (pods <= 15) print "  " $2 "  ready " ($4 == "" ? "unknown" : $4) "  phase " $3 }
$1 == "O" { open[$2] = 1; if ($3 != "") open[$3] = 1; declared = declared " " ($3 == "" ? "" : $3 ":") $2 }
END {
    if (!pods) { print "  none: the selector matches no pod in this namespace; compare with kubectl get pods --show-labels"; exit }
    print "  " ready + 0 " of " pods " ready"
    for (i = 1; i <= n; i++) if (!(target[i] in open)) {
        if (target[i] ~ /^[0-9]+$/) print "  targetPort " target[i] " is declared by no container (declared:" (declared == "" ? " none" : declared) "): legal, but check what the program listens on"
        else print "  targetPort " target[i] " is the name of no container port: the service can have no endpoint for it"
    }
}
AWK
    fi
fi

heading 'Endpoints'
if told 3-slices; then
    awk -F'\t' '$1 == "e" { n++; ready += $3 != "false"; if (n <= 15) print "  " $2 "  ready " ($3 == "" ? "true" : $3) "  " $4 }
        END { print "  " ready + 0 " of " n + 0 " ready" }' "$work/3-slices"
fi

heading 'Network policies of the namespace'
if told 4-policies; then
    awk 'NR <= 20 { print "  " $0 } END { print NR ? "  " NR " in all: what a policy selects is denied the rest of that direction" : "  none: nothing is denied here" }' "$work/4-policies"
fi

heading 'Cluster DNS'
if told 5-dns; then
    awk -F'\t' '$1 == "P" { n++ } $1 == "C" { ready += $4 == "true" }
        END { print n ? "  " ready + 0 " of " n " pods labelled k8s-app=kube-dns are ready" : "  no pod is labelled k8s-app=kube-dns: find what serves the service kube-dns" }' "$work/5-dns"
fi
commands
