"""Deletion of an account by its user. Credentials, names and nodes go at once; tasks in bounded batches, the rest by the
loop `retention`. The audit log keeps the account's id.
"""

from __future__ import annotations

from gpool.core.errors import Forbidden, Invalid
from gpool.core.ids import UserId, encode
from gpool.core.permissions import Action
from gpool.server.actions import lending
from gpool.server.actions.audit import audited, entry
from gpool.server.actions.tasks import direct_uploads
from gpool.server.actions.tasks.deletion import remove_files
from gpool.server.identity.authorization import own, permit
from gpool.server.identity.passwords import Match
from gpool.server.server import Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.identity import account_deletion as operations
from gpool.server.store.operations.identity import accounts, sealed_fields
from gpool.server.store.operations.tasks import artifacts, deletion, tasks
from gpool.server.store.operations.tasks.storage import Account
from gpool.wire.identity import AccountDeletion

ROWS = 200
"""Tasks cancelled or deleted by one write."""

MOST_WRITES = 50
"""Writes for one account before other accounts and requests have their turn."""

REMOVED = "the node's owner has deleted the account; join again with a new link"


async def delete_account(server: Server, who: Caller, wanted: AccountDeletion) -> None:
    permit(who, Action.ACCOUNT_DELETE, own(who))
    await _confirm(server, who, wanted)
    note = entry(server.now, who, "account.delete", encode("user", who.user.id))
    deleting = operations.delete_account(who.user.id, server.now)
    owned = await server.write(audited(deleting, [note]))
    server.credentials.forget()
    await lending.suspend(server, who.user.id, REMOVED)
    for node in owned:
        await lending.remove_of_deleted_account(server, node)
    server.blobs.remove_parts_of(f"u{who.user.id}")
    await direct_uploads.drop_all(server, f"u{who.user.id}")
    await purge(server, who.user.id)


async def _confirm(server: Server, who: Caller, wanted: AccountDeletion) -> None:
    account = await server.store.read(accounts.account(who.user.id))
    stored = None if account is None else account.password_hash
    if stored is None:
        if wanted.name != who.user.name:
            raise Invalid(
                "'name' is required: the name of the account to delete, as a confirmation"
            )
        return
    if wanted.password is None:
        raise Invalid("'password' is required: the account's password, as a confirmation")
    async with server.guard.sign_in(who.user.name, who.address) as guess:
        if isinstance(await server.identity.passwords.verify(stored, wanted.password), Match):
            guess.succeeded()
    if not guess.right:
        raise Forbidden("'password' is not the account's password; nothing was deleted")


async def purge(server: Server, user: UserId) -> bool:
    """Cancel and delete tasks of a deleted account, then its rows; True: nothing is left.

    Tasks that nodes still hold are deleted by a later call.
    """
    is_done = True
    for account in reversed(await server.store.read(operations.accounts_of(user))):
        # the user's row goes last: the teams are found through it
        is_done = await _purge_account(server, account, finish=is_done) and is_done
    return is_done


async def _purge_account(server: Server, account: Account, *, finish: bool) -> bool:
    for _ in range(MOST_WRITES):
        open_tasks = await server.store.read(operations.open_tasks_of(account, ROWS))
        if not open_tasks:
            break
        server.picture.absorb(await server.write(tasks.cancel(open_tasks, None, server.now)))
    for _ in range(MOST_WRITES):
        deleted = await server.write(deletion.delete_tasks_of(account, ROWS))
        await remove_files(server, deleted.artifacts)
        if not deleted.tasks:
            break
    if not finish:
        return False
    unused = await server.write(operations.finish_deletion(account))
    if unused is None:
        return False
    server.sealer.forget_account(account)
    await remove_files(server, unused)
    return True


async def destroy_left_keys(server: Server) -> None:
    """Destroy data keys of deleted teams whose ended tasks have expired."""
    for account in await server.store.read(sealed_fields.keys_without_account(ROWS)):
        await server.write(artifacts.destroy_account_key(account))
        server.sealer.forget_account(account)
