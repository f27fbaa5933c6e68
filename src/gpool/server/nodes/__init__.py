"""Nodes on the server: connection, handshake, registry, report validation, offers, reliability and telemetry."""
