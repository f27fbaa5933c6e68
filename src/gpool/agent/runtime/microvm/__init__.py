"""The microVM runtime."""
