"""The Docker runtime: containers of Docker, Podman or gVisor."""
