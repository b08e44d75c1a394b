"""The front of the engine: checks and prepares requests, assembles answers. Imports no torch."""
