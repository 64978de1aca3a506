"""The PyTorch reference of a formula: the lines of a function, as a person would write them."""

from __future__ import annotations

from collections.abc import Mapping

from opsmith.authoring.formula.nodes import REDUCTIONS, Formula, Node, walk
from opsmith.authoring.lower.emit import Emitter

_ROW = ("sum", "mean", "max", "min", "var", "softmax", "rotate_half", "rotate_interleaved")
_NUMBER = {"sqrt": "math.sqrt", "exp": "math.exp", "log": "math.log", "tanh": "math.tanh"}
_TENSOR = {
    "silu": "F.silu({0})",
    "gelu": "F.gelu({0})",
    "gelu_tanh": 'F.gelu({0}, approximate="tanh")',
    "where": "torch.where({0}, {1}, {2})",
    "sum": "torch.sum({0}, -1, keepdim=True)",
    "mean": "torch.mean({0}, -1, keepdim=True)",
    "max": "torch.amax({0}, -1, keepdim=True)",
    "min": "torch.amin({0}, -1, keepdim=True)",
    "softmax": "torch.softmax({0}, -1)",
    "matmul": "torch.matmul({0}, {1})",
    "rotate_half": "rotate_half({0})",
    "rotate_interleaved": "rotate_interleaved({0})",
}


def reference_lines(
    formula: Formula, like: Mapping[str, str] | None = None, after_matmul: bool = False
) -> list[str]:
    """The body of the reference, which returns the outputs in order, in the dtypes of the inputs they are `like`."""
    emitter = _Lines(formula, after_matmul)
    emitter.count(formula.outputs.values())
    results = []
    for name, root in formula.outputs.items():
        text = emitter.text(root)
        if formula.shapes[name] != root.shape:
            text = f"({text}).squeeze(-1)" if " " in text else f"{text}.squeeze(-1)"
        if like and name in like:
            text = f"{_bracketed(text)}.to({like[name]}.dtype)"
        results.append(text)
    return [*emitter.lines, f"return {', '.join(results)}"]


class _Lines(Emitter):
    """The statements in front of the last; row functions are seen through, as their arguments are values here too."""

    def __init__(self, formula: Formula, after_matmul: bool) -> None:
        super().__init__(self.leaf, _call, self.define, _number)
        self.graph, self.after_matmul = formula.graph, after_matmul
        self.lines: list[str] = []
        self.names: dict[int, str] = {}
        self.taken = {*formula.inputs, *formula.attributes}

    def leaf(self, node: Node, place: int) -> str | None:
        if node.kind in ("input", "attribute"):
            return str(node.value)
        if node.kind in _ROW and len(node.args) == 1:
            x = self.text(node.args[0])
            if node.kind == "var":  # torch.var warns of empty tensors
                center = self.text(self.graph.make("mean", node.args[0]))
                return self.define(f"torch.mean(({x} - {center}).square(), -1, keepdim=True)", node, place)
            text = _TENSOR[node.kind].format(x)
            return self.define(text, node, place) if node.kind in REDUCTIONS else text
        if node.kind == "matmul":
            return "product" if self.after_matmul else _TENSOR["matmul"].format(*(a.value for a in node.args))
        return None

    def define(self, text: str, node: Node, place: int) -> str:
        if id(node) not in self.names:
            wanted = node.kind if node.kind in REDUCTIONS else "v_1"
            count = 1
            while wanted in self.taken:
                count += 1
                wanted = f"{node.kind}_{count}" if node.kind in REDUCTIONS else f"v_{count}"
            self.names[id(node)] = wanted
            self.taken.add(wanted)
            self.lines.append(f"{wanted} = {text}")
        return self.names[id(node)]

    def _below(self, node: Node, place: int) -> list[tuple[Node, int]]:
        return [] if node.kind == "matmul" else [(a, 0) for a in node.args]


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e6 else repr(value)


def _call(node: Node, texts: list[str]) -> str:
    kind = node.kind
    if kind in _NUMBER and node.number:
        return f"{_NUMBER[kind]}({texts[0]})"
    if kind in ("max", "min"):
        a, b = node.args
        if node.number:
            return f"{kind}({texts[0]}, {texts[1]})"
        if a.number or b.number:
            tensor, bound = (texts[1], texts[0]) if a.number else (texts[0], texts[1])
            return f"torch.clamp({tensor}, {'min' if kind == 'max' else 'max'}={bound})"
        return f"torch.{kind}imum({texts[0]}, {texts[1]})"
    if kind == "where" and node.number:
        return f"({texts[1]} if {texts[0]} else {texts[2]})"
    if kind == "where":
        if node.args[0].number:  # Python's truth, beside tensors
            texts[0] = f"torch.tensor({texts[0]})"
        text = f"torch.where({', '.join(texts)})"
        return f"{text}.to({_dtype_of(node)})" if node.args[1].number and node.args[2].number else text
    if kind == "cast":
        return f"{_bracketed(texts[0])}.to(torch.{node.value}).to({_dtype_of(node)})"
    return _TENSOR[kind].format(*texts) if kind in _TENSOR else f"torch.{kind}({texts[0]})"


def _bracketed(text: str) -> str:
    return text if text.isidentifier() else f"({text})"


def _dtype_of(node: Node) -> str:
    return f"{next(n.value for n in walk([node]) if n.kind == 'input')}.dtype"
