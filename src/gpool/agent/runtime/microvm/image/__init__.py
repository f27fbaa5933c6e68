"""Disks, kernel and boot archive of a guest, made from files of the host."""
