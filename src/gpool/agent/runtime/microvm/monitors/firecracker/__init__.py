"""The Firecracker monitor."""
