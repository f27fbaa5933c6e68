"""Sandboxes that are machines of their own: one guest, two monitors (QEMU, Firecracker) behind one door."""
