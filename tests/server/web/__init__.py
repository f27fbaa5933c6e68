"""Pages in process: sessions, forms, headers, hostile text."""
