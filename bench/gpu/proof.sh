#!/usr/bin/env bash
# Proof of GPU on the real device: kernels against their reference, speeds, one whole honest proof, and cheats that need the device;
# then a pool that examines its GPU before it takes a task. $OUT takes proof.json, and with COMPILE=1 fresh PTX. Under 4 minutes.
# Usage: proof.sh [PYTHON [WHEELS]]     (PYTHON has numpy and torch; without WHEELS, gpool's dependencies, the pool is left out)
set -u
PYTHON=${1:-/opt/torch/.venv/bin/python} WHEELS=${2:-}
OUT=${OUT:-$(mktemp -d)}
cd "$(dirname "$0")/../.." || exit 1
export PYTHONPATH=src PYTHONUNBUFFERED=1
nvidia-smi --query-gpu=name,uuid,memory.total,memory.used,driver_version --format=csv
if [ -n "${COMPILE:-}" ]; then "$PYTHON" bench/gpu/compile_kernels.py --out "$OUT" || echo "compile failed; going on"; fi
timeout 120 "$PYTHON" bench/gpu/proof_device.py --out "$OUT/proof.json" 2>&1
echo "exit $?"
[ -n "$WHEELS" ] || exit 0
"$PYTHON" -m pip install -q --no-index --find-links "$WHEELS" 'gpool[server,agent]' || echo "install failed; going on"
GPOOL_HOME=$(mktemp -d) && export GPOOL_HOME GPOOL_SERVER_EXAMINE_GPUS=true
gpool() { "$PYTHON" -m gpool "$@"; }
since() { echo "$(($(date +%s%N) / 1000000 - BEGAN)) ms: $*"; }
BEGAN=$(($(date +%s%N) / 1000000))
gpool up --port 18471 > "$GPOOL_HOME/up.log" 2>&1 & UP=$!
trap 'kill $UP; wait $UP; rm -rf "$GPOOL_HOME"' EXIT
shown() { gpool gpus --json 2>/dev/null | "$PYTHON" -c 'import json,sys
for g in json.load(sys.stdin):
    if g["kind"] == "gpu": print(g["model"], "| flagged:", g["flagged"], "| measured:", g["measured"])' 2>/dev/null; }
for _ in $(seq 30); do [ -n "$(shown)" ] && break; kill -0 $UP || break; sleep 0.5; done
since "$(shown)"
for _ in $(seq 45); do shown | grep -q 'flagged: None' && break; sleep 1; done
since "$(shown)"
timeout 60 "$PYTHON" -m gpool run --gpu 1 -- nvidia-smi -L; since "task ended with $?"
grep -iE "gpu|proof|judged|unable|Traceback|Error" "$GPOOL_HOME/up.log" | tail -20
