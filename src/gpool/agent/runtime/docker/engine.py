"""Client of the local container engine, Docker or Podman, through the docker SDK. Every call blocks.

The SDK's errors become `SandboxFailed` with the remedy. A remote engine is refused: it could not see the work directory.

The record precedes the container's end; the engine's notification may come later or be lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import docker  # type: ignore[import-untyped]
import requests
from docker.errors import (  # type: ignore[import-untyped]
    APIError,
    DockerException,
    ImageNotFound,
    NotFound,
)
from urllib3.exceptions import HTTPError

from gpool.agent.runtime.docker.images import (
    ContainerImage,
    ImagePull,
    answers_to,
    follow,
    image_from,
    wrong_reference,
)
from gpool.agent.runtime.protocol import SandboxFailed

KERNEL_LOG = "/dev/kmsg"
LONGEST_RECORD = 1 << 14
USER_RECORDS_FROM = 8  # a record's number is 8 × facility + severity; facility 0 is the kernel's
KILLED_FOR_A_LIMIT = re.compile(r"oom-kill:constraint=CONSTRAINT_MEMCG,.*?\boom_memcg=([^,]*),")


def records(path: str = KERNEL_LOG) -> Iterator[str]:
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # not root, or no such log here
        return
    try:
        while True:
            try:
                record = os.read(log, LONGEST_RECORD)
            except BrokenPipeError:  # overwritten meanwhile: the next read gives the next one
                continue
            except OSError:  # EAGAIN: this was the last
                return
            if not record:
                return
            yield record.decode("utf-8", "replace")
    finally:
        os.close(log)


def exceeded_its_limit(container: str, found: Iterable[str]) -> bool:
    """False if the machine or a group above ran out of memory: the container may be within its limit."""
    for record in found:
        about, _, text = record.partition(";")
        number = about.partition(",")[0]
        if not number.isdecimal() or int(number) >= USER_RECORDS_FROM:
            continue
        limited = KILLED_FOR_A_LIMIT.match(text)
        if limited is not None and container in limited[1]:
            return True
    return False


UNIX = "unix://"
USUAL_SOCKETS = ("/run/docker.sock", "/run/podman/podman.sock")
TIMEOUT_S = 120
POOL = 64
LATE_NOTICE = timedelta(seconds=2)  # Docker's event may come so late; whole seconds count
FRACTION = re.compile(r"\.(\d{1,6})\d*")
REMAPPED = re.compile(r"/(\d+)\.(\d+)$")  # suffix of the engine's directory under userns-remap
PullObserver = Callable[[ImagePull], None]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    kind: str  # "docker" or "podman"
    runtimes: tuple[str, ...]  # configured OCI runtimes
    rootless: bool
    first_uid: int  # on the host, of a container's uid 0; 0: not remapped
    cdi_folders: tuple[str, ...]  # whose specs the engine applies to names in `DeviceRequests`
    default_runtime: str = ""
    cpusets: bool = False  # it can restrict containers to some CPUs


@dataclass(frozen=True, slots=True)
class ContainerExit:
    code: int
    out_of_memory: bool
    detail: str
    ran: bool


def usual_socket(environ: Mapping[str, str]) -> str:
    asked = environ.get("DOCKER_HOST", "")
    if asked:
        return asked
    personal = os.path.join(environ.get("XDG_RUNTIME_DIR", "/nowhere"), "podman", "podman.sock")
    for path in (*USUAL_SOCKETS, personal):
        if os.path.exists(path):
            return UNIX + path
    return ""


def facts_from(info: Mapping[str, Any], version: Mapping[str, Any]) -> EngineFacts:
    names = {str(part.get("Name")) for part in version.get("Components") or ()}
    options = [str(option) for option in info.get("SecurityOptions") or ()]
    remapped = any("name=userns" in option for option in options)
    found = REMAPPED.search(str(info.get("DockerRootDir", ""))) if remapped else None
    is_podman = "Podman Engine" in names
    return EngineFacts(
        kind="podman" if is_podman else "docker",
        runtimes=tuple(sorted(info.get("Runtimes") or ())),
        rootless=any("rootless" in option for option in options) or bool(info.get("Rootless")),
        first_uid=int(found.group(1)) if found else 0,
        # Podman's Docker interface ignores `DeviceRequests` without an error
        cdi_folders=() if is_podman else tuple(info.get("CDISpecDirs") or ()),
        default_runtime=str(info.get("DefaultRuntime") or ""),
        cpusets=info.get("CPUSet") is True,
    )


def _instant(text: str) -> datetime:
    return datetime.fromisoformat(FRACTION.sub(r".\1", text))


def _explanation(error: Exception) -> str:
    return str(getattr(error, "explanation", None) or error).strip()


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    try:
        yield
    except (DockerException, requests.RequestException, HTTPError, OSError) as error:
        raise SandboxFailed(f"{what}: {_explanation(error)}") from error


class EngineClient:
    """Thread-safe. Only `wait` and `pull` are long."""

    def __init__(self, address: str) -> None:
        if not address:
            raise SandboxFailed("no container engine is running: start Docker or podman.socket")
        if not address.startswith(UNIX):
            raise SandboxFailed(
                f"the engine at {address} is not on this machine; gpool needs a unix socket"
            )
        self.socket = address.removeprefix(UNIX)
        with translated(f"the engine at {self.socket} does not answer"):
            self._api = docker.APIClient(
                base_url=address, version="auto", timeout=TIMEOUT_S, max_pool_size=POOL
            )
            self.facts = facts_from(self._api.info(), self._api.version())

    def close(self) -> None:
        self._api.close()

    def ping(self) -> None:
        with translated(f"the engine at {self.socket} does not answer"):
            self._api.ping()

    def find(self, reference: str) -> ContainerImage | None:
        wrong = wrong_reference(reference)
        if wrong:
            raise SandboxFailed(wrong)
        with translated(f"cannot look for image {reference}"):
            try:
                image = image_from(self._api.inspect_image(reference))
            except ImageNotFound:
                return None
        return image if answers_to(image, reference) else None

    def pull(self, reference: str, observe: PullObserver) -> ContainerImage:
        name, _, digest = reference.partition("@")
        if not name or reference.startswith("sha256:"):
            raise SandboxFailed(
                f"image {reference} is not on this node, and an id alone cannot be pulled: write name@sha256:…"
            )
        tag = digest or ("" if ":" in name.rpartition("/")[2] else "latest")
        try:
            documents = self._api.pull(name, tag=tag or None, stream=True, decode=True)
            pull = follow(reference, documents, observe)
        except (DockerException, requests.RequestException, OSError) as error:
            pull = ImagePull(reference, failed=_explanation(error))
            observe(pull)
        if pull.failed:
            raise SandboxFailed(
                f"{pull.text}; check the name, or ask this node's owner to sign in to the registry"
            )
        image = self.find(reference)
        if image is None:
            raise SandboxFailed(f"the registry returned another image than {reference}")
        return image

    def create(self, body: Mapping[str, Any]) -> str:
        with translated("the engine refused the container"):
            # the SDK's own arguments cannot set masked paths; the body is what it would send
            made = self._api.create_container_from_config(dict(body))
        return str(made["Id"])

    def attach(self, container: str, *, with_input: bool) -> socket.socket:
        """Open the streams as one socket; before the start, so that no output is lost."""
        wanted = {"stdout": 1, "stderr": 1, "stream": 1, "stdin": 1 if with_input else 0}
        with translated("cannot attach to the container"):
            given = self._api.attach_socket(container, params=wanted)
            channel = socket.socket(fileno=os.dup(given.fileno()))
            under = given._sock
            given._response.close()  # file and socket: either alone would keep it open
            under.close()
        channel.setblocking(False)
        return channel

    def start(self, container: str) -> None:
        with translated("the container did not start"):
            self._api.start(container)

    def wait(self, container: str) -> ContainerExit:
        with translated("the engine went away"):
            answer = self._api.wait(container, timeout=None)
            state = self._api.inspect_container(container)["State"]
        error = (answer.get("Error") or {}).get("Message", "") or state.get("Error", "")
        started = str(state.get("StartedAt", "")) > "0002"
        return ContainerExit(
            int(answer["StatusCode"]), bool(state.get("OOMKilled")), str(error), started
        )

    def exceeded_memory(self, container: str, *, kernel_log: str = KERNEL_LOG) -> bool:
        """Whether an ended container was killed for memory; call before `remove`.

        Docker's state is right only if containerd's event came before the end; Podman with runc has none. The kernel log is
        exact where readable; otherwise Docker's events are asked.
        """
        if exceeded_its_limit(container, records(kernel_log)):
            return True
        if self.facts.kind != "docker":
            return False
        with translated("the engine went away"):
            now = _instant(self._api.info()["SystemTime"])
            events = self._api.events(
                since=0,
                until=now + LATE_NOTICE,
                filters={"container": container, "event": "oom"},
                decode=True,
            )
            with contextlib.closing(events):
                return any(True for _ in events)

    def signal(self, container: str, name: str) -> None:
        with translated(f"cannot send {name}"), contextlib.suppress(NotFound):
            try:
                self._api.kill(container, name)
            except APIError as error:
                if error.status_code != 409 and "improper" not in _explanation(error):
                    raise  # the two mean "is not running": Docker's and Podman's

    def remove(self, container: str) -> None:
        with translated("cannot remove the container"), contextlib.suppress(NotFound):
            try:
                self._api.remove_container(container, force=True, v=True)
            except APIError as error:
                if error.status_code != 409:  # its removal is under way already
                    raise

    def labelled(self, label: str) -> list[str]:
        with translated("cannot list containers"):
            found = self._api.containers(all=True, filters={"label": [label]})
        return [str(entry["Id"]) for entry in found]

    def pid_of(self, container: str) -> int:
        """0: the container has ended."""
        with translated("cannot look at the container"):
            try:
                return int(self._api.inspect_container(container)["State"].get("Pid") or 0)
            except NotFound:
                return 0

    def import_image(self, tar: bytes, labels: Mapping[str, str]) -> str:
        changes = [f"LABEL {label}={value}" for label, value in labels.items()]
        with translated("the engine refused an image"):
            answer = self._api.import_image_from_data(tar, changes=changes)
        try:
            return str(json.loads(answer.splitlines()[-1])["status"])
        except (LookupError, ValueError) as unknown:
            raise SandboxFailed(f"the engine refused an image: {answer[:200]}") from unknown

    def unnamed_images(self, label: str) -> list[str]:
        with translated("cannot list images"):
            found = self._api.images(filters={"label": [label]}, all=True)
        images = [image_from(entry) for entry in found]
        return [one.id for one in images if all(name.startswith("<none>") for name in one.names)]

    def remove_image(self, image: str) -> None:
        """Does nothing while a container uses the image. Idempotent."""
        with translated("cannot remove an image"), contextlib.suppress(NotFound):
            try:
                self._api.remove_image(image)
            except APIError as error:
                if error.status_code != 409:
                    raise
