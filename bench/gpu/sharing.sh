#!/usr/bin/env bash
# Slices with limits that hold on a real NVIDIA GPU: MPS, time slices, MIG. Root; nobody else on the GPU. About three minutes.
# Usage: sharing.sh PYTHON WHEELS [mps|timeslice|mig…]     (PYTHON has torch; it gets gpool installed)
set -u
PYTHON=${1:?usage: sharing.sh PYTHON WHEELS} WHEELS=${2:?usage: sharing.sh PYTHON WHEELS}; shift 2
"$PYTHON" -m pip install -q --no-index --find-links "$WHEELS" 'gpool[server,agent]' || exit 1
cd "$(dirname "$0")" && timeout 290 "$PYTHON" sharing.py "$@"
