"""Looking at a running engine: guards, logs, metrics."""
