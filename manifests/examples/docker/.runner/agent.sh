#!/usr/bin/env bash
# Plays the agent's part: round once, after the sum.
set -euo pipefail

sed -i -e 's/sum += .* } END/sum += $1 } END/' -e 's/print sum/printf "%.4g\\n", sum/' total.sh
