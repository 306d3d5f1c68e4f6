#!/usr/bin/env bash
# Plays the agent's part: round once, after the sum.
set -euo pipefail

cat >cart.js <<'END'
// The sum of a cart, in euros.
exports.total = (prices) => Math.round(100 * prices.reduce((sum, price) => sum + price, 0)) / 100;
END
