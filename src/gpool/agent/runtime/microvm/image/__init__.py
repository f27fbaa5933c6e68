"""Disks, kernel and boot archive of a guest."""
