"""Generating text: the real decoder of the demo, and what decoding costs, ours beside others'."""
