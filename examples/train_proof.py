"""Two small models trained twice on the same bytes: once with PyTorch's operators, once with opsmith's.

Example: python examples/train_proof.py --model llama --steps 50
"""

from __future__ import annotations

import copy
import datetime
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import nn

from opsmith import measure, ops
from opsmith.measure.machine import describe

HERE = Path(__file__).parent
TEXT = HERE / "data" / "opsmith_docs.txt"
BYTES = 256
MASK = BYTES  # the token that stands for a hidden byte
IGNORED = -100
LOSS_BOUND = 1e-3
TIME_BOUND = 0.85


@dataclass(frozen=True)
class Size:
    """What a model and its batches look like."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    inner: int = 704
    length: int = 128
    batch: int = 8


class Eager:
    """The operators as Hugging Face's models write them in PyTorch."""

    @staticmethod
    def embedding(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, table)

    @staticmethod
    def linear(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        activation: str | None = None,
    ) -> torch.Tensor:
        y = F.linear(x, weight, bias)
        return F.gelu(y) if activation == "gelu" else y

    @staticmethod
    def rms_norm(
        x: torch.Tensor, weight: torch.Tensor, *, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = residual + x
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * y, x

    @staticmethod
    def layer_norm(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + residual
        return F.layer_norm(x, x.shape[-1:], weight, bias), x

    @staticmethod
    def rope_qk(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def rotate_half(x: torch.Tensor) -> torch.Tensor:
            first, second = x.chunk(2, dim=-1)
            return torch.cat((-second, first), dim=-1)

        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin

    @staticmethod
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    @staticmethod
    def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up

    @staticmethod
    def linear_cross_entropy(
        hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, weight).flatten(0, -2), target.flatten())


class EagerAttention(Eager):
    """The same with attention step by step, Hugging Face's `attn_implementation="eager"`."""

    @staticmethod
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False) -> torch.Tensor:
        weights = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        if causal:
            hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
            weights = weights + torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, -3e38)
        return F.softmax(weights, dim=-1) @ v


OPERATORS: dict[str, Any] = {"eager": Eager, "eager attention": EagerAttention, "opsmith": ops}


class Model(nn.Module):
    """What both models share: the operators, handed in; bytes in, hidden states out; projections; loss."""

    causal: bool

    def __init__(self, operators: Any, size: Size) -> None:
        super().__init__()
        self.ops, self.size = operators, size
        self.table = nn.Parameter(torch.randn(BYTES + 1, size.width) * 0.02)
        self.head = nn.Linear(size.width, BYTES, bias=False)
        self.layers = nn.ModuleList(self.layer() for _ in range(size.layers))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def layer(self) -> nn.ModuleDict:
        raise NotImplementedError

    def projections(self, bias: bool) -> dict[str, nn.Module]:
        return {name: nn.Linear(self.size.width, self.size.width, bias=bias) for name in "qkvo"}

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.size.heads, -1)).transpose(1, 2)

    def project(
        self, layer: nn.ModuleDict, name: str, x: torch.Tensor, activation: str | None = None
    ) -> torch.Tensor:
        y: torch.Tensor = self.ops.linear(x, layer[name].weight, layer[name].bias, activation=activation)
        return y

    def attend(self, layer: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.heads(self.project(layer, name, x)) for name in "qkv")
        q, k = self.place(q, k)
        y = self.ops.attention(q, k, v, causal=self.causal)
        return self.project(layer, "o", y.transpose(1, 2).flatten(2))

    def place(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return q, k

    def loss(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.ops.linear_cross_entropy(self(ids), self.head.weight, target)


class Llama(Model):
    """Pre-norm, rotary embedding, causal attention, gated SiLU."""

    causal = True

    def __init__(self, operators: Any, size: Size) -> None:
        super().__init__(operators, size)
        self.norm = nn.Parameter(torch.ones(size.width))
        cos, sin = ops.rope_table(size.width // size.heads, size.length)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def layer(self) -> nn.ModuleDict:
        width, inner = self.size.width, self.size.inner
        norms = nn.ParameterDict({name: torch.ones(width) for name in ("attention", "mlp")})
        return nn.ModuleDict(
            {
                **self.projections(bias=False),
                "gate": nn.Linear(width, inner, bias=False),
                "up": nn.Linear(width, inner, bias=False),
                "down": nn.Linear(inner, width, bias=False),
                "norms": norms,
            }
        )

    def place(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ops.rope_qk(q, k, self.cos, self.sin)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        stream = self.ops.embedding(ids, self.table)
        added = torch.zeros_like(stream)
        for layer in self.layers:
            x, stream = self.ops.rms_norm(added, layer["norms"]["attention"], residual=stream)
            added = self.attend(layer, x)
            x, stream = self.ops.rms_norm(added, layer["norms"]["mlp"], residual=stream)
            gate, up = (self.project(layer, name, x) for name in ("gate", "up"))
            added = self.project(layer, "down", self.ops.silu_mul(gate, up))
        x, _ = self.ops.rms_norm(added, self.norm, residual=stream)
        return x


class Bert(Model):
    """Post-norm, learned positions, attention in both directions, GELU."""

    causal = False

    def __init__(self, operators: Any, size: Size) -> None:
        super().__init__(operators, size)
        self.positions = nn.Parameter(torch.randn(size.length, size.width) * 0.02)
        self.norm = self.affine()

    def affine(self) -> nn.ParameterList:
        return nn.ParameterList([torch.ones(self.size.width), torch.zeros(self.size.width)])

    def layer(self) -> nn.ModuleDict:
        width = self.size.width
        return nn.ModuleDict(
            {
                **self.projections(bias=True),
                "up": nn.Linear(width, 4 * width),
                "down": nn.Linear(4 * width, width),
                "attention": self.affine(),
                "mlp": self.affine(),
            }
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.ops.embedding(ids, self.table)
        x, _ = self.ops.layer_norm(x, *self.norm, residual=self.positions.expand_as(x))
        for layer in self.layers:
            x, _ = self.ops.layer_norm(self.attend(layer, x), *layer["attention"], residual=x)
            y = self.project(layer, "down", self.project(layer, "up", x, "gelu"))
            x, _ = self.ops.layer_norm(y, *layer["mlp"], residual=x)
        return x


MODELS: dict[str, type[Model]] = {"llama": Llama, "bert": Bert}


def batches(model: str, size: Size, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(ids, target) for each step: the next byte for Llama; for BERT the bytes hidden, 15 in 100."""
    generator = torch.Generator().manual_seed(1)
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    found = []
    for _ in range(steps):
        starts = torch.randint(0, len(text) - size.length, (size.batch, 1), generator=generator)
        pieces = text[starts + torch.arange(size.length + 1)]
        if model == "llama":
            found.append((pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()))
        else:
            ids = pieces[:, :-1]
            hidden = torch.rand(ids.shape, generator=generator) < 0.15
            found.append((ids.masked_fill(hidden, MASK), ids.masked_fill(~hidden, IGNORED)))
    return found


class Training:
    """A model, its optimizer, and the loss of every step taken."""

    def __init__(self, model: Model, data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.model, self.data = model, data
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        self.losses: list[float] = []

    def step(self) -> None:
        """The next batch: forward, backward, update."""
        loss = self.model.loss(*self.data[len(self.losses)])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


def gradients(model: Model, ids: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """The loss's gradient by parameter."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(model.loss(ids, target), parameters)
    return dict(zip(names, found, strict=True))


def compare_gradients(
    models: dict[str, Model], batches: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, Any]:
    """Errors against a float64 copy, by parameter, and what is allowed: twice eager's plus one ulp.

    A norm has few numbers, so the largest error of one batch is luck: the largest of several batches counts, of both.
    """
    found: dict[str, Any] = {}
    double = copy.deepcopy(models["eager"]).double()
    for batch in batches:
        exact, eager, ours = (gradients(one, *batch) for one in (double, models["eager"], models["opsmith"]))
        for name, right in exact.items():
            line = found.setdefault(name, {"eager": 0.0, "opsmith": 0.0, "largest": 0.0})
            line["largest"] = max(line["largest"], float(right.abs().max()))
            for who, got in (("eager", eager), ("opsmith", ours)):
                line[who] = max(line[who], float((got[name].double() - right).abs().max()))
    for line in found.values():
        line["allowed"] = 2 * line["eager"] + measure.ulp(torch.float32, line.pop("largest"))
    return found


def prove(model: str, size: Size, steps: int, *, attention: bool = False) -> dict[str, Any]:
    """Train a model with each set of operators, a step of one after a step of the other, in random order."""
    data = batches(model, size, steps)
    names = [name for name in OPERATORS if attention or name != "eager attention"]
    torch.manual_seed(0)
    first = MODELS[model](Eager, size)
    models = {name: copy.deepcopy(first) for name in names}
    for name, each in models.items():
        each.ops = OPERATORS[name]
    errors = compare_gradients(models, data[:4])
    trainings = {name: Training(each, data) for name, each in models.items()}
    for training in trainings.values():
        training.step()  # untimed: kernels are built and memory is found
    timed = measure.compare(
        {name: training.step for name, training in trainings.items()},
        rounds=steps - 2,  # one more call sets the number of calls in a sample
        min_time=1e-9,
        warmup=0,
        notes={"what": "one step: forward, backward, AdamW"},
    )
    losses = {name: training.losses for name, training in trainings.items()}
    for training in trainings.values():
        while len(training.losses) < steps:
            training.step()
    apart = max(abs(a - b) for a, b in zip(losses["eager"], losses["opsmith"], strict=True))
    ratios = {name: timed.ratio("opsmith", name).to_json() for name in names if name != "opsmith"}
    return {
        "model": model,
        "size": asdict(size),
        "steps": steps,
        "parameters": sum(p.numel() for p in first.parameters()),
        "losses": losses,
        "largest_difference": apart,
        "gradients": errors,
        "seconds": {name: timed.median(name) for name in names},
        "ratio_to": ratios,
        "holds": {
            "loss": apart <= LOSS_BOUND,
            "gradients": all(line["opsmith"] <= line["allowed"] for line in errors.values()),
            "time": ratios["eager"]["median"] <= TIME_BOUND,
        },
        "comparison": timed.to_json(),
    }


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Both loss curves of every model, and how far apart they are."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "opsmith", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(results), figsize=(4.5 * len(results), 4.5), squeeze=False)
    for (top, bottom), result in zip(axes.T, results, strict=True):
        eager, ours = result["losses"]["eager"], result["losses"]["opsmith"]
        steps = range(1, len(eager) + 1)
        top.plot(steps, eager, color="tab:gray", linewidth=3, alpha=0.6, label="PyTorch")
        top.plot(steps, ours, color="tab:orange", linewidth=1, label="opsmith")
        top.set(title=f"{result['model']}-like", ylabel="loss, nats per byte")
        top.legend()
        bottom.semilogy(steps, [max(abs(a - b), 1e-9) for a, b in zip(eager, ours, strict=True)], linewidth=1)
        bottom.axhline(LOSS_BOUND, color="tab:red", linestyle="--", linewidth=1)
        bottom.set(xlabel="step", ylabel="difference of the losses")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def show(result: dict[str, Any]) -> None:
    losses, holds = result["losses"]["opsmith"], result["holds"]
    ratio = {name: f"{line['median']:.3f}" for name, line in result["ratio_to"].items()}
    worst = max(result["gradients"].items(), key=lambda item: item[1]["opsmith"] / item[1]["allowed"])
    share = worst[1]["opsmith"] / worst[1]["allowed"]
    words = {True: "holds", False: "MISSED"}
    typer.echo(f"{result['model']}: {result['parameters']} parameters, {result['steps']} steps")
    typer.echo(f"  loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    typer.echo(f"  largest difference {result['largest_difference']:.2e}: {words[holds['loss']]}")
    typer.echo(f"  gradients: {share:.2f} of what is allowed at {worst[0]}: {words[holds['gradients']]}")
    typer.echo(f"  time per step: {ratio} (median of the ratios): {words[holds['time']]}")
    typer.echo("  " + ", ".join(f"{name} {s * 1e3:.1f} ms" for name, s in result["seconds"].items()))


def main(
    model: Annotated[list[str] | None, typer.Option(help="llama, bert; both by default.")] = None,
    steps: Annotated[int, typer.Option(min=6)] = 200,
    attention: Annotated[bool, typer.Option(help="Train with attention step by step as well.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Where the SVG goes.")] = None,
) -> None:
    """Train both models with both sets of operators, and write what was found."""
    found = {}
    for name in model or list(MODELS):
        found[name] = prove(name, Size(), steps, attention=attention)
        show(found[name])
    drawn = found
    if out is not None:
        machine = describe()
        cpu = re.sub(r"[^a-z0-9]+", "-", machine.cpu.lower()).strip("-")
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"training-{datetime.date.today().isoformat()}-{cpu}.json"
        old = json.loads(path.read_text())["results"] if path.exists() else {}
        drawn = {**old, **found}  # today's run of the other model stays
        path.write_text(json.dumps({"machine": machine.to_json(), "results": drawn}, indent=1) + "\n")
        typer.echo(path)
    if picture is not None:
        draw(list(drawn.values()), picture)
    if not all(result["holds"][what] for result in found.values() for what in ("loss", "gradients")):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
