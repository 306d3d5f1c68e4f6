#!/bin/sh
# The network of the tests' cluster, as a kubelet asks for it (CNI): an interface that leads nowhere, as a policy would
# leave it, or with a file `open` beside this script one that reaches the node. Pods of Jobs (`runner-RUN-xxxxx`) always do.
set -eu
folder=$(dirname "$(readlink -f "$0")")
inside() { nsenter --net="$CNI_NETNS" "$@"; }
case $CNI_COMMAND in
VERSION) echo '{"cniVersion": "0.3.1", "supportedVersions": ["0.3.1"]}' ;;
ADD)
    if [ "${0##*/}" = loopback ]; then
        inside ip link set lo up
        echo '{"cniVersion": "0.3.1"}'
        exit
    fi
    number=$(($(printf %d "0x$(printf %s "$CNI_CONTAINERID" | cut -c1-4)") % 64000 + 256))
    address=10.214.$((number / 256)).$((number % 256))
    open=$folder/open
    case $CNI_ARGS\; in *K8S_POD_NAME=runner-????????????-?????\;*) open=$folder/workers ;; esac
    if [ -e "$open" ]; then
        inside ip link add eth0 type veth peer name "rt$number"
        inside ip link set "rt$number" netns 1
        ip link set "rt$number" up
        ip route add "$address" dev "rt$number" src "$(cat "$open")"
        inside ip address add "$address/32" dev eth0
        inside ip link set eth0 up
        inside ip route add "$(cat "$open")" dev eth0
    else
        inside ip link add eth0 type bridge
        inside ip address add "$address/32" dev eth0
        inside ip link set eth0 up
    fi
    printf '{"cniVersion": "0.3.1", "interfaces": [{"name": "eth0", "sandbox": "%s"}], ' "$CNI_NETNS"
    printf '"ips": [{"version": "4", "interface": 0, "address": "%s/32"}]}\n' "$address"
    ;;
esac
