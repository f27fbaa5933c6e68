"""The bubblewrap runtime: namespaces, a system call filter and Landlock."""
