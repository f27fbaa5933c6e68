#!/usr/bin/env bash
# An MPS neighbour while another agent on the same card is stopped, again and again. Root; nobody else on the GPU. LATEST_S (150) seconds.
# Usage: stopping.sh PYTHON WHEELS     (PYTHON has torch; it gets gpool installed); $OUT takes stopping.json
set -u
PYTHON=${1:?usage: stopping.sh PYTHON WHEELS} WHEELS=${2:?usage: stopping.sh PYTHON WHEELS}
"$PYTHON" -m pip install -q --no-index --find-links "$WHEELS" 'gpool[server,agent]' || exit 1
cd "$(dirname "$0")" && timeout "$((${LATEST_S:-150} + 40))" "$PYTHON" stopping.py
