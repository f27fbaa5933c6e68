"""Alert rules: one Python table, from which the Prometheus rules are written and which the server evaluates itself."""
