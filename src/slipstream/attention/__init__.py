"""Attention over paged KV: the layout of a step, the KV tensors, the backends."""
