"""Tables, JSON, a task's output, progress; Ctrl-C while reading."""
