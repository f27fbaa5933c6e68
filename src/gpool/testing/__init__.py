"""The World and fakes for authors of plug-ins. Not imported by production code."""
