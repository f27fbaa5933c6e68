#!/usr/bin/env bash
# GPUs at the speed of the bare machine, in about eleven minutes or in two runs (halves training; warm features cdi); one line {"verdict": PART, "pass": …} a part.
# Usage: full_speed.sh PYTHON WHEELS [PART…]     from any folder; PYTHON has torch and gets gpool's wheels installed; root.
# Parts, in this order: halves (MPS against time slices), training, warm, features, cdi; stopping only if it is named.
# The gpool of this tree is used, not the one in WHEELS. $OUT takes one JSON a part, verdicts.jsonl and log.txt.
set -u
PYTHON=${1:?usage: full_speed.sh PYTHON WHEELS [PART…]} WHEELS=${2:?usage: full_speed.sh PYTHON WHEELS [PART…]}; shift 2
HERE=$(cd "$(dirname "$0")" && pwd)
export OUT=${OUT:-$(mktemp -d)} PYTHONUNBUFFERED=1 PYTHONPATH="$HERE/../../src" PYTHON
END=$((SECONDS + ${WHOLE_S:-800}))
exec > >(tee "$OUT/log.txt") 2>&1
nvidia-smi --query-gpu=name,uuid,memory.total,memory.used,driver_version,compute_mode --format=csv
echo "open files $(ulimit -Hn), locked KiB $(ulimit -Hl), $(grep CapEff /proc/self/status), $(nproc) processors"
"$PYTHON" -m pip install -q --no-index --find-links "$WHEELS" 'gpool[server,agent]' || exit 1
cd "$HERE" || exit 1

warm() {
  GPOOL_HOME=$(mktemp -d) && export GPOOL_HOME
  "$PYTHON" -m gpool up --port 18484 > "$GPOOL_HOME/up.log" 2>&1 & local up=$!
  for _ in $(seq 200); do
    "$PYTHON" -m gpool gpus --json 2>/dev/null | grep -q '"kind": *"gpu"' && break
    kill -0 $up || { cat "$GPOOL_HOME/up.log"; return 1; }
  done
  ROUNDS=${ROUNDS:-6} "$PYTHON" warm.py; local code=$?
  kill $up; wait $up
  rm -rf "$GPOOL_HOME"
  return $code
}
export -f warm

verdict() {  # JSON: shown, and kept for the end
  echo "$1" | tee -a "$OUT/verdicts.jsonl"
}

part() {  # name: within its own limit and the end of the whole; a failure does not end the others
  local name=$1 most left=$((END - SECONDS)) began=$SECONDS code
  case $name in
    halves)   most=230; set -- "$PYTHON" halves.py 3 ;;
    training) most=220; set -- "$PYTHON" training.py 3 ;;
    warm)     most=90;  set -- bash -c warm ;;
    features) most=160; set -- "$PYTHON" features.py ;;
    cdi)      most=60;  set -- ./cdi.sh "$PYTHON" ;;
    stopping) most=150; set -- "$PYTHON" stopping.py ;;
    *) verdict "{\"verdict\": \"$name\", \"pass\": false, \"why\": \"no such part\"}"; return ;;
  esac
  [ "$most" -le "$left" ] || most=$left
  [ "$most" -gt 15 ] || { verdict "{\"verdict\": \"$name\", \"pass\": false, \"why\": \"left out: $left s are left\"}"; return; }
  echo "== $name (at most $most s)"
  LATEST_S=$most timeout -k 15 "$most" "$@" | tee "$OUT/part.txt"; code=${PIPESTATUS[0]}
  echo "== $name ended with $code after $((SECONDS - began)) s"
  grep -h '^{"verdict"' "$OUT/part.txt" >> "$OUT/verdicts.jsonl" ||
    verdict "{\"verdict\": \"$name\", \"pass\": false, \"why\": \"it ended with $code without a verdict\"}"
  nvidia-smi -c DEFAULT > /dev/null
}

: > "$OUT/verdicts.jsonl"
for one in ${*:-halves training warm features cdi}; do part "$one"; done
rm -f "$OUT/part.txt"
echo "== verdicts"
cat "$OUT/verdicts.jsonl"
! grep -q '"pass": false' "$OUT/verdicts.jsonl"
