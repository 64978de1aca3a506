"""A model's code as a graph of ATen operators."""
