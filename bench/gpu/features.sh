#!/usr/bin/env bash
# Features of training on one machine (NCCL, gloo, files, shared memory, compile, graphs …), bare and in gpool. About three minutes.
# Usage: features.sh PYTHON WHEELS [all NAME…]     (PYTHON has torch; it gets gpool installed; root); $OUT takes features.json
set -u
PYTHON=${1:?usage: features.sh PYTHON WHEELS} WHEELS=${2:?usage: features.sh PYTHON WHEELS}; shift 2
"$PYTHON" -m pip install -q --no-index --find-links "$WHEELS" 'gpool[server,agent]' || exit 1
cd "$(dirname "$0")" && timeout 290 "$PYTHON" features.py "$@"
