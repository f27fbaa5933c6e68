"""Kinds of commands: the same program and script is the same kind, another one is another."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpool.core.ids import UserId
from gpool.core.model import Requirements, TaskKind, TaskSpec
from gpool.core.scheduler.predict.run_times import MAX_LETTERS, kind_of, program_of
from gpool.core.scheduler.state.waiting import shape_of

KINDS = {
    "python train.py": "python train.py",
    "python train.py --lr 0.1 --epochs 20": "python train.py",
    "/opt/conda/bin/python3.12 -u -W ignore src/train.py 3": "python train.py",
    "python eval.py": "python eval.py",
    "python -m pkg.mod --fast": "python -m pkg.mod",
    "python -m pkg.other": "python -m pkg.other",
    "python -c pass": "python -c",
    "python": "python",
    "python -": "python -",
    "python job_00017.py": "python job_#.py",
    "python train_70b.py": "python train_70b.py",
    "torchrun --nproc_per_node 4 --standalone train.py --lr 1": "torchrun train.py",
    "torchrun --nnodes=2 -m pkg.train": "torchrun -m pkg.train",
    "python -m torch.distributed.run --nproc_per_node 4 train.py": "python -m torch.distributed.run train.py",
    "accelerate launch --num_processes 2 train.py": "accelerate train.py",
    "env -u HOME A=1 B=2 python train.py": "python train.py",
    "CUDA_LAUNCH_BLOCKING=1 python train.py": "python train.py",
    "timeout -k 5 2h nice -n 10 python train.py": "python train.py",
    "uv run train.py": "python train.py",
    "uv run --with numpy --python 3.12 python eval.py": "python eval.py",
    "uv --project . run -- python eval.py": "python eval.py",
    "uv pip install numpy": "uv",
    "conda run -n lab python train.py": "python train.py",
    "bash run.sh fast": "bash run.sh",
    "bash -o pipefail run.sh": "bash run.sh",
    "./run.sh": "sh run.sh",
    "bash -c 'python train.py --lr 1'": "python train.py",
    "bash -lc 'cd /data && export A=1; A=2 python3 eval.py > log'": "python eval.py",
    "sh -c 'set -e\npython train.py'": "python train.py",
    "sh -c 'exit 7'": "exit",
    "bash -c 'echo \"'": "bash -c",
    "bash -c": "bash -c",
    "sh -c 'cd /data'": "sh -c",
    "/usr/bin/ffmpeg -i a.mp4 b.mp4": "ffmpeg",
    "node --require x server.js": "node server.js",
    "Rscript fit.R": "Rscript fit.R",
    "julia -t 8 fit.jl": "julia fit.jl",
}


@pytest.mark.parametrize("line", KINDS)
def test_a_kind_is_the_program_and_its_script(line: str) -> None:
    assert kind_of(_words(line)) == KINDS[line]


def _words(line: str) -> list[str]:
    """As a shell splits it, but quotes that do not close are kept."""
    first, quote, text = line.partition("'")
    return [*first.split(), text.removesuffix("'")] if quote else first.split()


words = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.sampled_from(
            ("python", "bash", "-c", "-m", "env", "uv", "run", "--", "timeout", "a.py", "A=1")
        ),
    ),
    max_size=8,
)


@given(words)
@example(["bash", "-c", "bash -c 'bash -c \"x"])
@example(["env"] * 300)
@example(["", " ", "\n"])
def test_every_command_always_has_one_short_kind_of_its_own_program(command: list[str]) -> None:
    kind = kind_of(command)
    assert kind == kind_of(tuple(command))
    assert len(kind) <= MAX_LETTERS
    assert kind.startswith(program_of(kind))
    assert "\n" not in kind


@pytest.mark.parametrize("option", ["-c", "-lc", "-ec", "-euc"])
@pytest.mark.parametrize("text", ["echo one two", "echo 'it", "cd a && ls 'b", " "])
def test_a_text_that_cannot_be_read_is_never_a_kind_of_its_own(option: str, text: str) -> None:
    assert kind_of(["bash", option, text]) == "bash -c"


def test_the_longest_word_that_goes_through_is_no_more_work_than_its_letters() -> None:
    """By their square this would be minutes in which the server does nothing else."""
    word = f"a{'.' * (128 * 1024)}x"
    assert kind_of([word]) == word[:MAX_LETTERS]
    assert kind_of(["bash", "-c", word]) == kind_of(["env", word[:1000]])


@given(st.lists(st.text(max_size=20), max_size=6), st.sampled_from(("train.py", "eval.py")))
def test_what_stands_behind_the_script_never_tells_kinds_apart(
    arguments: list[str], script: str
) -> None:
    assert kind_of(["python", script, *arguments]) == f"python {script}"
    assert kind_of(["nice", "-n", "3", "python3", "-u", script, *arguments]) == f"python {script}"


def test_a_shape_is_told_apart_by_its_kind_and_not_by_its_options() -> None:
    def shape(*command: str) -> object:
        return shape_of(TaskSpec(TaskKind.COMMAND, Requirements(), command=command), UserId(1))

    assert shape("python", "train.py", "--lr", "1") == shape("python3", "train.py", "--lr", "2")
    assert shape("python", "train.py") != shape("python", "eval.py")
