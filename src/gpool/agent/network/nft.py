"""The `nft` program, started and read. Knows nothing of what the rules are for."""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import Any

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
WITHIN_S = 10.0


class NftFailed(Exception):
    """What nft said against it."""


def program(name: str) -> str | None:
    """Where it is, in the directories of administrators too."""
    return shutil.which(name) or shutil.which(name, path=SYSTEM_PATH)


async def nft(*arguments: str, text: str = "") -> str:
    path = program("nft")
    if path is None:
        raise NftFailed("there is no nft here (Debian: apt-get install nftables)")
    child = await asyncio.create_subprocess_exec(
        path,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={},
    )
    try:
        out, err = await asyncio.wait_for(child.communicate(text.encode()), WITHIN_S)
    except TimeoutError as silent:
        child.kill()
        await child.wait()
        raise NftFailed("nft did not answer within 10 s") from silent
    if child.returncode != 0:
        said = err.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise NftFailed(said[0])
    return out.decode()


async def load(text: str) -> None:
    """All of it or nothing: nft commits a file as one transaction."""
    await nft("-f", "-", text=text)


async def listed(*what: str) -> list[dict[str, Any]]:
    """Objects of a listing, without nft's own preamble."""
    document = json.loads(await nft("-j", "list", *what))
    return [each for each in document["nftables"] if "metainfo" not in each]


def packets(objects: list[dict[str, Any]], name: str) -> int:
    counters = (each["counter"] for each in objects if "counter" in each)
    return sum(counter["packets"] for counter in counters if counter["name"] == name)
