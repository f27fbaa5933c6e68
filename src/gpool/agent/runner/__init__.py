"""Programs that run inside a sandbox: the function runner and the starter of gang members."""
