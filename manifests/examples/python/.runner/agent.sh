#!/usr/bin/env bash
# Plays the agent's part: round once, after the sum.
set -euo pipefail

sed -i 's/sum(round(price) for price in prices)/round(sum(prices), 2)/' cart.py
