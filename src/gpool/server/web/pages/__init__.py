"""Pages by subject. A handler reads the form, calls actions and renders a template; it decides nothing."""
