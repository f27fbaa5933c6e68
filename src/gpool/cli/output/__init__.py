"""Output of the command line: tables, JSON, a task's output, progress; Ctrl-C while reading."""
