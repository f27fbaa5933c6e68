"""Download of packages for a build without a network: wheels into uv's cache, source archives into a folder.

A script, standard library only; runs in the download sandbox. Reads archives as data and runs no package code. Only a
selection: uv resolves the versions again, offline, among the files found here. One file because it is run by path,
without imports of gpool.
"""

from __future__ import annotations

import base64
import email.parser
import hashlib
import os
import re
import shutil
import ssl
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit
from urllib.request import Request, urlopen  # noqa: TID251 - in a sandbox, without packages

FETCHED, UNREACHABLE, MISSING = 75, 69, 1
"""Exit codes: every requested package was found; an index does not answer; a requested package was not found."""
MOST_PACKAGES = 300
PAGE_BYTES = 32 * 1024 * 1024
TEXT_BYTES = 1024 * 1024
ANSWER_WITHIN_S = 30.0
SUFFIXES = (".tar.gz", ".tar.bz2", ".tar.xz", ".tgz", ".zip")
BUILD_DEFAULTS = ("setuptools>=40.8.0", "wheel")  # of an archive without a pyproject.toml
REFUSALS = (401, 403, 407)  # the node's own configuration is wrong

_REQUIREMENT = re.compile(
    r"\s*([A-Za-z0-9][\w.-]*)\s*(?:\[([^\]]*)\])?\s*\(?([^;()]*)\)?\s*(?:;(.*))?"
)
_VERSION = re.compile(r"v?(?:(\d+)!)?(\d+(?:\.\d+)*)(?:[-.]?post(\d*))?", re.IGNORECASE)
_CLAUSE = re.compile(r"(===|==|!=|<=|>=|~=|<|>)\s*(\S+)")
_EXTRA = re.compile(r"""extra\s*==\s*["']([^"']+)["']""")


def report(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def folded(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# ---- versions


def release(version: str) -> tuple[int, ...] | None:
    """Sort key of a final or post-release; None for others, which only an exact pin selects."""
    found = _VERSION.fullmatch(version)
    if found is None:
        return None
    numbers = [int(part) for part in found[2].split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    post = -1 if found[3] is None else int(found[3] or 0)
    return (int(found[1] or 0), *numbers, -1, post)


def permits(clauses: str, version: str) -> bool:
    """Compare as PEP 440 does for plain numbers; an unreadable clause permits."""
    key = release(version)
    for one in clauses.split(","):
        found = _CLAUSE.fullmatch(one.strip())
        if found is None:
            continue
        operator, wanted = found[1], found[2]
        if operator in ("==", "===") and version == wanted:
            continue
        if key is None:
            return False
        if wanted.endswith(".*"):
            inside = _prefix(key, wanted[:-2])
            if inside is not (operator == "=="):
                return False
            continue
        limit = release(wanted)
        if limit is None:
            continue
        holds = {
            "==": key == limit,
            "===": key == limit,
            "!=": key != limit,
            "<=": key <= limit,
            ">=": key >= limit,
            "<": key < limit,
            ">": key > limit,
            "~=": key >= limit and _prefix(key, wanted.rpartition(".")[0]),
        }
        if not holds[operator]:
            return False
    return key is not None or "==" in clauses


def _prefix(key: tuple[int, ...], text: str) -> bool:
    wanted = [int(part) for part in re.findall(r"\d+", text)]
    numbers = [*key[1:-2], *([0] * len(wanted))]
    return numbers[: len(wanted)] == wanted


# ---- requirements


@dataclass(frozen=True, slots=True)
class PackageRequest:
    name: str  # folded
    text: str  # without its marker
    clauses: str
    extras: frozenset[str]


def request_of(text: str, extras: frozenset[str] = frozenset()) -> PackageRequest | None:
    """None for a dependency of an extra that nobody asked for. Other markers are ignored: uv evaluates them."""
    found = _REQUIREMENT.fullmatch(text.split(" --hash", 1)[0].strip())
    if found is None:
        return None
    needed = {folded(one) for one in _EXTRA.findall(found[4] or "")}
    if needed and not needed & extras:
        return None
    given = frozenset(folded(one.strip()) for one in (found[2] or "").split(",") if one.strip())
    named = f"[{','.join(sorted(given))}]" if given else ""
    clauses = found[3].strip()
    return PackageRequest(folded(found[1]), f"{found[1]}{named}{clauses}", clauses, given)


def requirements_in(metadata: str) -> list[str]:
    message = email.parser.Parser().parsestr(metadata, headersonly=True)
    return [str(one) for one in message.get_all("Requires-Dist") or ()]


# ---- indexes


@dataclass(frozen=True, slots=True)
class SourceArchive:
    name: str
    version: str
    address: str
    filename: str
    sha256: str = ""


class LinkParser(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self._page = page
        self.links: list[tuple[str, dict[str, str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if tag == "base" and "href" in found:
            self._page = urljoin(self._page, found["href"])
        if tag == "a" and "href" in found:
            self.links.append((urljoin(self._page, found["href"]), found))


@dataclass(frozen=True, slots=True)
class IndexReader:
    """`indexes` have a page for each package, `links` are pages or folders of files."""

    indexes: Sequence[str]
    links: Sequence[str]
    trusted: Sequence[str] = ()

    def open(self, address: str) -> Any:
        parts = urlsplit(address)
        user, at, host = parts.netloc.rpartition("@")
        headers = {"Accept": "text/html", "User-Agent": "gpool"}
        if at:
            token = base64.b64encode(unquote(user).encode()).decode()
            headers["Authorization"] = f"Basic {token}"
        plain = urlunsplit(parts._replace(netloc=host))
        context = ssl.create_default_context()
        if parts.hostname in self.trusted or host in self.trusted:
            context = ssl._create_unverified_context()
        return urlopen(Request(plain, headers=headers), timeout=ANSWER_WITHIN_S, context=context)

    def failure(self) -> str:
        """Return why an index on the network cannot be used from here; "" if all answer."""
        for index in self.indexes:
            if urlsplit(index).scheme in ("http", "https"):
                why = self._failure_of(f"{index.rstrip('/')}/pip/")
                if why:
                    return f"{urlsplit(index).hostname}: {why}"
        return ""

    def _failure_of(self, page: str) -> str:
        try:
            links = self._read(page)
        except HTTPError as answer:
            refused = answer.code in REFUSALS or answer.code >= 500
            return f"status {answer.code}" if refused else ""
        except (OSError, ValueError) as error:
            return str(error)
        first = {urlsplit(address).netloc: address for address, _ in reversed(links)}
        for address in list(first.values())[:4]:
            try:
                self.open(address).close()
            except HTTPError:
                continue
            except (OSError, ValueError) as error:
                return f"{urlsplit(address).hostname}, where it keeps files: {error}"
        return ""

    def _read(self, page: str) -> list[tuple[str, dict[str, str]]]:
        with self.open(page) as answer:
            text = answer.read(PAGE_BYTES).decode("utf-8", "replace")
            parser = LinkParser(answer.url)
        parser.feed(text)
        return parser.links

    def archives(self, name: str) -> Iterator[SourceArchive]:
        pages = [_page(index, name) for index in self.indexes]
        for page in (*pages, *self.links):
            try:
                links = self._read(page)
            except (OSError, ValueError):
                continue  # an index without this package, or a folder: uv reads that itself
            for address, attributes in links:
                found = _archive(name, address, attributes)
                if found is not None:
                    yield found


def _page(index: str, name: str) -> str:
    page = f"{index.rstrip('/')}/{name}/"
    return page + "index.html" if urlsplit(index).scheme == "file" else page


def _archive(name: str, address: str, attributes: dict[str, str]) -> SourceArchive | None:
    parts = urlsplit(address)
    filename = unquote(parts.path.rpartition("/")[2])
    suffix = next((one for one in SUFFIXES if filename.endswith(one)), None)
    if suffix is None or "/" in filename or "data-yanked" in attributes:
        return None
    stem, dash, version = filename[: -len(suffix)].rpartition("-")
    python = ".".join(map(str, sys.version_info[:3]))
    if not dash or folded(stem) != name:
        return None
    if not permits(attributes.get("data-requires-python", ""), python):
        return None
    digest = parts.fragment.partition("sha256=")[2][:64]
    plain = urlunsplit(parts._replace(fragment=""))
    return SourceArchive(name, version, plain, filename, digest)


# ---- archives


def texts_of(archive: Path) -> dict[str, str]:
    """Return PKG-INFO and pyproject.toml at the top of a source archive."""
    found: dict[str, str] = {}

    def keep(path: str, data: bytes) -> None:
        folder, _, name = path.removeprefix("./").partition("/")
        if folder and name in ("PKG-INFO", "pyproject.toml"):
            found[name] = data.decode("utf-8", "replace")

    if archive.name.endswith(".zip"):
        with zipfile.ZipFile(archive) as opened:
            for entry in opened.infolist():
                if entry.filename.count("/") == 1 and entry.file_size <= TEXT_BYTES:
                    keep(entry.filename, opened.read(entry))
        return found
    with tarfile.open(archive) as unpacked:
        for member in unpacked:
            depth = member.name.removeprefix("./").count("/")
            if member.isfile() and depth == 1 and member.size <= TEXT_BYTES:
                data = unpacked.extractfile(member)
                keep(member.name, data.read() if data is not None else b"")
            if len(found) == 2:
                break
    return found


def build_requirements(project: str) -> list[str]:
    try:
        system = tomllib.loads(project).get("build-system", {}) if project else {}
    except tomllib.TOMLDecodeError:
        system = {}
    listed = system.get("requires") if isinstance(system, dict) else None
    return [str(one) for one in listed] if isinstance(listed, list) else list(BUILD_DEFAULTS)


# ---- the closure


@dataclass(slots=True)
class Closure:
    reader: IndexReader
    uv: str
    python: str
    sources: Path
    options: Sequence[str] = ()  # of `uv pip install`
    done: set[tuple[str, str]] = field(default_factory=set)

    def fetch(self, texts: Sequence[str]) -> bool:
        """Fetch these and their dependencies; return whether each of `texts` was found."""
        asked = [one for text in texts if (one := request_of(text)) is not None]
        found_all = True
        waiting = [*asked]
        while waiting and len(self.done) < MOST_PACKAGES:
            request = waiting.pop(0)
            key = (request.name, request.text)
            if key in self.done:
                continue
            self.done.add(key)
            needs = self._wheel(request)
            if needs is None:
                needs = self._source(request)
            if needs is None:
                found_all = found_all and request not in asked
                continue
            waiting += [
                one for text in needs if (one := request_of(text, request.extras)) is not None
            ]
        return found_all

    def _wheel(self, request: PackageRequest) -> list[str] | None:
        """Return its dependencies that are still to be fetched; None without a wheel."""
        if self._install(request.text) is not None:
            return []
        # a dependency has no wheel; the failed attempt has cached the metadata
        return self._install(request.text, "--no-deps")

    def _install(self, text: str, *options: str) -> list[str] | None:
        target = self.sources.parent / "target"
        words = [self.uv, "pip", "install", "--quiet", "--no-build", *options]
        words += [*self.options, "--python", self.python, "--target", str(target), text]
        try:
            if subprocess.run(words, capture_output=True, check=False).returncode:
                return None
            found = sorted(target.glob("*.dist-info/METADATA"))
            return requirements_in(found[0].read_text("utf-8", "replace")) if found else []
        finally:
            shutil.rmtree(target, ignore_errors=True)

    def _source(self, request: PackageRequest) -> list[str] | None:
        fitting = [
            one
            for one in self.reader.archives(request.name)
            if permits(request.clauses, one.version)
        ]
        if not fitting:
            return None
        best = max(fitting, key=lambda one: release(one.version) or ())
        kept = self.sources / best.filename
        if not kept.exists():
            try:
                self._download(best, kept)
            except (OSError, ValueError) as error:
                report(f"{best.filename} cannot be downloaded: {error}")
                return None
            report(f"downloaded {best.filename}, a source package")
        try:
            texts = texts_of(kept)
        except (OSError, tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
            report(f"{best.filename} cannot be read: {error}")
            return None
        needs = build_requirements(texts.get("pyproject.toml", ""))
        return [*needs, *requirements_in(texts.get("PKG-INFO", ""))]

    def _download(self, archive: SourceArchive, kept: Path) -> None:
        digest = hashlib.sha256()
        part = kept.with_name(kept.name + ".part")
        with self.reader.open(archive.address) as answer, part.open("wb") as file:
            while data := answer.read(1 << 20):
                digest.update(data)
                file.write(data)
        if archive.sha256 and digest.hexdigest() != archive.sha256:
            part.unlink()
            raise ValueError("its SHA-256 differs from the index's")
        part.rename(kept)


def main(requirements: str, sources: str) -> int:
    listed = os.environ
    reader = IndexReader(
        listed.get("INDEXES", "").split(),
        listed.get("LINKS", "").split(),
        listed.get("TRUSTED", "").split(),
    )
    why = reader.failure()
    if why:
        report(f"a package index does not answer: {why}")
        return UNREACHABLE
    if not sources:
        return MISSING
    folder = Path(sources)
    folder.mkdir(parents=True)
    options = listed.get("OPTIONS", "").split()
    closure = Closure(reader, listed["UV"], listed["BASE"], folder, options)
    texts = [line for line in Path(requirements).read_text().splitlines() if line.strip()]
    return FETCHED if closure.fetch(texts) else MISSING


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""))
