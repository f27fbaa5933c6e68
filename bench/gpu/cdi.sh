#!/usr/bin/env bash
# A real NVIDIA GPU in images of Docker and Podman: the driver opens the leased card, and only it. Root; about a minute.
# Usage: cdi.sh PYTHON [podman|docker…]     (PYTHON has gpool[agent] and runs in a checkout; exit 3: no engine runs here)
set -u
PYTHON=${1:?usage: cdi.sh PYTHON}; shift
cd "$(dirname "$0")/../.." && timeout 290 "$PYTHON" -m bench.gpu.cdi "$@"
