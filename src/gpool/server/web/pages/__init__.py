"""Pages by subject. A handler reads the form, calls actions and renders a template; it decides nothing."""

from gpool.server.web.pages import (
    account,
    admin,
    new_task,
    nodes,
    pool,
    reset,
    sign_in,
    task,
    tasks,
    wallets,
)

PAGES = (
    sign_in.routes,
    reset.routes,
    pool.routes,
    new_task.routes,  # before the page of one task: /tasks/new is no id
    tasks.routes,
    task.routes,
    nodes.routes,
    account.routes,
    wallets.routes,
    admin.routes,
)
"""Routers of all pages."""
