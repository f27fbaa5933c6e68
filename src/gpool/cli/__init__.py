"""The command line: parses, calls the client, prints. It holds no logic of its own."""
