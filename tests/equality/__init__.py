"""The equality table of speculation: the same answers in every configuration. `python -m tests.equality --help`."""
