"""Events: recorded with their cause, numbered by the leader, streamed to readers, delivered to webhooks and mail."""
