"""Outputs a task leaves: plain files come back, and nothing else does, whatever it is called or points to."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from gpool.agent.runtime.protocol import BadOutput
from gpool.agent.runtime.work_directory import WorkDirectory


@pytest.fixture
def place(tmp_path: Path) -> WorkDirectory:
    made = WorkDirectory(tmp_path / "place", os.geteuid())
    made.make()
    return made


@pytest.fixture
def into(tmp_path: Path) -> Path:
    path = tmp_path / "into"
    path.mkdir()
    return path


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        here = os.open(path.parent, os.O_PATH)
        listening.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


SPECIAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "link to a host file": (lambda path: path.symlink_to("/etc/hostname"), "symbolic link"),
    "link to a secret": (lambda path: path.symlink_to("/etc/shadow"), "symbolic link"),
    "dangling link": (lambda path: path.symlink_to("nowhere"), "symbolic link"),
    "fifo": (os.mkfifo, "FIFO"),
    "socket": (make_socket, "socket"),
    "directory": (lambda path: path.mkdir(), "ask for 'out/'"),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_only_plain_files_are_taken(name: str, place: WorkDirectory, into: Path) -> None:
    make, said = SPECIAL[name]
    make(place.work / "out")
    with pytest.raises(BadOutput, match=said):
        place.collect(["out"], into, 1 << 20)
    assert os.listdir(into) == []


def test_a_link_in_the_middle_of_a_path_is_not_followed(
    place: WorkDirectory, into: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("key")
    (place.work / "model").symlink_to(tmp_path / "secret")
    for wanted in ("model/key", "model/"):
        with pytest.raises(BadOutput, match="symbolic link"):
            place.collect([wanted], into, 1 << 20)


def test_a_link_inside_a_wanted_directory_is_refused(place: WorkDirectory, into: Path) -> None:
    (place.work / "model").mkdir()
    (place.work / "model" / "x").symlink_to("/etc/shadow")
    with pytest.raises(BadOutput, match=r"model/x.*symbolic link"):
        place.collect(["model/"], into, 1 << 20)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another's file")
def test_a_hard_link_to_a_foreign_file_is_refused(
    place: WorkDirectory, into: Path, tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_text("secret")
    os.chown(foreign, 4242, 4242)
    os.link(foreign, place.work / "out")
    with pytest.raises(BadOutput, match="belongs to another user"):
        place.collect(["out"], into, 1 << 20)


@pytest.mark.parametrize(
    "bad", ["../x", "/etc/passwd", "a/../../x", "a//b", "a\nb", "a\0b", "a\u202eb", ""]
)
def test_a_name_that_is_not_plain_is_refused(bad: str, place: WorkDirectory, into: Path) -> None:
    with pytest.raises(BadOutput):
        place.collect([bad], into, 1 << 20)


@pytest.mark.parametrize("bad", [b"a\nb", b"\xff\xfe", "a\u202eb".encode()])
def test_a_bad_name_in_a_wanted_directory_is_refused(
    bad: bytes, place: WorkDirectory, into: Path
) -> None:
    (place.work / "m").mkdir()
    Path(os.fsdecode(bytes(place.work / "m") + b"/" + bad)).write_text("x")
    with pytest.raises(BadOutput, match="invisible"):
        place.collect(["m/"], into, 1 << 20)


def test_names_that_some_machines_take_for_one_are_refused(
    place: WorkDirectory, into: Path
) -> None:
    (place.work / "m").mkdir()
    for name in ("Model", "model"):
        (place.work / "m" / name).write_text(name)
    with pytest.raises(BadOutput, match="one name on some machines"):
        place.collect(["m/"], into, 1 << 20)


def test_a_sparse_terabyte_is_refused_before_it_is_read(place: WorkDirectory, into: Path) -> None:
    with (place.work / "big").open("wb") as big:
        big.truncate(1 << 40)
    with pytest.raises(BadOutput, match="over the disk limit"):
        place.collect(["big"], into, 1 << 30)


def test_outputs_together_keep_to_the_quota(place: WorkDirectory, into: Path) -> None:
    for name in "abc":
        (place.work / name).write_bytes(os.urandom(400))
    assert len(place.collect(["a", "b"], into, 1000)) == 2
    with pytest.raises(BadOutput, match="over the disk limit"):
        place.collect(["a", "b", "c"], into, 1000)


def test_an_output_asked_for_twice_comes_once(place: WorkDirectory, into: Path) -> None:
    (place.work / "m").mkdir()
    (place.work / "m" / "x").write_text("x")
    (place.work / "m" / "y").write_text("y")
    found = place.collect(["m/", "m/x", "m/x"], into, 1000)
    assert sorted(output.path for output in found) == ["m/x", "m/y"]


def test_an_executable_output_stays_one(place: WorkDirectory, into: Path) -> None:
    (place.work / "run").write_text("#!/bin/sh\n")
    (place.work / "run").chmod(0o755)
    assert [o.executable for o in place.collect(["run"], into, 1000)] == [True]


def test_what_a_task_made_unreadable_is_still_collected_and_removed(
    place: WorkDirectory, into: Path
) -> None:
    (place.work / "m").mkdir()
    (place.work / "m" / "x").write_text("x")
    (place.work / "m" / "x").chmod(0)
    (place.work / "m").chmod(0)
    assert len(place.collect(["m/"], into, 1000)) == 1
    place.remove()
    assert not place.root.exists()


def test_removing_follows_no_link(place: WorkDirectory, tmp_path: Path) -> None:
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep" / "file").write_text("x")
    (place.work / "link").symlink_to(tmp_path / "keep")
    place.remove()
    assert (tmp_path / "keep" / "file").exists()
    assert not place.root.exists()


def test_names_too_long_for_a_report_are_refused(place: WorkDirectory, into: Path) -> None:
    """The end of the task names all its outputs in one frame: past its limit the node would be cut off for good."""
    folder = place.work / "out"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for depth in range(3):
            os.mkdir(f"{depth}" * 250, dir_fd=descriptor)
            below = os.open(f"{depth}" * 250, os.O_RDONLY | os.O_DIRECTORY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        for number in range(4000):
            os.close(os.open(f"{number:0250}", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))
    finally:
        os.close(descriptor)
    with pytest.raises(BadOutput, match="archive"):
        place.collect(["out/"], into, 1 << 30)


@pytest.mark.parametrize("name", SPECIAL)
def test_the_end_of_a_special_file_is_not_read(name: str, place: WorkDirectory) -> None:
    make, _ = SPECIAL[name]
    make(place.work / "out")
    assert place.read_end("out", 100) == b""


def test_only_the_end_of_a_huge_file_is_read(place: WorkDirectory) -> None:
    with (place.work / "out").open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"0.4 epoch 4\n")
    assert place.read_end("out", 12) == b"0.4 epoch 4\n"
    assert place.read_end("missing", 12) == b""
