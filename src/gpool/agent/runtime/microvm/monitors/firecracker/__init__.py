"""The Firecracker monitor. Tested against its published API description and a stand-in; never run on real hardware."""
