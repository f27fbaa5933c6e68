"""Inputs and outputs: streamed, resumed, and never outside their folder."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from standin import Pool

from gpool import Client, Conflict, Invalid
from gpool.client.artifacts import gather
from gpool.client.results import Output
from gpool.core.errors import InternalFault


def put(pool: Pool, path: str, content: bytes, *, executable: bool = False) -> Output:
    sha256 = hashlib.sha256(content).hexdigest()
    pool.artifacts[sha256] = content
    return Output(path, sha256, len(content), executable)


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
