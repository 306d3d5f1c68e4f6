#!/usr/bin/env bash
# diagnose_storage.sh: one claim: its class, its volume, where that is attached, which pods want it, what failed.
#
#   diagnose_storage.sh -n NS CLAIM [--context NAME] [--kubeconfig FILE] [--timeout 25s]
#
# Exit: 0 printed; 2 wrong usage; 3 the API server or the claim could not be read; 4 there is no such claim.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

options "$@"
one CLAIM
claim=${positional[0]}

template() { printf '%s' "go-template-file=$here/templates/$1.gotmpl"; }

kube 1-claim get persistentvolumeclaim "$claim" -n "$namespace" -o "$(template claim)" &
kube 2-classes get storageclasses -o "$(template classes)" &
kube 3-volumes get persistentvolumes -o "$(template volumes)" &
kube 4-attachments get volumeattachments -o "$(template attachments)" &
kube 5-users get pods -n "$namespace" -o "$(template users)" &
kube 6-events get events -n "$namespace" --field-selector "involvedObject.name=$claim" -o "$(template events)" &
wait
wanted 1-claim "the claim $claim"
IFS=$'\037' read -r class volume < <(awk -F'\t' '$1 == "claim" { print $4 "\037" $5 }' "$work/1-claim")

heading "CLAIM $namespace/$claim"
awk -f "$here/lib.awk" -f /dev/stdin -v now="$now" "$work/1-claim" <<'AWK'
BEGIN { FS = "\t" }
$1 == "claim" { print "  " $3 ", class " ($4 == "" ? "none: the default class, if there is one" : $4) ", wants " $7 " " $6 ", has " ($8 == "" ? "nothing" : $8) ", volume " ($5 == "" ? "none" : $5) ", age " age(now - epoch($9)) }
$1 == "c" { print "  " $2 "=" $3 " " plain($4) " " plain($5) }
AWK

heading 'Storage classes'
if told 2-classes; then
    body 2-classes
    awk -F'\t' -v class="$class" '$1 == class { found = 1; if ($3 == "WaitForFirstConsumer") print "  => waits for its first pod: Pending without a pod that uses it is healthy" }
        $4 == "default" { any = 1 }
        END { if (class != "" && !found) print "  => the class " class " does not exist"; if (class == "" && !any) print "  => no class is the default" }' "$work/2-classes"
fi

heading 'Its volume, and where it is attached'
for file in 3-volumes 4-attachments; do
    if told "$file" && [[ -n "$volume" ]]; then
        awk -F'\t' -v volume="$volume" -v what="${file#*-}" '$1 == volume { print "  " $0; n++ } END { if (!n) print "  " what ": none for " volume }' "$work/$file"
    fi
done
[[ -n "$volume" ]] || echo '  no volume is bound'

heading 'Pods that use it'
if told 5-users; then
    awk -F'\t' -v claim="\"$claim\"" '$1 == claim { n++; print "  " $2 "  " $3 "  " ($4 == "" ? "no node" : $4) } END { if (!n) print "  none" }' "$work/5-users"
fi

events 6-events
commands
