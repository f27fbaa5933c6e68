"""Verbs of events: the stream, webhooks, mail notices."""
