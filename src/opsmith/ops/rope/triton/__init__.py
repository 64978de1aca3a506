"""Rotary position embedding on GPUs."""
