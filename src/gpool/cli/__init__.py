"""Command line: parses arguments, calls the client, prints; starts server and agent."""
