#!/usr/bin/env bash
# Kernels that never end, ended by time-out and by cancelling; then the next task. Root; nobody else on the GPU. About two minutes.
# Usage: hung.sh PYTHON WHEELS     (PYTHON has torch; it gets gpool installed)
set -u
PYTHON=${1:?usage: hung.sh PYTHON WHEELS} WHEELS=${2:?usage: hung.sh PYTHON WHEELS}; shift 2
"$PYTHON" -m pip install -q --no-index --find-links "$WHEELS" 'gpool[server,agent]' || exit 1
cd "$(dirname "$0")" && timeout 230 "$PYTHON" hung.py
