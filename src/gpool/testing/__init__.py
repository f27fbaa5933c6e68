"""The World (a simulated pool) and the fakes that an author of a plug-in needs. Not imported by production code."""
