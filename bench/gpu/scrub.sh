#!/usr/bin/env bash
# 20 pairs of victim and spy over most of a real GPU's memory. Root; nobody else on the GPU. Up to four minutes.
# Usage: scrub.sh PYTHON WHEELS [PAIRS]     (PYTHON has torch; it gets gpool installed)
set -u
PYTHON=${1:?usage: scrub.sh PYTHON WHEELS} WHEELS=${2:?usage: scrub.sh PYTHON WHEELS}; shift 2
"$PYTHON" -m pip install -q --no-index --find-links "$WHEELS" 'gpool[server,agent]' || exit 1
cd "$(dirname "$0")" && timeout 290 "$PYTHON" scrub.py "$@"
