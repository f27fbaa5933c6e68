"""Benchmarks. Each prints a table and, with `--json FILE`, writes its figures.

The modules lie in folders by subject; all of them are imported and run as `bench.NAME`.
"""

from pathlib import Path

FOLDERS = ("planner", "server", "replicas", "agent", "gangs", "trust", "peers")
__path__ += [str(Path(__file__).with_name(name)) for name in FOLDERS]
