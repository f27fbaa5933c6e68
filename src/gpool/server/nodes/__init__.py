"""Nodes: connection, handshake, registry, report validation, offers, reliability, telemetry."""
