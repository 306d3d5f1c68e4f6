#!/usr/bin/env bash
# Lists the sub-runners and the variables that each one requires, as found in their source.
set -euo pipefail
cd "${RUNNER_WORKSPACE:?}/runners"

{
    printf '# Sub-runners\n\n| agent | required variables |\n| --- | --- |\n'
    for script in *.sh; do
        case "$script" in common.sh | *-post.sh) continue ;; esac
        printf '| %s | %s |\n' "${script%.sh}" "$(sed -n 's/^require_env //p' "$script")"
    done
} >README.md

printf 'wrote runners/README.md, %s lines\n' "$(wc -l <README.md)"
