"""The Docker runtime: Docker, Podman or gVisor."""
