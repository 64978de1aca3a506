"""`opsmith new`: the files of a project, written all or not at all."""

from __future__ import annotations

import ast
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jinja2

from opsmith.authoring.lower import triton as lower_triton
from opsmith.authoring.new.generate import Project
from opsmith.authoring.prototype import PrototypeError, read
from opsmith.backends import installed, missing

_TEMPLATES = Path(__file__).parents[1] / "templates"
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
# What writes the files of each back end: a function of the project, giving texts by file name.
_OWN: dict[str, Callable[[Project], Mapping[str, str]]] = {
    "cpu": lambda p: {f"{p.name}.cpp": render("cpu.cpp", p)},
    "triton": lambda p: {f"{p.name}.py": _triton(p)},
    "cuda": lambda p: {f"{p.name}.{end}": render(f"cuda.{end}", p) for end in ("cu", "h", "cpp")},
}


def create(
    prototype: Path,
    folder: Path | None = None,
    *,
    op: str | None = None,
    backends: Sequence[str] = ("cpu",),
    reference: str | None = None,
    by_hand: bool = False,
) -> tuple[Path, list[Path], list[str]]:
    """Write the project of a prototype; returns its folder, its files, and notes on what was left out.

    Raises:
        PrototypeError, FormulaError: what the prototype says cannot be, and why. Nothing is written.
        ValueError: an unknown back end, or the folder exists.
    """
    further = {b.name: b for b in installed().values() if b.kernels}
    if unknown := [b for b in backends if b not in _OWN and b not in further]:
        raise ValueError(missing(unknown[0]))
    asked = read(prototype, op)
    free = [b.name for b in further.values() if b.layouts]
    others = [b for b in backends if b not in free]
    for t in asked.tensors if others else ():
        if other := [f for f in t.format if f != "ND"]:
            raise PrototypeError(
                f"{asked.op}: {t.name} has format {other[0]}; {', '.join(others)} take ND: tensors as PyTorch "
                "lays them out"
                + (f". Only --backends {', '.join(free)} alone knows other layouts" if free else "")
            )
    if reference is not None and asked.formula is not None:
        raise PrototypeError(
            f"{asked.op} has a formula, which is its definition; take it out, or leave --reference"
        )
    if reference is not None and not _FUNCTION.fullmatch(reference):
        raise ValueError(f"--reference: {reference!r} is no module:function, such as models.norms:rms_norm")
    project = Project(asked, tuple(dict.fromkeys(backends)), reference, by_hand)
    if project.name in _built_in():
        raise ValueError(
            f"{project.name} is one of opsmith's own operators; give op another name, My{asked.op} say"
        )
    target = Path(f"{project.name}_op") if folder is None else folder
    if target.exists():
        raise ValueError(f"{target} exists, and `new` overwrites nothing; choose another folder with -o")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"{target.absolute().parent} is no folder; make it first, or choose another with -o")
    files = _files(project, target)
    _write(target, files)
    return target, [target / name for name in files], _notes(project)


def _built_in() -> set[str]:
    """The names of our own operators, read and not imported: that would take PyTorch a second."""
    source = ast.parse((Path(__file__).parents[2] / "ops" / "__init__.py").read_text())
    lists = {ast.unparse(n.targets[0]): n.value for n in source.body if isinstance(n, ast.Assign)}
    return set(ast.literal_eval(lists["__all__"]))


def _files(p: Project, folder: Path) -> dict[str, str]:
    files = {
        "__init__.py": f'"""The operator {p.name}; its card is in operator.py."""\n',
        "operator.py": render("operator.py", p, **_operator(p)),
    }
    for backend in p.backends:
        write = _OWN[backend] if backend in _OWN else installed()[backend].write
        for name, text in write(p).items():
            files[f"kernels/{backend}/{name}"] = text
    files[f"tests/test_{p.name}.py"] = render("test.py", p)
    files["bench.py"] = render("bench.py", p)
    rest = [n for n in p.kernel_inputs if n not in p.gradients and n not in p.formula.truths]
    files["README.md"] = render("README.md", p, folder=folder.name, rest=rest, notes=_notes(p))
    return files


def _operator(p: Project) -> dict[str, object]:
    body = "\n".join([*p.reference_lines, *(p.inner_lines if p.product else ())])
    many = len(p.formula.outputs) > 1
    numbers = ", ".join(p.parameters.split(", ")[len(p.shapes) :])
    before = [f"torch.matmul({', '.join(str(a.value) for a in p.product.args)})"] if p.product else []
    before += [n for n in p.kernel_inputs if n != "product"]
    strided = [p.strided[1] if p.strided and n == p.strided[0] else n for n in p.shapes]
    sizes = ["{'x'.join(map(str, lead))}" if s == "lead" else f"{{{s}}}" for s in p.symbols]
    extra = [f'"{n}": 0.5' for n, default in p.formula.attributes.items() if default is None]
    return {
        "body": body,
        "rotations": ", ".join(r for r in ("rotate_half", "rotate_interleaved") if f"{r}(" in body),
        "kernel_inputs": {n: " ".join(map(str, s)) for n, s in p.kernel_inputs.items()},
        "outputs": {n: " ".join(map(str, s)) for n, s in p.formula.shapes.items()},
        "truths": {n: "bool" for n in p.shapes if n in p.formula.truths},
        "strings": lambda d: "{" + ", ".join(f'"{k}": "{v}"' for k, v in d.items()) + "}",
        "attributes": "{" + ", ".join(f'"{n}": {v!r}' for n, v in p.formula.attributes.items()) + "}",
        "result": "tuple[torch.Tensor, ...]" if many else "torch.Tensor",
        "tensors": ", ".join(f"{n}: torch.Tensor" for n in p.shapes),
        "names": ", ".join(p.shapes),
        "before": ", ".join(before) + ("," if len(before) == 1 else ""),
        "inner_parameters": ", ".join(
            [*(f"{n}: torch.Tensor" for n in p.kernel_inputs), *([numbers] if numbers else [])]
        ),
        "symbols": ", ".join(f"{s}: {'tuple[int, ...]' if s == 'lead' else 'int'}" for s in p.symbols),
        "makes": ", ".join(p.make_text(n) for n in p.shapes),
        "sample_name": "x".join(sizes),
        "extra": f", {{{', '.join(extra)}}}" if extra else "",
        "strided": ", ".join(strided) + ("," if len(strided) == 1 else ""),
        "workload_names": [w.replace("(", "").replace(",)", "").replace(", ", "x") for w in p.workload_sizes],
    }


def _triton(p: Project) -> str:
    body = p.triton()
    commons = [n for n in ("block_of", "launch", "processors", "rounded", "warps_of") if f"{n}(" in body]
    return render("triton.py", p, body=body, commons=commons, helpers=lower_triton.helpers([body]))


def _notes(p: Project) -> list[str]:
    notes = []
    if p.to_write:
        notes.append(f"Yours to write, where the kernels say WRITE HERE: {' and '.join(p.to_write)}.")
    if unused := [a.name for a in p.prototype.attr if a.name not in p.formula.attributes]:
        notes.append(f"Left out, as the formula does not use it: {', '.join(unused)}.")
    taken = {t for column in p.columns for t in column.values()}
    if dropped := {t for column in p.prototype.columns() for t in column} - taken:
        notes.append(f"No kernels are generated for {', '.join(sorted(dropped))}.")
    return notes


def _broken(text: str, indent: int = 0, limit: int = 110) -> str:
    """A line of Python, in several where it is too long: what its last outer brackets hold, on lines of its own."""
    if len(text) + indent <= limit or "(" not in text:
        return text
    depth, end = 0, text.rindex(")")
    for start in range(end, -1, -1):
        depth += (text[start] in ")]}") - (text[start] in "([{")
        if depth == 0:
            break
    inside = text[start + 1 : end]
    pad = " " * indent
    if len(inside) + indent + 4 <= limit:
        return f"{text[: start + 1]}\n{pad}    {inside}\n{pad}{text[end:]}"
    lines, depth, begin = [], 0, 0
    for i, c in enumerate(inside):
        depth += (c in "([{") - (c in ")]}")
        if depth == 0 and inside.startswith(", ", i):
            lines.append(f"{pad}    {inside[begin:i]},")
            begin = i + 2
    lines.append(f"{pad}    {inside[begin:]},")
    return "\n".join([text[: start + 1], *lines, f"{pad}{text[end:]}"])


def _wrapped(text: str, indent: int, limit: int = 118) -> str:
    """A line of C++, in several where it is too long: broken behind commas and before pluses, as far right as fits."""
    lines = []
    while len(text) > limit:
        at = max(text.rfind(", ", 0, limit) + 1, text.rfind(" + ", 0, limit) + 2)
        if at < indent + 2:
            break
        lines.append(text[:at].rstrip())
        text = " " * indent + text[at:].lstrip()
    return "\n".join([*lines, text])


def render(template: str, p: Project, templates: Path = _TEMPLATES, /, **more: object) -> str:
    """One file, of the template of that name in a folder."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # code, not HTML; what a prototype may say is checked when it is read
    )
    environment.filters |= {"broken": _broken, "wrapped": _wrapped}
    text = environment.get_template(f"{template}.j2").render(p=p, **more)
    return text.rstrip("\n") + "\n"


def _write(target: Path, files: Mapping[str, str]) -> None:
    """All files, or none: they appear under their name at once."""
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.absolute().parent))
    try:
        made.chmod(0o755)
        for name, text in files.items():
            path = made / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="surrogateescape")  # of a folder's name
        os.rename(made, target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
