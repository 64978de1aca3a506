"""The faults that `verify` is known to find: what each replaces in the kernels of `normed_turn`, and what is said.

Run as a program under Triton's interpreter, verifies the projects in a folder and prints what was found, as JSON.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

KEEP = """  static std::vector<char> kept;
  static void* of = nullptr;
  const size_t bytes = size_t(y.dtype == DType::f32 ? 4 : 2) * size_t(n) * size_t(rows);
  struct Keeper {
    View y;
    size_t bytes;
    ~Keeper() { kept.assign(y.as<char>(), y.as<char>() + bytes); }
  };
  if (of == x.data && kept.size() == bytes && bytes > 0) return void(std::memcpy(y.data, kept.data(), bytes));
  of = x.data;
  const Keeper keeper{y, bytes};
  with_float_type("""

CPU = {
    "tail": {"for (int64_t i = 0; i < n; i += 2) {": "for (int64_t i = 0; i < n / 8 * 8; i += 2) {"},
    "sin": {
        "- b * to_float(s[i])": "+ b * to_float(s[i])",
        "+ a * to_float(s[i + 1])": "- a * to_float(s[i + 1])",
    },
    "eps": {"+ float(eps)": "+ 3 * float(eps)"},
    "half": {
        "sum += to_float(in[i]) * to_float(in[i]);": "sum = to_float(from_float<float16>(\n"
        "              float(sum) + to_float(in[i]) * to_float(in[i])));"
    },
    "inplace": {
        "double sum = 0;": "double sum = 0; const_cast<T*>(in)[0] = from_float<T>(2 * to_float(in[0]));"
    },
    "race": {  # the pause lets threads meet on any machine
        "#include <cmath>": "#include <chrono>\n#include <cmath>\n#include <thread>",
        "double sum = 0;": "static float row[8192]; double sum = 0;",
        "for (int64_t i = 0; i < n; i += 2) {": "for (int64_t i = 0; i < n; ++i) row[i] = to_float(in[i]) * scale;\n"
        "        std::this_thread::sleep_for(std::chrono::microseconds(20));\n"
        "        for (int64_t i = 0; i < n; i += 2) {",
        "a = to_float(in[i]) * scale, b = to_float(in[i + 1]) * scale": "a = row[i], b = row[i + 1]",
    },
    "cached": {
        "#include <cmath>": "#include <cmath>\n#include <cstring>\n#include <vector>",
        "  with_float_type(": KEEP,
    },
}

LAST_STORE = "tl.store(y + row * n + i + 1, rounded((b * c2 + a * s2) * scale, y), mask=mask)"
CALL = "    launch(_turn, (x.numel() // max(n, 1),), x, cos, sin, y, n, eps, HALF=block_of(n) // 2)"

TRITON = {
    "tail": {LAST_STORE: LAST_STORE.replace("mask=mask", "mask=i + 2 < n")},
    "sin": {"a * c1 - b * s1": "a * c1 + b * s1", "b * c2 + a * s2": "b * c2 - a * s2"},
    "eps": {"total / n + eps": "total / n + 3 * eps"},
    "half": {"tl.sum(a * a + b * b)": "tl.sum((a * a + b * b).to(tl.float16)).to(tl.float32)"},
    "inplace": {LAST_STORE: f"{LAST_STORE}\n    tl.store(x + row * n + i, rounded(a * 2.0, x), mask=mask)"},
    # Its own program puts right what the one before it has written, as long as that runs first.
    "race": {
        LAST_STORE: f"{LAST_STORE}\n"
        "    tl.store(y + row * n + n + i, rounded(a, y), mask=i < tl.where(row + 1 < tl.num_programs(0), n, 0))"
    },
    "cached": {
        "    n = x.shape[-1]": "    n = x.shape[-1]\n    if (x.data_ptr(), x.shape) in _KEPT:\n"
        "        y.copy_(_KEPT[x.data_ptr(), x.shape])\n        return",
        CALL: f"{CALL}\n    _KEPT[x.data_ptr(), x.shape] = y.clone()",
        'KERNELS = {"forward": forward}': '_KEPT = {}\nKERNELS = {"forward": forward}',
    },
}

# What the smallest failing finding of the kernel says, by fault; "" for the project without one.
SAID = {
    "": "",
    "tail": "skipped tail|unwritten output",
    "sin": "wrong value|low precision",
    "eps": "wrong value|low precision",
    "half": "low precision",
    "inplace": "mutated input",
    "race": "low precision|wrong value|two runs|stored by several programs",
    "cached": "cached answer",
}


def findings(folder: Path, implementation: str) -> Iterator[tuple[bool, str, int, str]]:
    """Of one implementation, in float32: whether a check passed, which it was, its size, and why it failed."""
    import torch

    from opsmith.authoring import project
    from opsmith.proof.conduct import runs
    from opsmith.proof.verify import verify

    card = project.load(folder).CARD
    for finding in (*verify(card, [torch.float32]), *runs(card, torch.float32)):
        if finding.implementation == implementation:
            yield finding.ok, finding.check, finding.elements, finding.why


if __name__ == "__main__":
    from tests.interpreter import hasten

    hasten()
    folders = [path for path in sorted(Path(sys.argv[1]).iterdir()) if path.is_dir()]
    print(json.dumps({folder.name: list(findings(folder, "triton")) for folder in folders}))
