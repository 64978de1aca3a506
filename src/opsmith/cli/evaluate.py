"""`opsmith evaluate`: what each format takes from a model's predictions of a text, and which one to choose."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opsmith.cli import CommandError
from opsmith.cli.common import Json, Output, size_of, told

if TYPE_CHECKING:
    from torch import nn

    from opsmith import Config
    from opsmith.evaluation import Evaluation


@dataclass(frozen=True)
class Row:
    """A format, what a model then has of weights, and how well it predicts the text."""

    name: str
    nbytes: int
    found: Evaluation


def run(
    path: Annotated[
        Path, typer.Argument(metavar="FOLDER|FILE.gguf", help="What save_pretrained wrote, or a GGUF file.")
    ],
    text: Annotated[Path, typer.Option(metavar="FILE", help="The text to predict.")],
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="float32, bfloat16, float16, or packed weights: bf16, int8, int8_dynamic, int4; may be repeated.",
        ),
    ] = None,
    groups: Annotated[
        list[int] | None,
        typer.Option(
            "--group", metavar="32|64|128", help="Of int4, numbers that share a scale; may be repeated."
        ),
    ] = None,
    asymmetric: Annotated[bool, typer.Option("--asymmetric", help="Of int4, groups with zeros too.")] = False,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of int4, rounding for a text of this kind too.")
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Layers to leave as they are; may be repeated."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", help="What packed weights are multiplied in; the model's own."),
    ] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens that are read together.")] = 512,
    within: Annotated[float, typer.Option(min=0, help="Percent of perplexity that may be lost.")] = 1.0,
    json: Json = None,
) -> None:
    """Predict a text with a model in each format, and compare with the model as it is.

    The recommendation is the format of the fewest bytes that loses at most --within percent of perplexity by the upper
    ends of both 95 % intervals: on this text, and on what the model itself would write, where it is exp(KL divergence).
    Nothing is downloaded, no code from the folder runs.

    Example: opsmith evaluate ./my-model --text book.txt --format int8 --format int4 --group 32 --group 64
    """
    import opsmith
    from opsmith import Config
    from opsmith.cli import hf
    from opsmith.compiler.config import DTYPES
    from opsmith.measure.machine import describe
    from opsmith.ops.packed_linear.formats import CHOICES
    from opsmith.ops.packed_linear.module import PackedLinear

    output = Output(json)
    for name in formats or ():
        if name not in DTYPES and name not in CHOICES:
            raise CommandError(f"--format: there is no {name!r}; there are: {', '.join((*DTYPES, *CHOICES))}")
    words = _read("--text", text)
    sample = None if calibration is None else _read("--calibration", calibration)
    with told():
        chosen = [
            (label, Config.parse(fields, "evaluate"), calibrated)
            for name in formats or ("bfloat16", "int8", "int4")
            for label, fields, calibrated in _variants(name, groups, asymmetric, sample is not None)
            for fields in [{"dtype": dtype, "quantize_skip": skip or []} | fields]
        ]
    with output.console.status("loading the model"), told("evaluate: "):
        model, tokenizer = hf.load_with_tokenizer(path)
    packed = any(isinstance(module, PackedLinear) for module in model.modules())
    own = "packed" if packed else str(next(p.dtype for p in model.parameters())).removeprefix("torch.")
    chosen = [one for one in chosen if one[0] != own and (formats or not packed)]
    rows: list[Row] = []
    with told(), told(refusal=TypeError):
        for label, config, calibrated in [(f"{own}, as it is", Config(), False), *chosen]:
            with output.console.status(label):
                candidate, nbytes = _candidate(model, config, sample if calibrated else None, tokenizer)
                against = model if rows else None
                found = opsmith.evaluate(
                    candidate, words, against=against, window=window, tokenizer=tokenizer
                )
            rows.append(Row(label, nbytes, found))
    advice = recommended(rows, within)
    _show(output, rows, path.name, text.name)
    output.console.print(advice)
    output.finish(
        {
            "model": type(model).__name__,
            "text": str(text),
            "machine": describe().to_json(),
            "rows": [{"format": row.name, "bytes": row.nbytes, **row.found.to_dict()} for row in rows],
            "within": within,
            "recommendation": advice,
        }
    )


def recommended(rows: Sequence[Row], within: float) -> str:
    """The rule, and the format that it chooses: of the fewest bytes among those that lose little enough for certain.

    A text's own tokens may by chance be likelier than before. On what the original itself would write, perplexity rises
    by exp(divergence), which is never less than 1.
    """

    def lost(found: Evaluation) -> float:
        if found.ratio is None or found.kl is None:
            return math.inf
        ends = (found.ratio.high, math.exp(found.kl.high))
        return math.inf if any(map(math.isnan, ends)) else 100 * (max(ends) - 1)

    best = min((row for row in rows if lost(row.found) <= within), key=lambda row: row.nbytes, default=None)
    rule = f"the fewest bytes that lose at most {within:g} % of perplexity, on the text and by the divergence"
    if best is None or best.nbytes >= rows[0].nbytes:
        smaller = f"nothing smaller loses at most {within:g} % of perplexity"
        return f"recommended: {rows[0].name}; {smaller if rows[1:] else 'no other format was evaluated'}"
    return f"recommended: {best.name}: {rule}"


def _variants(
    name: str, groups: list[int] | None, asymmetric: bool, text: bool
) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """The rows of a format: label, fields of the configuration, and whether weights are rounded for a text."""
    from opsmith import Config
    from opsmith.compiler.config import DTYPES

    if name in DTYPES:
        yield name, {"dtype": name}, False
    elif name != "int4":
        yield name, {"quantize": name}, False
    else:
        for size in groups or [Config().quantize_group]:
            for symmetric in (True, False)[: 1 + asymmetric]:
                label = f"int4, groups of {size}" + ("" if symmetric else " with zeros")
                fields = {"quantize": name, "quantize_group": size, "quantize_symmetric": symmetric}
                yield label, fields, False
                if text:
                    yield f"{label}, calibrated", fields, True


def _candidate(model: nn.Module, config: Config, text: str | None, tokenizer: Any) -> tuple[nn.Module, int]:
    """The model as a format has it, rounded for a text where one is given, and the bytes that a token reads of weights.

    Packed layers compute as they do in an optimized model; all else is eager, to which that one's operators are equal.
    """
    from torch import nn

    from opsmith.compiler.modules.calibrate import calls_of
    from opsmith.compiler.modules.linear_layers import linear_layers
    from opsmith.compiler.modules.quantize import Packing
    from opsmith.ops.packed_linear.module import PackedLinear

    if config.dtype is not None:
        candidate = copy.deepcopy(model).to(config.torch_dtype)
    else:  # modules of its own on the same tensors
        candidate = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    packing = Packing()
    if config.quantize is not None:
        calls = None if text is None else calls_of(candidate, text, tokenizer)
        packing.pack(candidate, config, calibration=calls)
    layers = dict(linear_layers(candidate))
    tables = {id(m.weight) for m in candidate.modules() if isinstance(m, nn.Embedding)}
    tables -= {id(layer.weight) for layer in layers.values()}
    tables |= set(map(id, packing.held))
    plain = sum(p.nbytes for p in candidate.parameters() if id(p) not in tables)
    own = sum(m.nbytes for m in candidate.modules() if isinstance(m, PackedLinear))
    return candidate, plain + own + sum(layer.nbytes for layer in packing.layers)


def _read(option: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(
            f"{option}: {file} is no text that can be read ({error}); name a UTF-8 file"
        ) from error


def _show(output: Output, rows: Sequence[Row], model: str, text: str) -> None:
    from rich.table import Table

    first = rows[0].found
    title = f"{model} on {text}: {first.predictions} predictions, windows of {first.window} tokens"
    table = Table(title=title, title_justify="left")
    for name in ("format", "a token reads", "perplexity", "over as it is", "KL divergence", "same top token"):
        table.add_column(name, no_wrap=True)
    for row in rows:
        found = row.found
        numbers = [str(found.perplexity)]
        if found.ratio is not None and found.kl is not None and found.agreement is not None:
            kl, same = found.kl, found.agreement
            numbers += [str(found.ratio), f"{kl:.2g} [{kl.low:.2g}, {kl.high:.2g}]"]
            numbers.append(f"{100 * same:.1f} % [{100 * same.low:.1f}, {100 * same.high:.1f}]")
        table.add_row(row.name, size_of(row.nbytes), *numbers)
    output.console.print(table)
