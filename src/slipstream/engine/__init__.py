"""The engine: scheduler, loop, runner, executor, settle. Host truth in requests, device truth in relay rows."""
