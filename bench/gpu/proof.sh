#!/usr/bin/env bash
# Proof of GPU on the real device: kernels against their reference, speeds, one whole honest proof, and cheats that need the device.
# Usage: proof.sh [PYTHON]      (needs numpy, and torch for the comparisons; $OUT takes the PTX and proof.json). Under 4 minutes.
set -u
PYTHON=${1:-/opt/torch/.venv/bin/python}
OUT=${OUT:-$(mktemp -d)}
cd "$(dirname "$0")/../.." || exit 1
export PYTHONPATH=src PYTHONUNBUFFERED=1
nvidia-smi --query-gpu=name,uuid,memory.total,memory.used,driver_version --format=csv
"$PYTHON" bench/gpu/compile_kernels.py --out "$OUT" || echo "compile failed; going on with the committed PTX"
timeout 200 "$PYTHON" bench/gpu/proof_device.py --out "$OUT/proof.json" --ptx "$OUT/kernels_80.ptx" 2>&1
echo "exit $?"
