"""Sampling: one function for plain decoding, drafting and verification. See sampler.py, noise.py and state.py."""
