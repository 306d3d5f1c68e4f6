#!/usr/bin/env bash
# Plays the agent's part: round once, after the sum.
set -euo pipefail

sed -i -e 's/sum += math.Round(price)/sum += price/' -e 's,return sum,return math.Round(100*sum) / 100,' cart.go
