"""MLA on GPUs."""
