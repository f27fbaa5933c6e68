#!/usr/bin/env bash
# Submit to first CUDA result of a PyTorch function on a real GPU, step by step: cold, forked, live, beside bare forks. Two minutes.
# Usage: warm.sh PYTHON WHEELS     (PYTHON has torch; it gets gpool installed); $OUT takes warm.json
set -u
PYTHON=${1:?usage: warm.sh PYTHON WHEELS} WHEELS=${2:?usage: warm.sh PYTHON WHEELS}
"$PYTHON" -m pip install -q --no-index --find-links "$WHEELS" 'gpool[server,agent]' || exit 1
GPOOL_HOME=$(mktemp -d) && export GPOOL_HOME
gpool() { "$PYTHON" -m gpool "$@"; }
gpool up --port 18475 > "$GPOOL_HOME/up.log" 2>&1 & UP=$!
trap 'kill $UP; wait $UP; tail -n 20 "$GPOOL_HOME"/data/*.log 2>/dev/null; rm -rf "$GPOOL_HOME"' EXIT
until gpool gpus --json 2>/dev/null | grep -q '"kind": *"gpu"'; do kill -0 $UP || { cat "$GPOOL_HOME/up.log"; exit 1; }; done
timeout 170 "$PYTHON" "$(dirname "$0")/warm.py"
