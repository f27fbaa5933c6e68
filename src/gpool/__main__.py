"""`python -m gpool` is the command line."""

from __future__ import annotations

from gpool.cli.main import main

if __name__ == "__main__":
    main()
