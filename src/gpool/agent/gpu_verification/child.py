"""Measures or verifies one GPU in its own process: frames on stdin and stdout. Its end makes the driver free the memory."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from typing import BinaryIO

from gpool.agent.gpu_verification.cuda import CudaFailed, Device, NoCuda, measure
from gpool.agent.gpu_verification.prover import DeviceProver
from gpool.core.gpu_verification import keys_of
from gpool.wire.frames import (
    AnswerNow,
    ExamineGpu,
    FromGpu,
    GpuAnswered,
    GpuCommitted,
    GpuMeasured,
    GpuOpened,
    GpuUnable,
    MeasureGpu,
    OpenTiles,
    ServerFrame,
    decode_from_server,
    encode,
)

LENGTH = struct.Struct("<I")
MOST_DEVICES = 64


def device_with(uuid: str) -> Device:
    """Open the device; loading its kernels counts as part of the commitment."""
    for index in range(MOST_DEVICES):
        device = Device(index)
        if device.uuid == uuid:
            return device
        device.close()
    raise NoCuda(f"no device {uuid} here")


def serve(read: Callable[[], ServerFrame | None], write: Callable[[FromGpu], None]) -> None:
    first = read()
    if not isinstance(first, MeasureGpu | ExamineGpu):
        return
    trial = first.trial if isinstance(first, ExamineGpu) else 0
    try:
        with device_with(first.uuid) as device:
            if isinstance(first, MeasureGpu):
                write(GpuMeasured(first.uuid, measure(device)))
            else:
                _examine(device, first, read, write)
    except (CudaFailed, NoCuda) as error:
        write(GpuUnable(trial, first.uuid, str(error)))


def _examine(
    device: Device,
    asked: ExamineGpu,
    read: Callable[[], ServerFrame | None],
    write: Callable[[FromGpu], None],
) -> None:
    keys = keys_of(asked.seed, asked.node, asked.uuid, asked.trial)
    prover = DeviceProver(device, asked.size, keys)
    root = prover.commit()
    write(GpuCommitted(asked.trial, root))
    while (frame := read()) is not None:
        if isinstance(frame, AnswerNow):
            answer = prover.answer(frame.nonce, root, asked.rounds)
            write(GpuAnswered(asked.trial, answer))
        elif isinstance(frame, OpenTiles):
            write(GpuOpened(asked.trial, prover.open(frame.tiles)))
            return


def frames_from(source: BinaryIO) -> Callable[[], ServerFrame | None]:
    def read() -> ServerFrame | None:
        head = source.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        return decode_from_server(source.read(LENGTH.unpack(head)[0]))

    return read


def frames_to(sink: BinaryIO) -> Callable[[FromGpu], None]:
    def write(frame: FromGpu) -> None:
        data = encode(frame)
        sink.write(LENGTH.pack(len(data)) + data)
        sink.flush()

    return write


if __name__ == "__main__":
    serve(frames_from(sys.stdin.buffer), frames_to(sys.stdout.buffer))
