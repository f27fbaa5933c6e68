"""Sandboxes by a container engine, Docker or Podman. Refuses an engine that is not on this machine."""
