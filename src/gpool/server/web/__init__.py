"""The web dashboard: pages for browsers, with cookie sessions. Pages call the same actions as the REST routes."""
