#!/usr/bin/env bash
# Everything that training on one node must show, in one run of at most nine minutes: features, training, warm starts, stopping.
# Usage: full_speed.sh PYTHON WHEELS [PART…]     from any folder; PYTHON has torch and gets gpool's wheels installed; root.
# Parts: features training warm stopping. The gpool of this tree is used, not the one in WHEELS. $OUT takes one JSON a part, and log.
set -u
PYTHON=${1:?usage: full_speed.sh PYTHON WHEELS} WHEELS=${2:?usage: full_speed.sh PYTHON WHEELS}; shift 2
HERE=$(cd "$(dirname "$0")" && pwd)
export OUT=${OUT:-$(mktemp -d)} PYTHONUNBUFFERED=1 PYTHONPATH="$HERE/../../src"
END=$((SECONDS + 510))
exec > >(tee "$OUT/log.txt") 2>&1
nvidia-smi --query-gpu=name,uuid,memory.total,memory.used,driver_version,compute_mode --format=csv
echo "open files $(ulimit -Hn), locked KiB $(ulimit -Hl), $(grep CapEff /proc/self/status), $(nproc) processors"
"$PYTHON" -m pip install -q --no-index --find-links "$WHEELS" 'gpool[server,agent]' || exit 1
cd "$HERE" || exit 1

part() {  # name, seconds, command…: never past the end of the whole, and a failure does not end the others
  local name=$1 most=$2 left=$((END - SECONDS)) began=$SECONDS; shift 2
  case " $PARTS " in *" $name "*) ;; *) return ;; esac
  [ "$left" -gt 20 ] || { echo "== $name: left out, $left s are left"; return; }
  [ "$most" -le "$left" ] || most=$left
  echo "== $name (at most $most s)"
  LATEST_S=$most timeout -k 25 "$most" "$@"
  echo "== $name ended with $? after $((SECONDS - began)) s"
}

warm() {
  GPOOL_HOME=$(mktemp -d) && export GPOOL_HOME
  "$PYTHON" -m gpool up --port 18484 > "$GPOOL_HOME/up.log" 2>&1 & local up=$!
  for _ in $(seq 200); do
    "$PYTHON" -m gpool gpus --json 2>/dev/null | grep -q '"kind": *"gpu"' && break
    kill -0 $up || { cat "$GPOOL_HOME/up.log"; return 1; }
  done
  "$PYTHON" warm.py; local code=$?
  kill $up; wait $up
  rm -rf "$GPOOL_HOME"
  return $code
}

PARTS=${*:-features warm training stopping}
export -f warm; export PYTHON
part features 170 "$PYTHON" features.py
part warm 100 bash -c warm
part training 170 "$PYTHON" training.py 3
part stopping 150 "$PYTHON" stopping.py
nvidia-smi -c DEFAULT > /dev/null
grep -h '"verdict"' "$OUT/log.txt"
ls -l "$OUT"
