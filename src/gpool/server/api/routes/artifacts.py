"""Routes of artifacts: streamed and resumable uploads and downloads."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from gpool.core.errors import TooLarge, Unprocessable
from gpool.core.permissions import Action
from gpool.server.actions.tasks import outputs
from gpool.server.api.callers import asker, caller, check, server_of
from gpool.server.api.endpoints import OCTETS, EndpointRouter, SuccessReply
from gpool.server.api.messages import SHA256, answer, lease_of, part_of, range_of, sha256_of
from gpool.server.api.problems import problem
from gpool.server.identity.throttle import RouteClass
from gpool.server.store.values import NodeCredentials
from gpool.wire.documents import ArtifactDocument

routes = EndpointRouter("artifacts")


@routes.put(
    "/v1/artifacts/{sha256}",
    Action.ARTIFACT_UPLOAD,
    Action.ARTIFACT_UPLOAD_OUTPUT,
    rate=RouteClass.TRANSFER,
    body=bytes,
    returns=(
        SuccessReply(ArtifactDocument, 201, "Stored durably"),
        SuccessReply(
            status=202, description="Part stored; `Upload-Offset` is the number of bytes so far"
        ),
    ),
    problems=(422,),
)
async def put_artifact(request: Request, sha256: SHA256) -> Response:
    """Upload an artifact, whole or in parts (`Content-Range: bytes FIRST-LAST/TOTAL`). Nodes name their lease."""
    server = server_of(request)
    who = await caller(request)
    is_node = isinstance(who, NodeCredentials)
    check(request, who, Action.ARTIFACT_UPLOAD_OUTPUT if is_node else Action.ARTIFACT_UPLOAD)
    declared = request.headers.get("content-length", "")
    declared_bytes = int(declared) if declared.isdigit() and len(declared) < 19 else 0
    upload = outputs.ArtifactUpload(
        sha256_of(sha256), part_of(request), lease_of(request), declared_bytes
    )
    if declared.isdigit() and int(declared) > server.settings.max_artifact_bytes:
        raise TooLarge(
            f"the artifact has {declared[:20]} bytes; at most {server.settings.max_artifact_bytes} are accepted here"
        )
    size = await outputs.put(server, who, upload, request.stream())
    if size is None:
        assert upload.part is not None
        return Response(status_code=202, headers={"Upload-Offset": str(upload.part.last + 1)})
    return answer(ArtifactDocument(sha256=upload.sha256, size_bytes=size), 201)


@routes.get(
    "/v1/artifacts/{sha256}",
    Action.ARTIFACT_READ,
    rate=RouteClass.TRANSFER,
    returns=(
        SuccessReply(description="The whole artifact", media_types=(OCTETS,)),
        SuccessReply(status=206, description="The requested range", media_types=(OCTETS,)),
    ),
    problems=(416,),
)
async def get_artifact(request: Request, sha256: SHA256) -> Response:
    """Download an artifact; `Range: bytes=FIRST-` resumes."""
    server = server_of(request)
    who = await asker(request)
    size = await outputs.size_of(server, who, sha256_of(sha256))
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
                Unprocessable(f"the range begins past the artifact's {size} bytes"),
                request.scope["path"],
            )
            refusal.status_code = 416
            refusal.headers["Content-Range"] = f"bytes */{size}"
            return refusal
        headers["Content-Range"] = f"bytes {first}-{first + length - 1}/{size}"
    headers["Content-Length"] = str(length)
    return StreamingResponse(server.blobs.read(sha256, first, length), status, headers, OCTETS)


@routes.head(
    "/v1/artifacts/{sha256}",
    Action.ARTIFACT_READ,
    rate=RouteClass.TRANSFER,
    returns=SuccessReply(description="You may name this artifact in a task without an upload"),
)
async def head_artifact(request: Request, sha256: SHA256) -> Response:
    """Check whether an artifact needs an upload. A 404 with `Upload-Offset` tells how far your upload came."""
    who = await asker(request)
    lease = lease_of(request) if isinstance(who, NodeCredentials) else None
    size = await outputs.size_of(server_of(request), who, sha256_of(sha256), lease, to_name=True)
    headers = {"ETag": f'"{sha256}"', "Accept-Ranges": "bytes", "Content-Length": str(size)}
    return Response(status_code=200, headers=headers, media_type=OCTETS)
