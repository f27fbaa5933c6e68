"""Pages in a real browser, against a pool of real processes."""
