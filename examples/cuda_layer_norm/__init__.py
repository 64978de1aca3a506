"""LayerNorm in CUDA C++, written by hand."""
