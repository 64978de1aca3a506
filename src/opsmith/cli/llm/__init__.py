"""Generating text: the real decoder of the demo, and what decoding costs, ours beside others'."""

AGAINST = ("hf", "compile", "llamacpp")  # other ways to run a decoder
DTYPES = ("float32", "bfloat16", "float16")
# Ours: computing in a dtype, with packed weights, or with the bits of a GGUF file.
FORMATS = (*DTYPES, "bf16", "int8", "int8_dynamic", "int4", "gguf")
