#!/usr/bin/env bash
# A gang with NCCL on a real GPU: a server and two agents here, each lending the card, torchrun over the gang's own network. About a minute.
# Usage: gang.sh PYTHON WHEELS     (PYTHON has torch; it gets gpool installed; nft and /dev/net/tun are needed, and root)
set -u
PYTHON=${1:?usage: gang.sh PYTHON WHEELS} WHEELS=${2:?usage: gang.sh PYTHON WHEELS}
"$PYTHON" -m pip install -q --no-index --find-links "$WHEELS" 'gpool[server,agent]' || exit 1
PYTHONPATH="$(dirname "$0")/../.." timeout 400 "$PYTHON" "$(dirname "$0")/gang.py"
