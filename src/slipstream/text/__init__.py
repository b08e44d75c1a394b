"""Text: tokenizers, incremental decoding, stop strings, chat templates. Imports no torch."""
