"""Benchmarks whose results are committed. bench/README.md has the commands, docs/benchmarks.md the results."""
