#!/usr/bin/env bash
# A pool on a machine with a real NVIDIA GPU and PyTorch, and nothing installable: gpool and its wheels lie in WHEELS.
# Usage: first_steps.sh PYTHON WHEELS     (PYTHON is the interpreter whose packages hold torch; it gets gpool installed)
set -u
PYTHON=${1:?usage: first_steps.sh PYTHON WHEELS} WHEELS=${2:?usage: first_steps.sh PYTHON WHEELS}
"$PYTHON" -m pip install -q --no-index --find-links "$WHEELS" 'gpool[server,agent]' || exit 1
GPOOL_HOME=$(mktemp -d) && export GPOOL_HOME
gpool() { "$PYTHON" -m gpool "$@"; }
gpool up --port 18470 > "$GPOOL_HOME/up.log" 2>&1 & UP=$!
trap 'kill $UP; wait $UP; rm -rf "$GPOOL_HOME"' EXIT
until gpool gpus --json 2>/dev/null | grep -q '"kind": *"gpu"'; do kill -0 $UP || { cat "$GPOOL_HOME/up.log"; exit 1; }; done
gpool gpus
gpool node doctor
echo "-- with a GPU";     timeout 60 gpool run --gpu 1 -- nvidia-smi -L; echo "exit $?"
echo "-- without one";    timeout 60 gpool run -- nvidia-smi -L; echo "exit $?"
echo "-- over its memory"; timeout 60 gpool run --memory 300MB -- python3 -c 'bytearray(10**9)'; echo "exit $?"
cat > "$GPOOL_HOME/first.py" <<'P'
import time

import gpool


@gpool.task(gpu=1)
def multiply(n):
    import torch

    x = torch.randn(n, n, device="cuda")
    (x @ x).sum().item()
    return torch.cuda.get_device_name(0)


@gpool.task
def sees_cuda():
    import torch

    return torch.cuda.is_available()


for _ in range(5):
    began = time.perf_counter()
    print(multiply.remote(2048), f"{time.perf_counter() - began:.3f} s")
print("without a GPU, CUDA is there:", sees_cuda.remote())
P
timeout 200 "$PYTHON" "$GPOOL_HOME/first.py"
