"""The agent: runs on a node, starts sandboxes for leases and reports to the server."""
