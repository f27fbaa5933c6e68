"""Containers with a real NVIDIA GPU, by each installed engine: prints one JSON line an engine. See cdi.sh."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from gpool.agent.machine.gpus import Detector
from gpool.agent.runtime.devices import device_nodes
from gpool.agent.runtime.docker.cdi import gpu_mounts
from gpool.agent.runtime.docker.engine import EngineClient
from gpool.agent.runtime.docker.runtime import DockerRuntime
from gpool.agent.runtime.protocol import CommandJob, GpuShare, SandboxFailed, SandboxLimits
from gpool.core.model import GIB

PROGRAMS = {"podman": "podman", "docker": "dockerd"}
NO_ENGINE, FAILED = 3, 1
OPENS = """
import ctypes, glob, json
cuda = ctypes.CDLL("libcuda.so.1")
count, device, context, place = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
codes = [cuda.cuInit(0), cuda.cuDeviceGetCount(ctypes.byref(count)), cuda.cuDeviceGet(ctypes.byref(device), 0)]
codes += [cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), cuda.cuCtxSetCurrent(context)]
codes += [cuda.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(1 << 30))]
print(json.dumps({"codes": codes, "gpus": count.value, "nodes": sorted(glob.glob("/dev/nvidia[0-9]*"))}))
"""


async def tried(kind: str) -> dict[str, object]:
    from tests.tools.engines import IMAGE, shared_engine  # noqa: PLC0415 - not where no engine is

    detector = Detector()
    gpus = [gpu for gpu in detector.survey().gpus if gpu.vendor == "nvidia"]
    detector.close()
    if not gpus:
        return {"engine": kind, "failed": "no NVIDIA GPU"}
    share = GpuShare(device_nodes(gpus[:1]), (("CUDA_VISIBLE_DEVICES", gpus[0].uuid),))
    engine = shared_engine(kind)
    client = EngineClient(engine.address)
    facts = client.facts
    client.close()
    with tempfile.TemporaryDirectory() as data:
        runtime = DockerRuntime(Path(data), engine=engine.address, default_image=IMAGE)
        try:
            mounts = gpu_mounts({}, (), share, engine_folders=facts.cdi_folders)
            began = time.monotonic()
            limits = SandboxLimits(2000, 8 * GIB)
            job = CommandJob(("python3", "-c", OPENS), (), (), (), limits, gpu_share=share)
            sandbox = await runtime.start_command(job)
            said = b"".join([text async for _, text in sandbox.output()])
            ended = await sandbox.ended()
            await sandbox.remove()
            took = round(time.monotonic() - began, 2)
            how = "the engine's CDI" if mounts.cdi else "nodes and libraries"
            text = said.decode("utf-8", "replace").strip()
            found: dict[str, object] = {"engine": kind, "by": how, "seconds": took, "said": text}
            return found | ({} if ended.exit_code == 0 else {"failed": ended.detail or "exit code"})
        except SandboxFailed as error:
            return {"engine": kind, "failed": str(error)}
        finally:
            await runtime.close()


def main(kinds: list[str]) -> int:
    wanted = kinds or [kind for kind, program in PROGRAMS.items() if shutil.which(program)]
    results: list[dict[str, object]] = []
    for kind in wanted:
        try:
            results.append(asyncio.run(tried(kind)))
        except (RuntimeError, FileNotFoundError, ImportError) as error:
            results.append({"engine": kind, "no_engine": str(error)})
        print(json.dumps(results[-1]), flush=True)
    ran = [one for one in results if "no_engine" not in one]
    failed = [one["engine"] for one in ran if "failed" in one]
    verdict = {"verdict": "cdi", "pass": not failed if ran else None, "failed": failed}
    verdict |= {"engines": [one["engine"] for one in ran]}
    if not ran:
        verdict["why"] = "no container engine runs here"
    print(json.dumps(verdict), flush=True)
    if os.environ.get("OUT"):
        text = json.dumps({**verdict, "results": results}, indent=1)
        Path(os.environ["OUT"], "cdi.json").write_text(text + "\n")
    return NO_ENGINE if not ran else FAILED if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
