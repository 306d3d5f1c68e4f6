#!/bin/sh
# The sum of a cart, in euros: one price an argument.
printf '%s\n' "$@" | awk '{ sum += sprintf("%.0f", $1) } END { print sum }'
