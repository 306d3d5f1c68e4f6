#!/bin/sh
got=$(sh total.sh 1.4 1.4)
[ "$got" = 2.8 ] || { echo "1.4 and 1.4 are $got, not 2.8"; exit 1; }
