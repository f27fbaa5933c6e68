"""Image references and pull progress. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# name[:tag][@digest] or an image id; nothing else reaches the engine
REFERENCE = re.compile(
    r"(?:[a-z0-9](?:[a-z0-9._:-]*[a-z0-9])?/)*[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
MOST_REFERENCE = 512


@dataclass(frozen=True, slots=True)
class ContainerImage:
    """`id` identifies the content, whatever a tag denotes later."""

    id: str
    size_bytes: int
    names: tuple[str, ...] = ()  # tags and digests
    volumes: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ImagePull:
    image: str
    layers: Mapping[str, tuple[int, int]] = field(default_factory=lambda: MappingProxyType({}))
    """Layer -> (bytes received, size); (0, 0) before the size is known."""
    done: frozenset[str] = frozenset()
    failed: str = ""

    @property
    def text(self) -> str:
        if self.failed:
            return f"cannot pull {self.image}: {self.failed}"
        if not self.layers:
            return f"pulling {self.image}"
        here = sum(size[0] for size in self.layers.values())
        whole = sum(size[1] for size in self.layers.values())
        layers = f"{len(self.done)} of {len(self.layers)} layers"
        return f"pulling {self.image}: {layers}, {here / 1e6:.0f} of {whole / 1e6:.0f} MB"


LAYER_DONE = ("Pull complete", "Already exists", "Download complete")


def advance(pull: ImagePull, document: Mapping[str, Any]) -> ImagePull:
    if document.get("error"):
        return replace(pull, failed=str(document["error"]))
    layer, status = str(document.get("id") or ""), str(document.get("status") or "")
    is_layer = layer and (
        layer in pull.layers or status == "Pulling fs layer" or status in LAYER_DONE
    )
    if not is_layer:
        return pull
    here, whole = pull.layers.get(layer, (0, 0))
    detail = document.get("progressDetail") or {}
    if status == "Downloading":
        whole = max(whole, int(detail.get("total") or 0))
        here = max(here, min(int(detail.get("current") or 0), whole))
    done = pull.done
    if status in LAYER_DONE:
        here, done = whole, done | {layer}
    return replace(pull, layers=MappingProxyType({**pull.layers, layer: (here, whole)}), done=done)


def follow(image: str, documents: Iterator[Any], observe: Callable[[ImagePull], None]) -> ImagePull:
    pull = ImagePull(image)
    observe(pull)
    for document in documents:
        following = advance(pull, document)
        if following != pull:
            pull = following
            observe(pull)
    return pull


def wrong_reference(image: str) -> str:
    """Reason; empty if valid."""
    if DIGEST.fullmatch(image):
        return ""
    if len(image) <= MOST_REFERENCE and REFERENCE.fullmatch(image):
        return ""
    return f"'{image[:80]}' is no image reference; write name:tag or, better, name@sha256:…"


def registry_of(reference: str) -> str:
    """ "" means the engine's default."""
    first, slash, _ = reference.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else ""


def image_from(document: Mapping[str, Any]) -> ContainerImage:
    config = document.get("Config") or {}
    names = [*(document.get("RepoTags") or ()), *(document.get("RepoDigests") or ())]
    pairs = [word.partition("=") for word in config.get("Env") or ()]
    return ContainerImage(
        str(document["Id"]),
        int(document.get("Size") or 0),
        tuple(str(name) for name in names),
        tuple(sorted(config.get("Volumes") or ())),
        tuple((name, value) for name, _, value in pairs),
    )


def answers_to(image: ContainerImage, reference: str) -> bool:
    """Whether the image has the reference's digest; a tag without digest matches any image."""
    wanted = DIGEST.search(reference)
    if wanted is None:
        return True
    bare = wanted.group()
    own = image.id if image.id.startswith("sha256:") else f"sha256:{image.id}"
    return own == bare or any(name.endswith("@" + bare) for name in image.names)
