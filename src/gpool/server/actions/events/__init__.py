"""Actions on events: reading them, webhooks, mail notices."""
