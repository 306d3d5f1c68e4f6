#!/usr/bin/env bash
# incident_triage.sh: what is broken, how far it reaches and what to ask next, from eight kubectl calls that only read.
#
#   incident_triage.sh [-n NS | -A] [--resource KIND/NAME] [--since 1h] [-o text|json] [--timeout 25s]
#                      [--context NAME] [--kubeconfig FILE]
#
# Without -n and -A it asks for all namespaces; when the cluster refuses that, for the namespace of the context.
# With -n a ninth call asks for the cluster's DNS.
# --resource puts what one object has first; --since is how old an event or a restart may be;
# --timeout bounds the whole: what has not answered by then is said to be unread.
# A refused or late call is no failure: it is listed under "Not seen". No secret is read.
#
# Exit: 0 triage printed, with symptoms or without; 2 wrong usage; 3 no pods could be read, the reason on stderr.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

options "$@"
((${#positional[@]} == 0)) || fail "\`${positional[0]}\` is no option; see --help"
asked=$namespace
[[ -n "$asked" ]] || namespace='*'

template() { printf '%s' "go-template-file=$here/templates/$1.gotmpl"; }

collect() {
    local scope=(--all-namespaces)
    [[ "$namespace" == '*' ]] || scope=(--namespace "$namespace")
    kube 1-ready get --raw '/readyz?verbose' &
    kube 2-pods get pods "${scope[@]}" --field-selector 'status.phase!=Succeeded' -o "$(template pods)" &
    kube 3-events get events "${scope[@]}" --field-selector 'type!=Normal' -o "$(template events)" &
    kube 4-nodes get nodes,namespaces -o "$(template nodes)" &
    kube 5-workloads get deployments,statefulsets,daemonsets,jobs,cronjobs,horizontalpodautoscalers "${scope[@]}" -o "$(template workloads)" &
    kube 6-objects get persistentvolumeclaims,resourcequotas,services,endpointslices,ingresses "${scope[@]}" -o "$(template objects)" &
    kube 7-routes get httproutes.gateway.networking.k8s.io,gateways.gateway.networking.k8s.io "${scope[@]}" -o "$(template routes)" &
    kube 8-use get pods.metrics.k8s.io "${scope[@]}" -o "$(template use)" &
    if [[ "$namespace" != '*' && "$namespace" != kube-system ]]; then
        kube 9-dns get pods --namespace kube-system -l k8s-app=kube-dns -o "$(template pods)" &
    fi
    wait
}

collect
reachable 2-pods
if [[ -z "$asked" && "$(fate 2-pods)" == refused ]]; then
    cp "$work/2-pods.fate" "$work/0-pods.fate"
    kube 0-context config view --minify -o 'jsonpath={..namespace}'
    read -r namespace <"$work/0-context" || true
    option --namespace "${namespace:-default}"
    collect
fi
[[ "$(fate 2-pods)" == ok ]] || fail "no pods could be read ($(fate 2-pods)): $(why 2-pods)" 3

# What a partly refused call named; a kind that was not read must not count as empty.
refused=$(cat "$work"/[1-7]-*.err | sed -n 's/^Error from server (Forbidden): \([a-z]*\).*/\1/p' | sort -u | tr '\n' ' ')
for file in 4-nodes 5-workloads 6-objects 7-routes; do
    [[ "$(fate "$file")" =~ ^(ok|refused)$ ]] ||
        refused+="$(cut -f2 "$work/$file.fate" | sed -n 's/^.* get \([^ ]*\).*/\1/p' | sed 's/\.[^,]*//g; s/,/ /g') "
done
prefix=kubectl
for word in "${globals[@]}"; do
    [[ "$word" == --request-timeout=* ]] || prefix+=" $(quoted "$word")"
done

for file in "$work"/[0-9]-*.fate; do
    fated=${file##*/}
    sed "s/^/F\t${fated%.fate}\t/" "$file"
done >"$work/fates"
echo D >"$work/dns"
# What /readyz failed at is in the error, as one quoted line.
clean <"$work/1-ready.err" | grep -o '\[-\][^\[]*' | sed 's/^/K\t/' >"$work/ready" || true
[[ -e "$work/9-dns" ]] || : >"$work/9-dns"
cat "$work"/{fates,ready,4-nodes,3-events,5-workloads,6-objects,7-routes,8-use,2-pods,dns,9-dns} |
    KUBECTL=$prefix awk -f "$here/lib.awk" -f "$here/cron.awk" -f "$here/triage.awk" -v now="$now" -v since="$since" -v scope="$namespace" \
        -v focus="$resource" -v refused=" $refused" -v output="$output" -v bold="$bold" -v end="$plain" \
        -v stamp="$(printf '%(%FT%TZ)T' "$now")"
