"""Writes the decoder of `opsmith bench-llm gemma` in another format of llama.cpp, to meet that at as many bits.

    .venv-llamacpp/bin/python benchmarks/gemma_gguf.py SOURCE bf16|q8_0|q4_0 FILE

SOURCE is the GGUF file in `opsmith.cli.llm.gemma.folder()`; llama.cpp itself rounds the weights once more, by
its own choice of a format for each.
"""

from __future__ import annotations

import argparse
import ctypes

import llama_cpp


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a GGUF file's weights in another format.")
    parser.add_argument("source")
    parser.add_argument("format", choices=("bf16", "q8_0", "q4_0"))
    parser.add_argument("file")
    given = parser.parse_args()
    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{given.format.upper()}")
    how.allow_requantize = True
    if llama_cpp.llama_model_quantize(given.source.encode(), given.file.encode(), ctypes.byref(how)):
        raise SystemExit(f"llama.cpp could not write {given.file}: what it printed says why")


if __name__ == "__main__":
    main()
