"""Features that training on one machine needs, each in its own process: on the bare machine, and as a task of a pool.

`features.py` runs all of them both ways and prints a table; `features.py NAME` runs one here and prints one JSON line.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

GIB = 1 << 30
OPEN_FILES = 65_000  # of 65,536: the interpreter and its libraries hold some
FILE_BYTES = 4 * GIB
DISK, MEMORY = "12GB", "16GB"
LIMIT_S = 100.0
FEATURES: dict[str, tuple[bool, Callable[[], str]]] = {}


class Missing(Exception):
    """The machine itself has no such part."""


def feature(*, gpu: bool) -> Callable[[Callable[[], str]], Callable[[], str]]:
    def add(run: Callable[[], str]) -> Callable[[], str]:
        FEATURES[run.__name__] = (gpu, run)
        return run

    return add


def free_port() -> int:
    with socket.socket() as any_socket:
        any_socket.bind(("127.0.0.1", 0))
        return int(any_socket.getsockname()[1])


def must(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


# ---- without a GPU


@feature(gpu=False)
def open_files() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:  # a shell's soft limit may be lower
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held = 0
    try:
        for _ in range(OPEN_FILES):
            os.open("/dev/null", os.O_RDONLY)
            held += 1
    except OSError as full:
        raise AssertionError(f"{full} after {held}") from full
    return f"{held} of {hard}"


@feature(gpu=False)
def large_file() -> str:
    chunk, began = bytes(64 << 20), time.perf_counter()
    try:
        with open("large.bin", "wb") as large:
            for _ in range(FILE_BYTES // len(chunk)):
                large.write(chunk)
            size = large.tell()
    finally:
        Path("large.bin").unlink(missing_ok=True)
    return f"{size / GIB:.0f} GiB, {size / GIB / (time.perf_counter() - began):.1f} GiB/s"


@feature(gpu=False)
def locked_memory() -> str:
    page = mmap.mmap(-1, GIB)
    libc = ctypes.CDLL(None, use_errno=True)
    at = ctypes.addressof(ctypes.c_char.from_buffer(page))
    if libc.mlock(ctypes.c_void_p(at), ctypes.c_size_t(GIB)):
        raise OSError(ctypes.get_errno(), f"mlock: {os.strerror(ctypes.get_errno())}")
    return f"1 GiB of {resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] / GIB:.1f}"


def _add_one(tensor: Any) -> None:
    tensor.add_(1)


@feature(gpu=False)
def shared_cpu_tensor() -> str:
    import torch.multiprocessing as processes  # noqa: PLC0415
    from torch import zeros  # noqa: PLC0415

    held = zeros(GIB // 4).share_memory_()
    child = processes.get_context("spawn").Process(target=_add_one, args=(held,))
    child.start()
    child.join()
    must(child.exitcode == 0, f"child ended with {child.exitcode}")
    must(float(held.double().sum()) == held.numel(), "the child's changes are not here")
    room = os.statvfs("/dev/shm")
    return f"1 GiB of {room.f_blocks * room.f_frsize / GIB:.0f} in /dev/shm"


def _gloo_member(rank: int, world: int, port: int, answers: Any) -> None:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    held = torch.full((1 << 20,), float(rank + 1))
    dist.all_reduce(held)
    answers.put(float(held[-1]))
    dist.barrier()
    dist.destroy_process_group()


@feature(gpu=False)
def gloo() -> str:
    import torch.multiprocessing as processes  # noqa: PLC0415

    context, port = processes.get_context("fork"), free_port()
    answers = context.SimpleQueue()
    members = [
        context.Process(target=_gloo_member, args=(rank, 2, port, answers)) for rank in range(2)
    ]
    for one in members:
        one.start()
    found = [answers.get() for _ in members]
    for one in members:
        one.join()
    must(found == [3.0, 3.0], f"sums {found}")
    return "2 processes"


# ---- with a GPU


@feature(gpu=True)
def nccl() -> str:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    began = time.perf_counter()
    dist.init_process_group("nccl", rank=0, world_size=1)
    held = torch.ones(1 << 24, device="cuda")
    dist.all_reduce(held)
    dist.barrier()
    must(float(held.sum()) == held.numel(), "wrong sum")
    dist.destroy_process_group()
    return f"world 1, {time.perf_counter() - began:.2f} s"


def _add_one_there(given: Any, back: Any) -> None:
    held = given.get()
    held.add_(1)
    import torch  # noqa: PLC0415

    torch.cuda.synchronize()
    back.put(float(held.sum()))
    given.get()  # the parent's tensor lives until here
    del held


@feature(gpu=True)
def shared_cuda_tensor() -> str:
    import torch  # noqa: PLC0415
    import torch.multiprocessing as processes  # noqa: PLC0415

    context = processes.get_context("spawn")
    given, back = context.Queue(), context.Queue()
    child = context.Process(target=_add_one_there, args=(given, back))
    child.start()
    held = torch.zeros(1 << 26, device="cuda")
    given.put(held)
    found = back.get(timeout=LIMIT_S / 2)
    torch.cuda.synchronize()
    must(found == held.numel() == float(held.sum()), f"sums {found}")
    given.put(None)
    child.join()
    return "256 MiB"


@feature(gpu=True)
def compiled() -> str:
    if not (shutil.which("gcc") or shutil.which("cc")):
        raise Missing("no C compiler")
    try:
        import triton  # type: ignore[import-not-found]  # noqa: PLC0415, F401
    except ImportError as absent:
        raise Missing("no triton") from absent
    import torch  # noqa: PLC0415

    @torch.compile
    def wave(x: Any) -> Any:
        return (x.sin() * x.cos()).relu().sum()

    x = torch.randn(1 << 20, device="cuda")
    plain = (x.sin() * x.cos()).relu().sum()
    must(bool(torch.allclose(wave(x), plain, rtol=1e-3)), "wrong value")
    return "triton"


class _Numbers:
    def __len__(self) -> int:
        return 512

    def __getitem__(self, at: int) -> Any:
        import torch  # noqa: PLC0415

        return torch.full((64, 1024), float(at))


@feature(gpu=True)
def data_loader() -> str:
    import torch  # noqa: PLC0415
    from torch.utils.data import DataLoader  # noqa: PLC0415

    total, began = torch.zeros((), device="cuda", dtype=torch.double), time.perf_counter()
    loader: Any = DataLoader(_Numbers(), batch_size=16, num_workers=8, pin_memory=True)  # type: ignore[arg-type]
    for batch in loader:
        must(batch.is_pinned(), "the batch is not pinned")
        total += batch.to("cuda", non_blocking=True).double().mean() * len(batch)
    must(float(total) == sum(range(512)), f"sum {float(total)}")
    return f"8 workers, {512 / (time.perf_counter() - began):.0f} items/s"


@feature(gpu=True)
def cuda_graph() -> str:
    import torch  # noqa: PLC0415

    x = torch.ones(1 << 20, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            (x * 2).add_(1)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2 + 1
    x.fill_(5)
    graph.replay()
    torch.cuda.synchronize()
    must(float(y[0]) == 11.0, f"replayed value {float(y[0])}")
    return "captured, replayed"


@feature(gpu=True)
def pinned_memory() -> str:
    import torch  # noqa: PLC0415

    host = torch.ones(GIB // 4).pin_memory()
    there = torch.empty(GIB // 4, device="cuda")
    there.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(5):
        there.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    speed = 5 / (time.perf_counter() - began)
    must(float(there.sum()) == there.numel(), "wrong sum")
    return f"{speed:.1f} GiB/s to the GPU"


@feature(gpu=True)
def malloc_async() -> str:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"
    import torch  # noqa: PLC0415

    must(torch.cuda.get_allocator_backend() == "cudaMallocAsync", "another allocator")
    for _ in range(50):
        held = torch.ones(1 << 26, device="cuda")
        del held
    must(float(torch.ones(1 << 20, device="cuda").sum()) == 1 << 20, "wrong sum")
    return "cudaMallocAsync"


@feature(gpu=True)
def two_streams() -> str:
    import torch  # noqa: PLC0415

    x = torch.randn(2048, 2048, device="cuda")
    wanted = x @ x
    torch.cuda.synchronize()
    found = []
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for _ in range(20):
                y = x @ x
            found.append(y)
    torch.cuda.synchronize()
    must(all(bool(torch.equal(y, wanted)) for y in found), "wrong product")
    return "equal products"


@feature(gpu=True)
def memory_fraction() -> str:
    import torch  # noqa: PLC0415

    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(0.1)
    torch.empty(int(total * 0.05), dtype=torch.uint8, device="cuda")
    try:
        torch.empty(int(total * 0.2), dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return "refused beyond a tenth"
    raise AssertionError("a fifth was given where a tenth is the limit")


@feature(gpu=True)
def nvml() -> str:
    """Without nvidia-smi, by the library alone, as monitoring libraries do."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    count, device = ctypes.c_uint(), ctypes.c_void_p()
    name = ctypes.create_string_buffer(96)
    must(library.nvmlInit_v2() == 0, "nvmlInit")
    must(library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0, "nvmlDeviceGetCount")
    must(library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0, "handle")
    must(library.nvmlDeviceGetName(device, name, 96) == 0, "name")
    return f"{count.value} x {name.value.decode()}"


@feature(gpu=True)
def fork_after_cuda() -> str:
    """The child's error is PyTorch's own, at once, and the parent works on."""
    import torch  # noqa: PLC0415

    torch.ones(1, device="cuda")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, device="cuda")
            text = "it worked"
        except RuntimeError as refused:
            text = str(refused)
        os.write(writer, text.encode()[:4000])
        os._exit(0)
    os.close(writer)
    said = os.read(reader, 4096).decode()
    os.waitpid(child, 0)
    must("re-initialize CUDA in forked subprocess" in said, f"the child said {said[:80]}")
    must(float(torch.ones(8, device="cuda").sum()) == 8, "the parent fails")
    return "refused in the child"


# ---- one here, all both ways


def run_one(name: str) -> int:
    began = time.perf_counter()
    try:
        note, state = FEATURES[name][1](), "pass"
    except Missing as absent:
        note, state = str(absent), "missing"
    except BaseException as why:  # noqa: BLE001 - any error is the result
        note, state = f"{type(why).__name__}: {why}"[:300], "FAIL"
    took = round(time.perf_counter() - began, 2)
    print(json.dumps({"feature": name, "state": state, "s": took, "note": note}), flush=True)
    return state == "FAIL"


def outside(name: str) -> dict[str, Any]:
    words = [sys.executable, __file__, name]
    try:
        done = subprocess.run(
            words, cwd="/tmp", capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"state": "FAIL", "note": "timed out"}
    return last_line(done.stdout.splitlines(), done.stderr.splitlines())


def last_line(out: list[str], err: list[str]) -> dict[str, Any]:
    for line in reversed(out):
        if line.startswith("{") and '"feature"' in line:
            return dict(json.loads(line))
    return {"state": "FAIL", "note": " / ".join([*out, *err][-4:])[-300:]}


def inside(names: list[str]) -> dict[str, dict[str, Any]]:
    from pool import pause, pool, say  # noqa: PLC0415 - not in a task

    found: dict[str, dict[str, Any]] = {}
    with pool(18481, "exclusive") as made, ExitStack() as stack:
        begun = {}
        for name in names:
            needs = ("--gpu", "1") if FEATURES[name][0] else ()
            size = ("--cpus", "2", "--memory", MEMORY, "--disk", DISK)
            words = ("run", *needs, *size, "--input", "features.py")
            command = ("--", "python3", "features.py", name)
            begun[name] = stack.enter_context(made.begun(*words, *command))
            if len(begun) == 1:
                pause(2)  # the others find the file uploaded
        until = time.perf_counter() + 2 * LIMIT_S
        for name, end in begun.items():
            ran = end(max(1.0, until - time.perf_counter()))
            found[name] = last_line(ran.out, ran.err)
            say(feature=name, inside=found[name])
    return found


def main() -> int:
    names = sys.argv[2:] or list(FEATURES)
    with ThreadPoolExecutor(4) as four:
        bare = dict(zip(names, four.map(outside, names), strict=True))
    within = inside(names)
    print("\n| feature | bare | s | in gpool | s | note |\n|---|---|---|---|---|---|")
    for name in names:
        one, two = bare[name], within.get(name, {"state": "FAIL", "note": "no answer"})
        note = two.get("note") if two.get("state") == "FAIL" else two.get("note") or one.get("note")
        cells = (name, one["state"], one.get("s", ""), two["state"], two.get("s", ""), note)
        print("| " + " | ".join(str(cell) for cell in cells) + " |")
    failed = [name for name in names if within.get(name, {}).get("state") == "FAIL"]
    differ = [name for name in names if within.get(name, {}).get("state") != bare[name]["state"]]
    verdict = {
        "verdict": "features",
        "pass": not differ and len(failed) < len(names),
        "of": len(names),
        "failed": failed,
        "not as bare": differ,
    }
    if os.environ.get("OUT"):
        both = {name: {"bare": bare[name], "gpool": within.get(name)} for name in names}
        text = json.dumps({**verdict, "features": both}, indent=1)
        Path(os.environ["OUT"], "features.json").write_text(text + "\n")
    print(json.dumps(verdict), flush=True)
    return not verdict["pass"]


if __name__ == "__main__":
    sys.exit(run_one(sys.argv[1]) if len(sys.argv) == 2 and sys.argv[1] in FEATURES else main())
