"""Package indexes of this node, from pip's and uv's configuration. Makes no connection.

Uses addresses, folders, certificate and proxies only; no other variable of the agent.
"""

from __future__ import annotations

import configparser
import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
PAGES_LOOKED_AT = 20
LINKS_LOOKED_AT = 3
_HREF = re.compile(r"""href\s*=\s*["']([^"'#]+)""", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Indexes:
    """Indexes in order of use; an empty `default` is the installer's own."""

    default: str = ""
    extra: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    no_index: bool = False
    certificate: Path | None = None
    trusted_hosts: tuple[str, ...] = ()
    proxies: tuple[tuple[str, str], ...] = ()  # by variable name
    as_pip: bool = False  # best version of all indexes, not the first index that has any

    @property
    def addresses(self) -> tuple[str, ...]:
        indexes = () if self.no_index else (self.default, *self.extra)
        return tuple(dict.fromkeys(one for one in (*indexes, *self.find_links) if one))

    @property
    def remote(self) -> tuple[str, ...]:
        return tuple(one for one in self.addresses if _scheme(one) in ("http", "https"))

    @property
    def asks_default(self) -> bool:
        return not self.no_index and not self.default

    @property
    def secrets(self) -> tuple[str, ...]:
        found = []
        for address in (*self.addresses, *(value for _, value in self.proxies)):
            user, at, _ = urlsplit(address).netloc.rpartition("@")
            if at:
                found += [user, user.partition(":")[2] or user]
        return tuple(dict.fromkeys(found))

    def reachable(self, *, network: bool) -> Indexes | None:
        """Drop missing folders and, without a network, remote indexes; None: none is left."""

        def there(address: str) -> bool:
            path = path_of(address)
            return network if path is None else path.exists()

        links = tuple(one for one in self.find_links if there(one))
        if self.no_index:
            return replace(self, default="", extra=(), find_links=links) if links else None
        extra = tuple(one for one in self.extra if there(one))
        if network and (not self.default or there(self.default)):
            return replace(self, extra=extra, find_links=links)
        indexes = (self.default, *extra) if self.default and there(self.default) else extra
        if indexes:
            return replace(self, default=indexes[0], extra=indexes[1:], find_links=links)
        return (
            replace(self, default="", extra=(), find_links=links, no_index=True) if links else None
        )

    def folders(self) -> tuple[Path, ...]:
        found = []
        for address in self.addresses:
            path = path_of(address)
            if path is not None and path.exists():
                found.append(path if address in self.find_links else _with_files(path))
        whole = sorted(set(found))
        return tuple(
            path for path in whole if not any(path.is_relative_to(o) for o in whole if o != path)
        )

    @property
    def options(self) -> tuple[str, ...]:
        """Words for uv's command line: uv has no variable for them."""
        return ("--no-index",) if self.no_index else ()

    def variables(self) -> tuple[tuple[str, str], ...]:
        """uv's variables; proxies apart, which a sandbox without a network does not get."""
        told: list[tuple[str, str]] = []
        if not self.no_index:
            if self.default:
                told.append(("UV_DEFAULT_INDEX", self.default))
            if self.extra:
                told.append(("UV_INDEX", " ".join(self.extra)))
        if self.find_links:
            told.append(("UV_FIND_LINKS", ",".join(self.find_links)))
        if self.trusted_hosts:
            told.append(("UV_INSECURE_HOST", " ".join(self.trusted_hosts)))
        if self.as_pip:
            told.append(("UV_INDEX_STRATEGY", "unsafe-best-match"))
        return tuple(told)


def path_of(address: str) -> Path | None:
    scheme = _scheme(address)
    if scheme == "file":
        return Path(unquote(urlsplit(address).path))
    return None if scheme else Path(address).expanduser()


def _scheme(address: str) -> str:
    return address.partition("://")[0].lower() if "://" in address else ""


def _with_files(index: Path) -> Path:
    if not index.is_dir():
        return index
    for name in sorted(os.listdir(index))[:PAGES_LOOKED_AT]:
        page = index / name / "index.html"
        if not page.is_file():
            continue
        for href in _HREF.findall(page.read_text("utf-8", "replace"))[:LINKS_LOOKED_AT]:
            target = path_of(urljoin(f"file://{index}/{name}/", href))
            if target is not None and not target.is_relative_to(index):
                return index.parent if target.is_relative_to(index.parent) else index
    return index


def configuration_files(environ: Mapping[str, str], home: Path, prefix: Path) -> list[Path]:
    """Weakest first."""
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    files = [
        Path("/etc/xdg/pip/pip.conf"),
        Path("/etc/pip.conf"),
        home / ".pip" / "pip.conf",
        config / "pip" / "pip.conf",
        prefix / "pip.conf",
        Path("/etc/uv/uv.toml"),
        config / "uv" / "uv.toml",
    ]
    if named := environ.get("PIP_CONFIG_FILE"):
        files = [file for file in files if file.name != "pip.conf"]
        files += [Path(named)] if named != os.devnull else []
    if named := environ.get("UV_CONFIG_FILE"):
        files = [file for file in files if file.name != "uv.toml"] + [Path(named)]
    return files


def read_indexes(files: Iterable[Path], environ: Mapping[str, str]) -> Indexes:
    """Unreadable files are skipped, as pip and uv do."""
    found = Indexes(as_pip=True)
    for file in files:
        if file.is_file():
            is_uv = file.suffix == ".toml"
            found = _with_uv(found, file) if is_uv else _with_pip(found, _pip_options(file))
    from_pip = {
        name.removeprefix("PIP_").lower().replace("_", "-"): value
        for name, value in environ.items()
        if name.startswith("PIP_") and value
    }
    found = _with_uv_variables(_with_pip(found, from_pip), environ)
    certificate = environ.get("SSL_CERT_FILE")
    if found.certificate is None and certificate and Path(certificate).is_file():
        found = replace(found, certificate=Path(certificate))
    proxies = []
    for name in PROXIES:
        value = environ.get(name.lower()) or environ.get(name)
        if value and name not in dict(found.proxies):
            proxies.append((name, value))
    return replace(found, proxies=(*found.proxies, *proxies))


def _pip_options(file: Path) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read(file, "utf-8")
    except (configparser.Error, UnicodeDecodeError, OSError):
        return {}
    options: dict[str, str] = {}
    for section in ("global", "install"):
        if parser.has_section(section):
            options |= {
                name.replace("_", "-"): value for name, value in parser.items(section) if value
            }
    return options


def _with_pip(known: Indexes, options: Mapping[str, str]) -> Indexes:
    changed: dict[str, Any] = {}
    if "index-url" in options:
        changed["default"] = options["index-url"].strip()
    if "extra-index-url" in options:
        changed["extra"] = tuple(options["extra-index-url"].split())
    if "find-links" in options:
        changed["find_links"] = tuple(options["find-links"].split())
    if "no-index" in options:
        changed["no_index"] = options["no-index"].strip().lower() in ("1", "true", "yes", "on")
    if "trusted-host" in options:
        changed["trusted_hosts"] = tuple(options["trusted-host"].split())
    if "cert" in options and Path(options["cert"].strip()).is_file():
        changed["certificate"] = Path(options["cert"].strip())
    if "proxy" in options:
        proxy = options["proxy"].strip()
        changed["proxies"] = (("HTTP_PROXY", proxy), ("HTTPS_PROXY", proxy))
    return replace(known, **changed)


def _with_uv(known: Indexes, file: Path) -> Indexes:
    try:
        table = tomllib.loads(file.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError):
        return known
    merged = {**table, **(table["pip"] if isinstance(table.get("pip"), dict) else {})}
    changed: dict[str, Any] = {}
    if isinstance(merged.get("index-url"), str):
        changed["default"] = merged["index-url"]
    extra = _texts(merged.get("extra-index-url"))
    for index in merged.get("index") or ():
        url = index.get("url") if isinstance(index, dict) else None
        if isinstance(url, str) and not index.get("explicit"):
            if index.get("default"):
                changed["default"] = url
            else:
                extra = (*extra, url)
    if extra:
        changed["extra"] = extra
    if links := _texts(merged.get("find-links")):
        changed["find_links"] = links
    if isinstance(merged.get("no-index"), bool):
        changed["no_index"] = merged["no-index"]
    if changed:
        changed["as_pip"] = merged.get("index-strategy") == "unsafe-best-match"
    return replace(known, **changed)


def _texts(value: object) -> tuple[str, ...]:
    return tuple(one for one in value if isinstance(one, str)) if isinstance(value, list) else ()


def _with_uv_variables(known: Indexes, environ: Mapping[str, str]) -> Indexes:
    changed: dict[str, Any] = {}
    for name in ("UV_INDEX_URL", "UV_DEFAULT_INDEX"):
        if environ.get(name):
            changed["default"] = _unnamed(environ[name])
    extra: Sequence[str] = ()
    for name in ("UV_EXTRA_INDEX_URL", "UV_INDEX"):
        extra = (*extra, *(_unnamed(one) for one in shlex.split(environ.get(name, ""))))
    if extra:
        changed["extra"] = tuple(extra)
    if environ.get("UV_FIND_LINKS"):
        changed["find_links"] = tuple(environ["UV_FIND_LINKS"].split(","))
    if environ.get("UV_NO_INDEX", "").lower() in ("1", "true"):
        changed["no_index"] = True
    if changed:
        changed["as_pip"] = environ.get("UV_INDEX_STRATEGY") == "unsafe-best-match"
    return replace(known, **changed)


def _unnamed(index: str) -> str:
    return re.sub(r"^[A-Za-z0-9._-]+=(?=\w+://)", "", index)
