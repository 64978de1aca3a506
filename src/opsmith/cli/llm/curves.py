"""The curves of `opsmith bench-llm --svg`: tokens a second and seconds to the first token, over context and batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opsmith.cli import pictures


def draw(data: dict[str, Any], file: Path) -> None:
    """Draw what `bench-llm` found: a column for the lengths at the first batch, and one for the batches."""
    cells = data["cells"]
    batch, prompt = cells[0]["batch"], cells[0]["prompt"]
    columns = {
        f"tokens before, batch {batch}": ("prompt", [c for c in cells if c["batch"] == batch]),
        f"sequences, prompt {prompt}": ("batch", [c for c in cells if c["prompt"] == prompt]),
    }
    figure, axes = pictures.pyplot().subplots(2, 2, figsize=(9, 6), layout="constrained", squeeze=False)
    rows = {"tokens/s": "tokens_per_second", "seconds to the first token": "first_seconds"}
    for column, (label, (over, some)) in enumerate(columns.items()):
        some = sorted(some, key=lambda cell: cell[over])
        for row, (title, value) in enumerate(rows.items()):
            panel = axes[row][column]
            for i, name in enumerate(cells[0]["contestants"]):
                points = [(c[over], c["contestants"][name][value]) for c in some if name in c["contestants"]]
                panel.plot(*zip(*points, strict=True), "o-", color=f"C{i % 10}", label=name, markersize=4)
            panel.set(xlabel=label, ylabel=title, ylim=(0, None), xticks=[cell[over] for cell in some])
            panel.grid(color="0.9")
    axes[0][1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    machine = data["machine"]
    figure.suptitle(
        f"{data['model']}, {data['dtype']}: {machine['cpu']}, {machine['threads']} threads", fontsize=9
    )
    pictures.save("--svg", figure, file)
