"""Artifact bytes: uploads in progress, and the folder or S3 bucket that keeps them. Decides no permissions."""

from gpool.server.blobs.blobs import Blobs, UploadPart

__all__ = ["Blobs", "UploadPart"]
