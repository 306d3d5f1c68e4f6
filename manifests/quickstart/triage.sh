#!/usr/bin/env bash
# Triage of a recorded crash loop: reads the files of the recording, writes one report, changes nothing else.
set -euo pipefail
export LC_ALL=C

report="${RUNNER_OUTPUT:?}/investigation.md"
cd "${RUNNER_INCIDENT:?}"

stop() { printf 'triage: %s\n' "$1" >&2; exit 1; }
say() { printf '%-9s %s\n' "$1" "$2"; }

# json FILE FIELD: a value of a JSON file that holds one field a line.
json() { sed -n "/^ *\"$2\": /{s/^[^:]*: \"\{0,1\}//;s/\"\{0,1\},\{0,1\}\$//p;q}" "$1"; }
# where FILE TEXT: FILE:LINE of the first line that holds TEXT.
where() { awk -v text="$2" 'index($0, text) { print FILENAME ":" NR; exit }' "$1"; }
# limit FILE: the memory limit in a revision of the rollout history, as written, and where.
limit() { awk '/Limits:/ { on = 1 } /Requests:/ { on = 0 } on && $1 == "memory:" { print $2, FILENAME ":" NR; exit }' "$1"; }
# mib QUANTITY: a Kubernetes quantity in MiB.
mib() { awk -v q="$1" 'BEGIN { print int(q ~ /Gi$/ ? q * 1024 : q ~ /Mi$/ ? q : q / 1048576) }'; }

facts=()
fact() { facts+=("- **FACT-$((${#facts[@]} + 1))** $1 (\`$2\`)"); }

cluster=$(json incident.json cluster)
namespace=$(json incident.json namespace)
name=$(json incident.json name)
say incident "$(json incident.json faultType) of $name, namespace $namespace, cluster $cluster"

# One line a pod: name, state, restarts, reason and exit code of the last end (- for none), line of that reason.
pods=$(awk '
    /^Name:/                     { pod = $2; reason = code = at = "-" }
    /^    State:/                { state = $2; ended = 0 }
    /^    Last State:/           { ended = 1 }
    /^      Reason:/ && ended    { reason = $2; at = NR }
    /^      Exit Code:/ && ended { code = $3 }
    /^    Restart Count:/        { print pod, state, $3, reason, code, at }
' kubectl/describe-pods.txt)
killed=$(awk '$4 == "OOMKilled" && $5 == 137' <<<"$pods")
[[ -n "$killed" ]] || stop "the evidence does not show a memory kill: no pod of $name ended OOMKilled with exit code 137"
total=$(wc -l <<<"$pods")
hit=$(wc -l <<<"$killed")
ends=$(awk '{ n += $3 + ($2 == "Waiting") } END { print n }' <<<"$pods")
looping=$(awk '$3 == "CrashLoopBackOff"' kubectl/pods.txt | wc -l)
say pods "$hit of $total were OOMKilled (exit code 137); $looping in CrashLoopBackOff now"

read -r kills first last kernel_lines <<<"$(awk '
    /Memory cgroup out of memory/ { if (!n++) { first = $1; from = NR } last = $1; to = NR }
    END { print n + 0, first, last, from "-" to }
' kubectl/node-events.txt)"
[[ "$kills" -gt 0 ]] || stop "the evidence does not show a memory kill: the nodes report none"
say kernel "$kills kills, ${first:11:8} to ${last:11:8} UTC; the pods count $ends ends"

revision=$(awk -F'"' '/deployment.kubernetes.io\/revision:/ { print $2; exit }' kubectl/deployment.yaml)
previous=$(awk -v now="$revision" '$1 == now { print before; exit } { before = $1 }' kubectl/rollout-history.txt)
read -r old old_at <<<"$(limit "kubectl/rollout-$previous.txt")"
read -r new new_at <<<"$(limit "kubectl/rollout-$revision.txt")"
read -r created created_at <<<"$(awk -v now="$revision" '$2 == now { print $3, FILENAME ":" NR }' kubectl/replicasets.txt)"
since=$(awk -v then="$previous" '$2 == then { print $3 }' kubectl/replicasets.txt)
cause=$(awk -v now="$revision" '$1 == now { sub(/^[^ ]+ +/, ""); print }' kubectl/rollout-history.txt)
say rollout "$revision at ${created:11:8} UTC: memory limit $old -> $new ($cause)"
template() { grep -vE '^#|revision #|pod-template-hash|change-cause' "kubectl/rollout-$1.txt"; }
changed=$(diff <(template "$previous") <(template "$revision") | grep -c '^>' || true)

ready=$(awk '/readyReplicas:/ { print $2; exit }' kubectl/deployment.yaml)
wanted=$(awk '/^  replicas:/ { print $2; exit }' kubectl/deployment.yaml)
cache=$(awk '/CART_CACHE_MAX_MIB:/ { print $2; exit }' "kubectl/rollout-$revision.txt")
heap=$(sed -n 's/.*"heap_mib":\([0-9]*\).*/\1/p' kubectl/logs-previous.txt | tail -n 1)
heap_line=$(grep -n heap_mib kubectl/logs-previous.txt | tail -n 1 | cut -d: -f1)
errors=$(grep -cE '"level":"(error|fatal)"|panic' kubectl/logs-previous.txt || true)

fact "$hit of $total pods last ended OOMKilled, exit code 137: $(awk '{ print $1 }' <<<"$killed" | paste -sd, | sed 's/,/, /g')" \
    "kubectl/describe-pods.txt:$(awk '{ print $6 }' <<<"$killed" | paste -sd,)"
fact "The kernel killed a container $kills times, first at ${first:11:8}, last at ${last:11:8} UTC" \
    "kubectl/node-events.txt:$kernel_lines"
fact "The pods count $ends ends of a container: the restarts, and one for each pod that waits now" \
    "kubectl/pods.txt:3-$((total + 2))"
fact "Revision $revision was rolled out at ${created:11:8} UTC: \"$cause\"" "$created_at"
fact "Revision $previous, rolled out on ${since:0:10}, had a memory limit of $old" "$old_at"
fact "Revision $revision has a memory limit of $new; lines of the pod template that changed: $changed" "$new_at"
fact "The cart cache may take $cache MiB" "$(where "kubectl/rollout-$revision.txt" CART_CACHE_MAX_MIB)"
fact "A killed container last reported a heap of $heap MiB; errors in its log: $errors" "kubectl/logs-previous.txt:$heap_line"
fact "$ready of $wanted replicas are ready" "$(where kubectl/deployment.yaml readyReplicas)"
while read -r pod _ memory; do
    fact "$pod runs with $memory of $new" "$(where kubectl/top-pods.txt "$pod")"
done < <(tail -n +3 kubectl/top-pods.txt)
used=$(tail -n +3 kubectl/top-pods.txt | awk '{ print $3 }' | sort -n | sed -n '1p;$p' | paste -sd- | sed 's/-/ to /')

unchecked=()
for right in configmaps secrets nodes; do
    [[ "$(json incident_cluster_permissions.json "can_get_$right")" == true ]] ||
        unchecked+=("- $right: no right to read them (\`$(where incident_cluster_permissions.json "can_get_$right")\`)")
done
[[ "$kills" == "$ends" ]] || unchecked+=("- $kills kernel kills against $ends container ends: the others may have another cause")
unchecked+=(
    "- Logs of one container only; the others were not recorded"
    "- Why $((total - hit)) of $total pods have not been killed yet; traffic per pod was not recorded"
    "- What customers saw: no metrics of requests in the recording"
)

if [[ "$(mib "$new")" -lt "$(mib "$old")" && "$created" < "$first" ]]; then
    headline="Rollout $revision cut the memory limit $old -> $new at ${created:11:5}; OOMKilled from ${first:11:5}."
    reason="Rollout $revision lowered the memory limit from $old to $new [FACT-4, FACT-5, FACT-6]. The cart cache alone may take
$cache MiB [FACT-7]; the heap grows until it meets the limit [FACT-8], and the kernel kills the container [FACT-1, FACT-2]."
    [[ "$changed" != 1 ]] || reason+="
Nothing else in the pod template changed [FACT-6]: the same image had $old since ${since:0:10} [FACT-5]."
    next="1. Restore $old: \`kubectl -n $namespace rollout undo deployment/$name --to-revision=$previous\` (not run: read only)
2. Watch it: \`kubectl -n $namespace rollout status deployment/$name\`; restarts must stay at 0 for 10 minutes
3. Revert \"$cause\" at its source, or the next deploy brings it back
4. Then choose: a limit above the cache ($cache MiB) and the rest of the heap, or a smaller CART_CACHE_MAX_MIB"
else
    headline="$name is OOMKilled from ${first:11:5}; rollout $revision ($old -> $new at ${created:11:5}) does not explain it."
    reason="The containers are killed for memory [FACT-1, FACT-2], but the last rollout did not lower the limit before
the first kill [FACT-2, FACT-4, FACT-5, FACT-6]. Look for growth in the program or its traffic [FACT-8]."
    next="1. Compare memory and traffic before and after ${first:11:5} UTC
2. A higher limit buys time: \`kubectl -n $namespace set resources deployment/$name --limits=memory=...\` (not run: read only)"
fi

{
    printf '# %s: %s\n\n' "$name in $namespace ($cluster)" "$(json incident.json faultType)"
    printf '## Summary\n\n**%s**\n' "$headline"
    printf '%s of %s pods affected, %s in CrashLoopBackOff now, %s kills so far. ' "$hit" "$total" "$looping" "$kills"
    printf 'Times are UTC, %s; recorded at %s.\n\n' "${created:0:10}" "$(sed '1s/^# .*T\(.*\)Z .*/\1/;q' kubectl/pods.txt)"
    printf '## Root Cause\n\n%s\n\n' "$reason"
    printf '## Evidence\n\n'
    printf '%s\n' "${facts[@]}"
    printf '\n## Commands Executed\n\nNone against the cluster in this run: it read what these had printed.\n\n'
    # shellcheck disable=SC2016  # the backquotes are Markdown
    sed -n '1s/^# .*T\(.*\)Z \$ \(.*\)$/- \1 `\2`/p' -s kubectl/* | sort
    printf '\n## Impact\n\n- %s of %s replicas are ready [FACT-9]\n' "$ready" "$wanted"
    printf -- '- The pods that run use %s of %s [FACT-10 to FACT-%s]: expect more kills\n\n' "$used" "$new" "${#facts[@]}"
    printf '## Next Steps\n\n%s\n\n' "$next"
    printf '## Unchecked\n\n'
    printf '%s\n' "${unchecked[@]}"
} >"$report"
say report "$report"
printf '%s\n' "$headline"   # the last line is what the run's report shows of the agent
