"""Inputs and outputs: streamed, resumed, and never outside their folder."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from gpool import Client, Conflict, Invalid
from gpool.client.artifacts import gather
from gpool.client.values import OutputArtifact
from gpool.core.errors import InternalFault
from tests.client.standin import Pool


def put(pool: Pool, path: str, content: bytes, *, executable: bool = False) -> OutputArtifact:
    sha256 = hashlib.sha256(content).hexdigest()
    pool.artifacts[sha256] = content
    return OutputArtifact(path, sha256, len(content), executable)


def test_folders_are_gathered_with_relative_names(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x").write_text("x")
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    found = gather(["a/", "run.sh", "./run.sh"], tmp_path)
    assert [(file.path, file.executable) for file in found] == [("a/b/x", False), ("run.sh", True)]


@pytest.mark.parametrize("given", ["../outside", "/etc/passwd", "missing"])
def test_inputs_from_elsewhere_are_refused(tmp_path: Path, given: str) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (tmp_path / "outside").write_text("x")
    with pytest.raises(Invalid):
        gather([given], here)


def test_a_link_out_of_a_folder_of_inputs_is_refused(tmp_path: Path) -> None:
    """A folder from elsewhere may hold one to your keys."""
    (tmp_path / "key").write_text("secret")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").symlink_to(tmp_path / "key")
    with pytest.raises(Invalid, match="link out of it"):
        gather(["data"], tmp_path)
    (tmp_path / "data" / "x").unlink()
    (tmp_path / "data" / "x").symlink_to(tmp_path)
    with pytest.raises(Invalid, match="link out of it"):
        gather(["data"], tmp_path)


def test_what_cannot_be_looked_at_in_a_folder_of_inputs_is_named(tmp_path: Path) -> None:
    """As in a folder that is not ours to enter."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").symlink_to("a" * 300)
    with pytest.raises(Invalid, match=r"data/x' \(in input 'data'\) cannot be read"):
        gather(["data"], tmp_path)


def test_links_within_a_folder_of_inputs_are_what_they_lead_to(tmp_path: Path) -> None:
    (tmp_path / "data" / "run-5").mkdir(parents=True)
    (tmp_path / "data" / "run-5" / "x").write_text("x")
    (tmp_path / "data" / "latest").symlink_to("run-5")
    (tmp_path / "data" / "y").symlink_to("run-5/x")
    (tmp_path / "all").symlink_to("data")  # named by the caller: what it leads to
    found = ["latest/x", "run-5/x", "y"]
    for name in ("data", "all"):
        paths = [file.path for file in gather([name], tmp_path)]
        assert sorted(paths) == [f"{name}/{one}" for one in found]


@pytest.mark.parametrize(("target", "said"), [("..", "lies in"), ("nowhere", "link to nothing")])
def test_a_link_that_leads_nowhere_new_is_refused(tmp_path: Path, target: str, said: str) -> None:
    (tmp_path / "data" / "in").mkdir(parents=True)
    (tmp_path / "data" / "in" / "x").symlink_to(target)
    with pytest.raises(Invalid, match=said):
        gather(["data"], tmp_path)


def test_an_input_that_cannot_be_read_is_named(client: Client, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    [file] = gather(["data"], tmp_path)
    (tmp_path / "data").unlink()
    with pytest.raises(Invalid, match="'data' cannot be read"):
        client.artifacts.put_file(file)


def test_a_file_the_server_has_is_not_sent_again(
    client: Client, pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "data").write_bytes(b"x" * 3_000_000)
    for _ in range(2):
        client.artifacts.put_file(gather(["data"], tmp_path)[0])
    assert [method for method, _, _ in pool.requests] == ["HEAD", "PUT"]


def test_outputs_land_beneath_the_folder(client: Client, pool: Pool, tmp_path: Path) -> None:
    outputs = [put(pool, "model/weights", b"w"), put(pool, "go", b"#!", executable=True)]
    written = client.artifacts.fetch(outputs, tmp_path / "into")
    assert (tmp_path / "into/model/weights").read_bytes() == b"w"
    assert os.access(tmp_path / "into/go", os.X_OK)
    assert written == [tmp_path / "into/model/weights", tmp_path / "into/go"]
    assert sorted(p.name for p in (tmp_path / "into").rglob("*")) == ["go", "model", "weights"]


def test_a_broken_download_goes_on_where_it_was(client: Client, pool: Pool, tmp_path: Path) -> None:
    content = os.urandom(100_000)
    output = put(pool, "big", content)
    pool.break_after = 30_000
    client.artifacts.fetch([output], tmp_path)
    assert (tmp_path / "big").read_bytes() == content
    ranges = [headers.get("range") for _, _, headers in pool.requests]
    assert ranges == [None, "bytes=30000-", "bytes=60000-", "bytes=90000-"]


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "a//x", "x\n"])
def test_an_output_that_leaves_its_folder_is_refused(
    client: Client, pool: Pool, tmp_path: Path, path: str
) -> None:
    with pytest.raises(Invalid):
        client.artifacts.fetch([put(pool, path, b"x")], tmp_path / "into")


def test_a_link_on_the_way_is_not_followed(client: Client, pool: Pool, tmp_path: Path) -> None:
    into, outside = tmp_path / "into", tmp_path / "outside"
    into.mkdir()
    outside.mkdir()
    (into / "model").symlink_to(outside)
    with pytest.raises(Conflict, match="link"):
        client.artifacts.fetch([put(pool, "model/weights", b"w")], into)
    assert list(outside.iterdir()) == []


def test_a_link_in_the_place_of_an_output_is_replaced_not_followed(
    client: Client, pool: Pool, tmp_path: Path
) -> None:
    into = tmp_path / "into"
    into.mkdir()
    (tmp_path / "precious").write_text("precious")
    (into / "out").symlink_to(tmp_path / "precious")
    client.artifacts.fetch([put(pool, "out", b"new")], into)
    assert (tmp_path / "precious").read_text() == "precious"
    assert (into / "out").read_text() == "new"
    assert not (into / "out").is_symlink()


def test_bytes_that_do_not_match_their_hash_are_not_kept(
    client: Client, pool: Pool, tmp_path: Path
) -> None:
    output = put(pool, "out", b"right")
    pool.artifacts[output.sha256] = b"wrong"
    with pytest.raises(InternalFault, match="does not match"):
        client.artifacts.fetch([output], tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["漢" * 80, "x" * 255])
def test_an_output_may_have_as_long_a_name_as_a_file_has(
    client: Client, pool: Pool, tmp_path: Path, name: str
) -> None:
    assert client.artifacts.fetch([put(pool, name, b"x")], tmp_path) == [tmp_path / name]
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_what_cannot_be_written_is_said_and_nothing_is_left(
    client: Client, pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "here" / "out").mkdir(parents=True)
    output = put(pool, "out", b"x")
    with pytest.raises(Conflict, match="cannot be written to"):
        client.artifacts.fetch([output], tmp_path / "file")
    with pytest.raises(Conflict, match="a folder of that name"):
        client.artifacts.fetch([output], tmp_path / "here")
    assert [file.name for file in (tmp_path / "here").iterdir()] == ["out"]


def test_a_link_in_the_place_of_a_half_written_output_is_refused(
    client: Client, pool: Pool, tmp_path: Path
) -> None:
    output = put(pool, "out", b"x")
    (tmp_path / "precious").write_text("precious")
    into = tmp_path / "into"
    into.mkdir()
    (into / f".out.{output.sha256[:16]}.part").symlink_to(tmp_path / "precious")
    with pytest.raises(Conflict, match="cannot be written"):
        client.artifacts.fetch([output], into)
    assert (tmp_path / "precious").read_text() == "precious"
