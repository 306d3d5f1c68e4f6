#!/usr/bin/env bash
# The two stages of the Dockerfile, `system` and `packages`. In /run/host may be what the host that builds reaches its
# mirrors with: `ca.crt` (certificate authorities, PEM), `pip.conf`, and `apt.list` or `apt.sources`.
set -euo pipefail

# shellcheck source=../image/build.sh
source "$(dirname "${BASH_SOURCE[0]}")/build.sh" :  # its functions, and none of its stages

VENV=/opt/plan-runner

system() {
    local packages=(ca-certificates git openssh-client)
    command -v python3 >/dev/null || packages+=(python3)
    install_packages "${packages[@]}"
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail 'the base has a Python older than 3.11'
    groupadd --gid 1000 runner
    useradd --uid 1000 --gid runner --home-dir /home/runner --shell /bin/bash runner
    install -d -m 1777 /work /home/runner /var/lib/plan-runner  # whichever user it is started as
    find / -xdev -perm /6000 -type f -exec chmod a-s {} +
    find /usr/share/doc -type f ! -name copyright -delete
    rm -rf /usr/share/{info,locale,man}/* /var/log/* /var/cache/debconf/*-old /tmp/* /run/host /run/build
}

packages() {
    python3 -c 'import ensurepip' 2>/dev/null || install_packages python3-venv
    if [[ -e "$HOST/pip.conf" ]]; then
        export PIP_CONFIG_FILE=$HOST/pip.conf
    fi
    if [[ -e "$HOST/ca.crt" ]]; then
        export PIP_CERT=$HOST/ca.crt
    fi
    python3 -m venv "$VENV"
    cd /run/wheel
    local pip=("$VENV/bin/pip" --disable-pip-version-check --no-input) install=(install -q --no-cache-dir --no-deps --only-binary :all:)
    "${pip[@]}" "${install[@]}" --require-hashes -r requirements.lock
    "${pip[@]}" "${install[@]}" -r wheel.txt
    "${pip[@]}" check
    "${pip[@]}" uninstall -q -y pip setuptools
    rm -f "$VENV"/bin/{activate*,Activate*}
}

fail() { printf '%s\n' "$1" >&2; exit 1; }

"$1"
