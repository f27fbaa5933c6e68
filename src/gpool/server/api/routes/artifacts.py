"""Routes of artifacts: streamed both ways, resumable both ways."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from gpool.core.errors import TooLarge, Unprocessable
from gpool.core.permissions import Action
from gpool.server.actions.tasks import artifacts
from gpool.server.api.openapi import SHA256
from gpool.server.api.problems import problem
from gpool.server.api.requests import (
    asker,
    caller,
    lease_of,
    part_of,
    range_of,
    server_of,
    sha256_of,
)
from gpool.server.api.responses import answer
from gpool.server.identity.authorization import gate
from gpool.server.store.values import NodeCredentials
from gpool.wire.documents import ArtifactDocument

router = APIRouter(tags=["artifacts"])
_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


@router.put(
    "/v1/artifacts/{sha256}",
    status_code=201,
    openapi_extra={"requestBody": {"required": True, "content": _BYTES}},
    responses={
        201: {"model": ArtifactDocument, "description": "Durable"},
        202: {"description": "A part was taken; `Upload-Offset` says how much is here"},
    },
    response_class=Response,
)
async def put_artifact(request: Request, sha256: SHA256) -> Response:
    """Upload, whole or in parts (`Content-Range: bytes FIRST-LAST/TOTAL`). Nodes name their lease."""
    server = server_of(request)
    who = await caller(request)
    is_node = isinstance(who, NodeCredentials)
    gate(who, Action.ARTIFACT_UPLOAD_OUTPUT if is_node else Action.ARTIFACT_UPLOAD)
    told = request.headers.get("content-length", "")
    size_told = int(told) if told.isdigit() and len(told) < 19 else 0
    upload = artifacts.Upload(sha256_of(sha256), part_of(request), lease_of(request), size_told)
    if told.isdigit() and int(told) > server.settings.max_artifact_bytes:
        raise TooLarge(
            f"an artifact of {told[:20]} bytes; at most {server.settings.max_artifact_bytes} are taken here"
        )
    size = await artifacts.put(server, who, upload, request.stream())
    if size is None:
        assert upload.part is not None
        return Response(status_code=202, headers={"Upload-Offset": str(upload.part.last + 1)})
    return answer(ArtifactDocument(sha256=upload.sha256, size_bytes=size), 201)


@router.get(
    "/v1/artifacts/{sha256}",
    responses={
        200: {"content": _BYTES, "description": "All of it"},
        206: {"description": "A range"},
    },
    response_class=Response,
)
async def get_artifact(request: Request, sha256: SHA256) -> Response:
    """Download; `Range: bytes=FIRST-` goes on where one stopped."""
    server = server_of(request)
    who = await asker(request, Action.ARTIFACT_READ)
    size = await artifacts.size_of(server, who, sha256_of(sha256))
    headers = {
        "ETag": f'"{sha256}"',
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, immutable",
    }
    wanted = range_of(request, size)
    if wanted is None:
        first, length, status = 0, size, 200
    else:
        (first, length), status = wanted, 206
        if length <= 0 or first >= size:
            refusal = problem(
                Unprocessable(f"the artifact has {size} bytes"), request.scope["path"]
            )
            refusal.status_code = 416
            refusal.headers["Content-Range"] = f"bytes */{size}"
            return refusal
        headers["Content-Range"] = f"bytes {first}-{first + length - 1}/{size}"
    headers["Content-Length"] = str(length)
    return StreamingResponse(
        server.blobs.read(sha256, first, length), status, headers, "application/octet-stream"
    )


@router.head("/v1/artifacts/{sha256}", response_class=Response)
async def head_artifact(request: Request, sha256: SHA256) -> Response:
    """Is it there, so that you need not upload it? 404 with `Upload-Offset` while your upload of it is unfinished. For a node: for the lease it names."""
    who = await asker(request, Action.ARTIFACT_READ)
    lease = lease_of(request) if isinstance(who, NodeCredentials) else None
    size = await artifacts.size_of(server_of(request), who, sha256_of(sha256), lease, to_name=True)
    headers = {"ETag": f'"{sha256}"', "Accept-Ranges": "bytes", "Content-Length": str(size)}
    return Response(status_code=200, headers=headers, media_type="application/octet-stream")
