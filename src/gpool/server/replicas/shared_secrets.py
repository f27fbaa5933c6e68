"""Secrets that all replicas of a pool share, encrypted in the store: root key, own certificate, operator's API key,
and the name of the artifact folder.

The first replica stores those of its data directory; the others, whose directory may be empty, take them from there.
"""

from __future__ import annotations

from collections.abc import Callable
from secrets import token_hex

from gpool.core.errors import Invalid
from gpool.core.model import Instant
from gpool.observability.logs import get_logger
from gpool.server.identity import certificates
from gpool.server.identity.envelope import FieldLocation
from gpool.server.identity.sealer import Sealer
from gpool.server.settings import Settings
from gpool.server.store.operations.identity import sealed_fields
from gpool.server.store.protocol import Store
from gpool.transfer.keys import read_private, write_private

log = get_logger(__name__)

ROOT, CERTIFICATE, OPERATOR, FOLDER = "root", "certificate", "operator", "artifact folder"
FOLDER_MARK = ".pool"


class SharedSecrets:
    def __init__(self, store: Store, sealer: Sealer) -> None:
        self._store, self._sealer = store, sealer

    async def find(self, name: str) -> bytes | None:
        """`Invalid` if it was encrypted with a master key that this server does not have."""
        sealed = await self._sealed(name)
        if sealed is None:
            return None
        try:
            return await self._sealer.open(_place(name), sealed)
        except Invalid as error:
            raise Invalid(
                "the keys in this database are encrypted with another master key: give this server the one that the "
                f"pool's first server has (GPOOL_SERVER_MASTER_KEY, its command, or master.key); {error.detail}"
            ) from error

    async def keep(self, name: str, make: Callable[[], bytes]) -> bytes:
        """The stored secret; that of `make` is stored if there is none. Of two replicas at once, one wins."""
        found = await self.find(name)
        if found is not None:
            return found
        sealed = await self._sealer.seal(_place(name), make())
        await self._store.write(sealed_fields.put_server_secret(name, sealed))
        found = await self.find(name)
        assert found is not None, "it has just been stored"
        return found

    async def replace(self, name: str, secret: bytes) -> None:
        """Store another secret; of two replicas at once, the first wins."""
        await self._replace(name, await self._sealed(name), secret)

    async def _replace(self, name: str, sealed: bytes | None, secret: bytes) -> None:
        if sealed is not None:
            await self._store.write(sealed_fields.drop_server_secret(name, sealed))
        await self.keep(name, lambda: secret)

    async def _sealed(self, name: str) -> bytes | None:
        return await self._store.read(sealed_fields.server_secret(name))

    async def place_certificate(self, settings: Settings, now: Instant) -> None:
        """Write the pool's own certificate to the data directory, unless the settings name one or there is no TLS."""
        if not settings.uses_tls or settings.tls_cert is not None:
            return
        file = certificates.own_file(settings.data)

        def make() -> bytes:
            certificates.certificate_of(settings, now)
            return read_private(file)

        stored = await self.keep(CERTIFICATE, make)
        if not file.exists() or read_private(file) != stored:
            if file.exists():
                log.warning("the pool's certificate replaces another one", file=str(file))
            write_private(file, stored, replace=True)

    async def claim_folder(self, settings: Settings, *, has_others: bool) -> None:
        """Make sure that all servers have the same folder of artifacts: a file there has the name that the store knows.

        A server that starts alone may have a new folder: its files are what there is. `check_folder` then finds the one
        of two that start at the same moment.
        """
        file = settings.folder / FOLDER_MARK
        settings.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        sealed = await self._sealed(FOLDER)
        if sealed is None or not has_others:
            write_private(file, token_hex(16).encode(), replace=False)
            if await self.find(FOLDER) != read_private(file):
                await self._replace(FOLDER, sealed, read_private(file))

    async def check_folder(self, settings: Settings) -> None:
        """`Invalid` if the servers of the database have another folder and no bucket keeps the artifacts."""
        file = settings.folder / FOLDER_MARK
        if file.exists() and read_private(file) == await self.find(FOLDER):
            return
        if settings.bucket is None:
            raise Invalid(
                f"the other servers of this database keep artifacts in another folder than {settings.folder}: share "
                "one folder and name it in GPOOL_SERVER_ARTIFACT_FOLDER, or keep artifacts in an object store "
                "(GPOOL_SERVER_ARTIFACTS=s3://BUCKET/PREFIX)"
            )
        log.warning(
            "uploads in parts through the servers need one server: their folders differ",
            folder=str(settings.folder),
        )


def _place(name: str) -> FieldLocation:
    return FieldLocation("server_secrets", name, "sealed")
