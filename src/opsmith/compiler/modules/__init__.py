"""Rewrites of whole modules, before a model is captured."""
