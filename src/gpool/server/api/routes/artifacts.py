"""Routes of artifacts: streamed and resumable uploads and downloads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from gpool.core.errors import NotFound, TooLarge, Unprocessable
from gpool.core.ids import decode
from gpool.core.permissions import Action, TeamId
from gpool.server.actions.tasks import deletion, direct_uploads, outputs
from gpool.server.api.callers import asker, caller, check, server_of, user_of
from gpool.server.api.endpoints import NO_CONTENT, OCTETS, EndpointRouter, SuccessReply
from gpool.server.api.messages import (
    SHA256,
    Cursor,
    Limit,
    answer,
    document_of,
    lease_of,
    no_content,
    once_of,
    part_of,
    range_of,
    sha256_of,
)
from gpool.server.api.problems import problem
from gpool.server.identity.throttle import RouteClass
from gpool.server.overload.admission import LoadClass
from gpool.server.store.identity_values import Caller
from gpool.server.store.values import NodeCredentials
from gpool.transfer.requests import DIRECT_HEADER
from gpool.wire.documents import (
    ArtifactDocument,
    ArtifactPage,
    DirectCompletion,
    DirectUpload,
    DirectUploadDocument,
    StorageReport,
)

routes = EndpointRouter("artifacts")

MAX_COMPLETION_BYTES = 1024 * 1024
"""Of the checksums of 10,000 parts."""


@routes.get("/v1/artifacts", Action.ARTIFACTS_LIST, returns=ArtifactPage)
async def list_artifacts(
    request: Request,
    limit: Limit = 50,
    cursor: Cursor = None,
    team: Annotated[str | None, Query(description="Team id: artifacts of this team")] = None,
) -> Response:
    """List the artifacts your storage quota is charged for, largest first."""
    who = await user_of(request)
    of_team = TeamId(decode("team", team)) if team else None
    return answer(await deletion.list_artifacts(server_of(request), who, of_team, cursor, limit))


@routes.get("/v1/storage", Action.ARTIFACTS_LIST, load=LoadClass.LISTING, returns=StorageReport)
async def read_storage(
    request: Request,
    team: Annotated[str | None, Query(description="Team id: storage of this team")] = None,
) -> Response:
    """Show what your storage quota is charged for, by use, largest first."""
    who = await user_of(request)
    of_team = TeamId(decode("team", team)) if team else None
    return answer(await deletion.report_storage(server_of(request), who, of_team))


@routes.delete("/v1/artifacts/{sha256}", Action.ARTIFACT_DELETE, returns=NO_CONTENT)
async def delete_artifact(request: Request, sha256: SHA256) -> Response:
    """Delete an upload of yours, finished or not. 409 while one of your tasks uses it."""
    server, who = server_of(request), await user_of(request)
    await deletion.delete_artifact(server, who, sha256_of(sha256), once_of(request))
    return no_content()


@routes.put(
    "/v1/artifacts/{sha256}",
    Action.ARTIFACT_UPLOAD,
    Action.ARTIFACT_UPLOAD_OUTPUT,
    rate=RouteClass.TRANSFER,
    load=LoadClass.SUBMISSION,
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
    who = await _uploader(request)
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
        SuccessReply(
            status=307,
            description="Its place in the object store, for requests with the header `Gpool-Direct`",
        ),
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
    at = await outputs.location_of(server, sha256)
    direct = server.blobs.direct
    if (
        direct is not None
        and DIRECT_HEADER in request.headers
        and direct_uploads.is_direct(server, size)
        and "/" in at.key
        and not at.file_key
    ):
        found = {"Location": direct.read_url(at.key), "Cache-Control": "no-store"}
        return Response(status_code=307, headers=found)
    headers["Content-Length"] = str(length)
    pieces = server.blobs.read(at, first, length)
    begun = await anext(pieces, b"")  # a store that does not answer is a 503, not a broken reply
    return StreamingResponse(_continued(begun, pieces), status, headers, OCTETS)


@routes.post(
    "/v1/artifacts/{sha256}/parts",
    Action.ARTIFACT_UPLOAD,
    Action.ARTIFACT_UPLOAD_OUTPUT,
    rate=RouteClass.TRANSFER,
    load=LoadClass.SUBMISSION,
    body=DirectUpload,
    returns=DirectUploadDocument,
)
async def sign_parts(request: Request, sha256: SHA256) -> Response:
    """Begin or continue an upload straight to the object store: signed URLs of its parts. Nodes name their lease."""
    who = await _uploader(request)
    wanted, _ = await document_of(request, DirectUpload)
    signed = direct_uploads.sign(
        server_of(request), who, sha256_of(sha256), lease_of(request), wanted
    )
    return answer(await signed)


@routes.post(
    "/v1/artifacts/{sha256}/complete",
    Action.ARTIFACT_UPLOAD,
    Action.ARTIFACT_UPLOAD_OUTPUT,
    rate=RouteClass.TRANSFER,
    load=LoadClass.SUBMISSION,
    body=DirectCompletion,
    returns=(
        SuccessReply(ArtifactDocument, 201, "Stored and verified"),
        SuccessReply(status=202, description="Still being verified; ask again"),
    ),
)
async def complete_upload(request: Request, sha256: SHA256) -> Response:
    """Finish an upload whose parts were sent to the object store. Nodes name their lease."""
    who, name = await _uploader(request), sha256_of(sha256)
    parts, _ = await document_of(request, DirectCompletion, MAX_COMPLETION_BYTES)
    completed = direct_uploads.complete(
        server_of(request), who, name, lease_of(request), parts.part_sha256s
    )
    size = await completed
    if size is None:
        return Response(status_code=202)
    return answer(ArtifactDocument(sha256=name, size_bytes=size), 201)


async def _continued(begun: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield begun
    async for piece in pieces:
        yield piece


async def _uploader(request: Request) -> Caller | NodeCredentials:
    who = await caller(request)
    is_node = isinstance(who, NodeCredentials)
    check(request, who, Action.ARTIFACT_UPLOAD_OUTPUT if is_node else Action.ARTIFACT_UPLOAD)
    return who


@routes.head(
    "/v1/artifacts/{sha256}",
    Action.ARTIFACT_READ,
    rate=RouteClass.TRANSFER,
    returns=SuccessReply(description="You may name this artifact in a task without an upload"),
)
async def head_artifact(request: Request, sha256: SHA256) -> Response:
    """Check whether an artifact needs an upload. A 404 with `Upload-Offset` tells how far your upload came; with
    `Gpool-Direct: BYTES` uploads of at least so many bytes may go straight to the object store.
    """
    server, who = server_of(request), await asker(request)
    lease = lease_of(request) if isinstance(who, NodeCredentials) else None
    try:
        size = await outputs.size_of(server, who, sha256_of(sha256), lease, to_name=True)
    except NotFound as missing:
        if server.blobs.direct is None or not server.settings.direct_bytes:
            raise
        refusal = problem(missing, request.scope["path"])
        refusal.headers[DIRECT_HEADER] = str(server.settings.direct_bytes)
        return refusal
    headers = {"ETag": f'"{sha256}"', "Accept-Ranges": "bytes", "Content-Length": str(size)}
    return Response(status_code=200, headers=headers, media_type=OCTETS)
