"""Calls of the `nft` program."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from typing import Any

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
WITHIN_S = 60.0


class NftFailed(Exception): ...


def program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=SYSTEM_PATH)


async def nft(*arguments: str, text: str = "") -> str:
    path = program("nft")
    if path is None:
        raise NftFailed("nft is not installed (Debian: apt-get install nftables)")
    given = _enclosed(text)
    try:
        child = await asyncio.create_subprocess_exec(
            path,
            *arguments,
            stdin=given,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={},
        )
    finally:
        os.close(given)
    try:
        async with asyncio.timeout(WITHIN_S):
            out, err = await child.communicate()
    except TimeoutError as silent:
        child.kill()
        await child.wait()
        raise NftFailed(f"nft did not answer within {WITHIN_S:g} s") from silent
    if child.returncode != 0:
        said = err.decode(errors="replace").strip().splitlines() or ["no error output"]
        raise NftFailed(said[0])
    return out.decode()


def _enclosed(text: str) -> int:
    """Text as a memory file: a pipe would have to be fed while the child reads."""
    descriptor = os.memfd_create("rules")
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(text.encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


async def load(text: str) -> None:
    """nft commits a file as one transaction."""
    await nft("-f", "-", text=text)


async def listed(*what: str) -> list[dict[str, Any]]:
    document = json.loads(await nft("-j", "list", *what))
    return [each for each in document["nftables"] if "metainfo" not in each]


def packets(objects: list[dict[str, Any]], name: str) -> int:
    counters = (each["counter"] for each in objects if "counter" in each)
    return sum(counter["packets"] for counter in counters if counter["name"] == name)
