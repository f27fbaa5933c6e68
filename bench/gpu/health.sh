#!/usr/bin/env bash
# Detection, telemetry, a hung kernel and the owner first, on a machine with a real NVIDIA GPU and PyTorch (under four minutes).
# Usage: health.sh PYTHON WHEELS [OUT]     from the repository's root; OUT gets what NVML said, for tests/agent/detect/recorded
set -u
PYTHON=${1:?usage: health.sh PYTHON WHEELS [OUT]} WHEELS=${2:?usage: health.sh PYTHON WHEELS [OUT]} OUT=${3:-}
"$PYTHON" -m pip install -q --no-index --find-links "$WHEELS" 'gpool[server,agent]' || exit 1
GPOOL_HOME=$(mktemp -d) && export GPOOL_HOME
gpool() { "$PYTHON" -m gpool "$@"; }

echo "-- what NVML says"
"$PYTHON" - "$OUT" <<'P'
import json, sys
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

from gpool.agent.machine.gpus import Detector
from gpool.agent.machine.real_nvml import RealNvml

nvml = RealNvml()
nvml.open()
told = {"about": "Captured live through NVML.", "driver": nvml.driver(), "lost": nvml.lost(), "cards": []}
for uuid in nvml.uuids():
    vitals = asdict(nvml.vitals(uuid))
    vitals["throttled"] = sorted(vitals["throttled"])
    told["cards"].append({
        "card": asdict(nvml.card(uuid)), "vitals": vitals, "compute_mode": nvml.compute_mode(uuid),
        "processes": [asdict(one) for one in nvml.processes(uuid)],
        "mig_profiles": [asdict(one) for one in nvml.mig_profiles(uuid)],
        "mig_instances": [asdict(one) for one in nvml.mig_instances(uuid)],
    })
    for name in ("card", "vitals", "processes", "mig_profiles", "mig_instances"):
        ask, began = getattr(nvml, name), perf_counter()
        for _ in range(20):
            ask(uuid)
        print(f"{name}: {(perf_counter() - began) * 50:.2f} ms a call")
began = perf_counter()
print("xids:", nvml.xids(), f"{(perf_counter() - began) * 1000:.2f} ms")
print(json.dumps(told, indent=1))
if sys.argv[1]:
    Path(sys.argv[1], "nvidia-live.json").write_text(json.dumps(told, indent=1) + "\n")
print(Detector(None, nvml).survey())
P
echo "-- polling eight GPUs"
PYTHONPATH=. "$PYTHON" -m bench.telemetry --seconds 15

printf '[[gpu]]\nyield_to_others = true\n' > "$GPOOL_HOME/policy.toml"
export GPOOL_SERVER_BEAT_S=2 GPOOL_SERVER_TTL_S=12 GPOOL_SERVER_MARGIN_S=3
gpool up --port 18471 --policy "$GPOOL_HOME/policy.toml" > "$GPOOL_HOME/up.log" 2>&1 & UP=$!
trap 'kill $UP; wait $UP; tail -30 "$GPOOL_HOME"/*/agent.log 2>/dev/null; rm -rf "$GPOOL_HOME"' EXIT
until gpool gpus --json 2>/dev/null | grep -q '"kind": *"gpu"'; do kill -0 $UP || { cat "$GPOOL_HOME/up.log"; exit 1; }; done
gpool node doctor
cat > "$GPOOL_HOME/drive.py" <<'P'
import json, os, subprocess, sys, time

PYTHON = sys.executable
BUSY = "import torch\nx=torch.randn(8192,8192,device='cuda')\nwhile True: y=x@x; torch.cuda.synchronize()"
HUNG = "import torch\nprint('begins',flush=True)\ntorch.cuda._sleep(10**17)\ntorch.cuda.synchronize()"
ONE = "import torch\nprint(float(torch.ones(8,device='cuda').sum()))"


def gpool(*words, check=True):
    done = subprocess.run([PYTHON, "-m", "gpool", *words], capture_output=True, text=True)
    if check and done.returncode:
        raise SystemExit(f"{words}: {done.stderr}")
    return done.stdout.strip()


def on_gpu():
    said = subprocess.run(["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"],
                          capture_output=True, text=True).stdout.split()
    return said


def used_mib():
    return int(subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
                              capture_output=True, text=True).stdout.split()[0])


def until(what, holds, within=60.0):
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > within:
            print(f"NOT within {within} s: {what}")
            return within
        time.sleep(0.05)
    return time.monotonic() - began


def submit(source):
    return gpool("run", "--gpu", "1", "--detach", "--", "python", "-c", source).split()[-1]


def status(task):
    return json.loads(gpool("status", task, "--json"))


idle = used_mib()
task = submit(BUSY)
until("the task works", lambda: used_mib() > idle + 500)
time.sleep(8)
print(gpool("gpus"))
gpu = next(one for one in json.loads(gpool("gpus", "--json")) if one["kind"] == "gpu")
print("reading", gpu["reading"], "processes as NVML tells them", on_gpu())

print("-- the owner first: a stranger's program on the GPU")
owner = subprocess.Popen([PYTHON, "-c", "import torch,time\nx=torch.ones(1<<20,device='cuda')\nprint('on',flush=True)\ntime.sleep(30)"],
                         stdout=subprocess.PIPE, text=True)
owner.stdout.readline()
took = until("the task is queued again", lambda: status(task)["status"] == "queued", 30)
print(f"from the stranger's first byte to the task being back in the queue: {took:.2f} s (each look takes a command)")
story = status(task)
print({key: story[key] for key in ("status", "tries", "losses", "error_text")})
print([one["closed"] for one in json.loads(gpool("gpus", "--json")) if one["kind"] == "gpu"])
owner.kill()
owner.wait()
gpool("cancel", task)
until("the GPU is empty", lambda: used_mib() <= idle + 50)

print("-- a hung kernel")
task = submit(HUNG)
until("it hangs", lambda: "begins" in gpool("logs", task, check=False))
time.sleep(3)
began = time.monotonic()
gpool("cancel", task)
until("its memory is free", lambda: used_mib() <= idle + 50, 60)
print(f"a hung kernel was ended within {time.monotonic() - began:.2f} s")
print(gpool("run", "--gpu", "1", "--", "python", "-c", ONE, check=False))
print(f"the next task's result came {time.monotonic() - began:.2f} s after the cancel")
print(gpool("gpus"))
P
timeout 150 "$PYTHON" "$GPOOL_HOME/drive.py"
