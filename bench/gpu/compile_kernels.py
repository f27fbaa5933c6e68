"""Compiles the agent's CUDA C to the PTX that is committed beside it. No GPU needed; NVRTC is (any of CUDA 11 to 13).

    python bench/gpu/compile_kernels.py [--out DIR] [--nvrtc LIBRARY]

An older NVRTC writes PTX that older drivers take: the committed files are CUDA 11.8's (`nvidia-cuda-nvrtc-cu11`).
"""

from __future__ import annotations

import argparse
import ctypes
import glob
import hashlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent.parent / "src" / "gpool" / "agent" / "gpu"
TARGETS = ("compute_75", "compute_80")


def library(named: str | None) -> ctypes.CDLL:
    roots = [*sys.path, "/usr/lib", "/usr/local/cuda/lib64"]
    found = [named] if named else []
    for root in roots:
        found += glob.glob(f"{root}/nvidia/*/lib/libnvrtc.so*") + glob.glob(f"{root}/libnvrtc.so*")
    for path in [*found, "libnvrtc.so"]:
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            print("not", path, error, file=sys.stderr)
    raise SystemExit("no NVRTC found: pass --nvrtc")


def compile_for(nvrtc: ctypes.CDLL, source: bytes, target: str) -> bytes:
    program = ctypes.c_void_p()

    def must(code: int) -> None:
        if code:
            size = ctypes.c_size_t()
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise SystemExit(f"NVRTC error {code}: {log.value.decode()}")

    must(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None))
    options = (ctypes.c_char_p * 2)(f"--gpu-architecture={target}".encode(), b"--std=c++14")
    must(nvrtc.nvrtcCompileProgram(program, len(options), options))
    size = ctypes.c_size_t()
    must(nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)))
    ptx = ctypes.create_string_buffer(size.value)
    must(nvrtc.nvrtcGetPTX(program, ptx))
    return ptx.value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--nvrtc")
    asked = parser.parse_args()
    source = (HERE / "kernels.cu").read_bytes()
    nvrtc = library(asked.nvrtc)
    asked.out.mkdir(parents=True, exist_ok=True)
    for target in TARGETS:
        ptx = compile_for(nvrtc, source, target)
        stamp = f"// source sha256 {hashlib.sha256(source).hexdigest()}\n".encode()
        to = asked.out / f"kernels_{target.removeprefix('compute_')}.ptx"
        to.write_bytes(stamp + ptx)
        print(target, len(ptx), "bytes of PTX to", to)


if __name__ == "__main__":
    main()
