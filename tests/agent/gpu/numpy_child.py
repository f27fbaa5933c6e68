"""The agent's child for a GPU, with the numpy prover in the device's place; run as a program."""

from __future__ import annotations

import sys

from gpool.agent.gpu_verification.child import frames_from, frames_to
from gpool.core.gpu_verification import keys_of
from gpool.wire.frames import AnswerNow, ExamineGpu, GpuAnswered, GpuCommitted, GpuOpened, OpenTiles
from tests.tools.gpu_prover import NumpyProver

if __name__ == "__main__":
    read, write = frames_from(sys.stdin.buffer), frames_to(sys.stdout.buffer)
    asked = read()
    assert isinstance(asked, ExamineGpu)
    prover = NumpyProver(asked.size, keys_of(asked.seed, asked.node, asked.uuid, asked.trial))
    root = prover.commit()
    write(GpuCommitted(asked.trial, root))
    while (frame := read()) is not None:
        if isinstance(frame, AnswerNow):
            write(GpuAnswered(asked.trial, prover.answer(frame.nonce, root, asked.rounds)))
        elif isinstance(frame, OpenTiles):
            write(GpuOpened(asked.trial, prover.open(frame.tiles)))
