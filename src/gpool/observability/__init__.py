"""Logs and traces of server, agent and client. Imports neither them nor the network; structlog only in `logs`."""
