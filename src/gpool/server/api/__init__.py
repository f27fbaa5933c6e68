"""REST interface: endpoints, authentication, documents, errors."""
