"""The bubblewrap runtime."""
