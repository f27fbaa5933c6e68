"""What operators do to the server itself: change its keys. Who may is decided before."""

from __future__ import annotations

from gpool.server.actions.operators.audit import Actor, audited, entry, note
from gpool.server.identity.secrets.sealer import KeyStatus
from gpool.server.server import Server


async def rotate_keys(
    server: Server, actor: Actor, *, master: bool, address: str = ""
) -> KeyStatus:
    """Retires every data key, so that fields move to a new one while we serve; with `master`, that changes first."""
    if master:
        wrapped = await server.sealer.rotate_master()
        told = entry(server.now, actor, "keys.rotate_master", address=address, wrapped=str(wrapped))
        await note(server, told)
    noted = entry(server.now, actor, "keys.rotate", address=address)
    await server.write(audited(server.sealer.rotation(server.now), [noted]))
    await server.sealer.look_again()
    server.sealer.wake.call()
    return await server.sealer.status()
