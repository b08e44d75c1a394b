"""Drafting: methods that propose tokens, and the one function that verifies them."""
