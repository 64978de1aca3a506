"""opsmith: fused operators for language models, and the compiler that puts them to use."""

__version__ = "0.1.0"
