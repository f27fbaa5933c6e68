"""The agent: runs leases in sandboxes on a node and reports to the server."""
