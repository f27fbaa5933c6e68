"""The command line: parses arguments, calls the client, prints results; starts server and agent."""
