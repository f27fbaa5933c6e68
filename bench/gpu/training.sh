#!/usr/bin/env bash
# A transformer's training loop inside gpool against the bare machine, alternating, best of ROUNDS (3). About three minutes.
# Usage: training.sh PYTHON WHEELS [ROUNDS]     (PYTHON has torch; it gets gpool installed; root); $OUT takes training.json
set -u
PYTHON=${1:?usage: training.sh PYTHON WHEELS} WHEELS=${2:?usage: training.sh PYTHON WHEELS}; shift 2
"$PYTHON" -m pip install -q --no-index --find-links "$WHEELS" 'gpool[server,agent]' || exit 1
cd "$(dirname "$0")" && timeout 290 "$PYTHON" training.py "$@"
