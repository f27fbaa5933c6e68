"""Slices with limits that hold, on a real GPU: MPS, time slices, MIG. Prints JSON lines, the last of them the verdicts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from pool import Pool, card_state, pause, pool, say, set_back, smi

CLIENT = ("--input", "cuda_client.py")
WORK = ("--input", "work.py")
GIB = 1 << 30
SIZES = (256, 512, 1024)
VERDICTS: dict[str, object] = {}


def alloc(*gib: float) -> tuple[str, ...]:
    sizes = ",".join(str(int(each * GIB)) for each in gib)
    return ("--", "sh", "-c", f"sleep 4 | python3 cuda_client.py hold {sizes}")


def slices(made: Pool, mode: str) -> None:
    """One within its slice, one over it, a neighbour that computes meanwhile."""
    with made.begun(
        "run", "--vram", "6GB", *WORK, "--", "python3", "work.py", "check", "14", "2"
    ) as near:
        pause(7)
        within = made.gpool("run", "--vram", "6GB", *CLIENT, *alloc(3), timeout=40)
        over = made.gpool("run", "--vram", "6GB", *CLIENT, *alloc(3, 8), timeout=40)
        logs = {
            str(file): file.read_text()[-700:] for file in Path("/run/gpool").glob("mps*/*/log/*")
        }
        neighbour = near(60)
    say(
        step="slices",
        logs=logs,
        processes=smi("--query-compute-apps=pid,used_memory", "--format=csv"),
    )
    say(step="slices", mode=mode, within=within.brief(), over=over.brief(), near=neighbour.brief())
    VERDICTS[f"{mode}: within its slice"] = within.rc == 0 and within.told("took") == 3 * GIB
    refused = over.told("refused") == 8 * GIB
    ended = any("GPU memory slice" in line for line in over.err)
    VERDICTS[f"{mode}: beyond its slice refused"] = refused or ended
    # a neighbour that did not run at all was not disturbed in its sums: the two are told apart
    VERDICTS[f"{mode}: neighbour ran"] = neighbour.rc == 0 or neighbour.told("wrong") is not None
    VERDICTS[f"{mode}: neighbour untouched"] = neighbour.rc == 0 and bool(neighbour.told("right"))


def throughput(made: Pool, mode: str) -> None:
    """Two tasks of one user side by side, by the size of their products: small ones leave a card idle when alone."""
    for size in SIZES:
        start = time.clock_gettime(time.CLOCK_REALTIME) + 9
        work = ("--", "python3", "work.py", "count", str(start), "5", str(size))
        words = ("run", "--gpu", "0.5", *WORK, *work)
        with made.begun(*words) as one, made.begun(*words) as two:
            first, second = one(60), two(60)
        done = (first.told("done") or 0) + (second.told("done") or 0)
        say(step="throughput", mode=mode, done=done, first=first.brief(), second=second.brief())
        VERDICTS[f"work under {mode}, {size}"] = int(done)


def attack(made: Pool) -> None:
    """A task that talks to the daemon itself, or goes around it."""
    orders = "get_server_list | nvidia-cuda-mps-control"
    script = (
        "export PATH=$PATH:/usr/local/nvidia/bin; (sleep 6 | python3 cuda_client.py hold 1073741824) & sleep 2; "
        "ls -la /tmp/nvidia-mps; "
        f"s=$(echo {orders}); echo servers $s; "
        'for p in $s; do printf "set_device_pinned_mem_limit $p 0 100G\\nget_device_pinned_mem_limit $p 0\\n" | nvidia-cuda-mps-control; done; '
        "printf 'set_default_device_pinned_mem_limit 0 100G\\nquit\\n' | nvidia-cuda-mps-control; "
        "unset CUDA_MPS_PINNED_DEVICE_MEM_LIMIT; sleep 1 | python3 cuda_client.py hold 9663676416; "
        "CUDA_MPS_PIPE_DIRECTORY=/tmp/none sh -c 'sleep 1 | python3 cuda_client.py hold 9663676416'; wait; true"
    )
    ran = made.gpool("run", "--vram", "6GB", *CLIENT, "--", "sh", "-c", script, timeout=60)
    say(step="attack", out=ran.out, err=ran.err, rc=ran.rc)
    took = [line for line in ran.lines if line.get("took") == 9663676416]
    VERDICTS["mps: a task cannot raise its limit"] = ran.rc != "timed out" and not took


def hardware(made: Pool) -> None:
    words = ("run", "--vram", "10GB", *WORK, "--", "python3", "work.py", "check", "12", "4")
    with made.begun(*words) as one:
        pause(1)  # the second does not upload the same file at the same instant
        with made.begun(*words, user="bob") as two:
            pause(9)
            during = smi("-L")
            first, second = one(60), two(60)
    say(step="mig", during=during, first=first.brief(), second=second.brief())
    over = made.gpool("run", "--vram", "10GB", *CLIENT, *alloc(3, 30), timeout=60)
    say(step="mig", over=over.brief(), log=made.grep("tenancy", "scrub", "unclean"))
    pause(6)
    after = smi("-L")
    whole = made.gpool("run", "--gpu", "1", "--", "nvidia-smi", "-L", timeout=60)
    say(step="mig", after=after, whole=whole.brief(), state=card_state())
    VERDICTS["mig: two strangers' instances at once"] = (
        sum("MIG " in line for line in during) == 2 and first.rc == 0 and second.rc == 0
    )
    VERDICTS["mig: right results"] = bool(first.told("right")) and bool(second.told("right"))
    VERDICTS["mig: beyond its instance refused"] = over.told("refused") == 30 * GIB
    VERDICTS["mig: destroyed with the leases"] = not any("MIG " in line for line in after)
    VERDICTS["mig: the whole card afterwards"] = whole.rc == 0


def by_mps() -> None:
    with pool(18471, "mps", "bob") as made:
        slices(made, "mps")
        attack(made)
        throughput(made, "mps")
        say(step="mps", log=made.grep("tenancy", "scrub", "unclean", "mps"))


def by_time() -> None:
    with pool(18472, "timeslice", "bob") as made:
        slices(made, "timeslice")
        throughput(made, "timeslice")


def by_mig() -> None:
    with pool(18473, "mig", "bob") as made:
        hardware(made)


def work_by(mode: str, port: int) -> Callable[[], None]:
    def run() -> None:
        with pool(port, mode, "bob") as made:
            throughput(made, mode)

    return run


STEPS: dict[str, Callable[[], None]] = {
    "mps": by_mps,
    "timeslice": by_time,
    "mig": by_mig,
}
MORE = {"mps-work": work_by("mps", 18476), "timeslice-work": work_by("timeslice", 18477)}

if __name__ == "__main__":
    say(before=card_state())
    for name in sys.argv[1:] or STEPS:
        try:
            (STEPS | MORE)[name]()
        except Exception as error:  # noqa: BLE001 - the other steps are worth knowing too
            say(step=name, failed=repr(error))
            set_back()
    for size in SIZES:
        mps, turns = (VERDICTS.get(f"work under {mode}, {size}") for mode in ("mps", "timeslice"))
        if isinstance(mps, int) and isinstance(turns, int) and turns:
            VERDICTS[f"mps / timeslice, {size}"] = round(mps / turns, 3)
    say(after=card_state())
    set_back()
    say(verdicts=VERDICTS)
