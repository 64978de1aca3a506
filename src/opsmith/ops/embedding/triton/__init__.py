"""Lookups on GPUs."""
