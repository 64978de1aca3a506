"""Matching a term against a card's pattern: variables bind to terms, marked constants to numbers.

Both sides are in normal form, so matching is structural: polynomials monomial by monomial (in any order, with
backtracking), functions by name. The mismatch that came closest is kept, for the report of near misses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from opsmith.compiler import arithmetic, contractions, layouts, reductions  # noqa: F401  register their rules
from opsmith.compiler.canon import Canon
from opsmith.compiler.terms import Atom, Mono, Poly, Space
from opsmith.compiler.views import inverse, permute
from opsmith.operator import Operator, Pattern

Binding = dict[str, "Poly | float"]
RTOL = (
    2e-5  # constants written with six digits are the same constant; an unbiased variance is not a biased one
)


@dataclass(frozen=True)
class Var:
    """A variable of a pattern."""

    name: str


@dataclass
class Mismatch:
    """The closest failure so far: how far the matching came, what it wanted and what stood there."""

    score: int = -1
    expected: str = ""
    got: str = ""
    at: Poly | Atom | None = None


@dataclass
class Template:
    """A pattern in normal form."""

    card: Operator
    pattern: Pattern
    term: Poly
    holes: dict[str, float]
    names: frozenset[str]
    variables: tuple[str, ...]
    cut: (
        str | None
    )  # the variable to look for among the root's ancestors, where the pattern is no contraction

    @classmethod
    def trace(cls, space: Space, card: Operator, pattern: Pattern) -> Template:
        """Trace the pattern's function as the model is traced, and read it as a term."""
        sizes: dict[str, int] = {}
        primes = iter((3, 5, 7, 11, 13, 17, 19, 23))
        tensors: dict[str, torch.Tensor] = {}
        holes: dict[str, float] = {}
        for name, spec in pattern.inputs.items():
            if isinstance(spec, int | float):
                holes[name] = float(spec)
                continue
            shape = [
                d if isinstance(d, int) else sizes.setdefault(d, 0) or _size(sizes, d, primes) for d in spec
            ]
            dtype = {"ids": torch.int64, "bool": torch.bool}.get(pattern.dtypes.get(name, ""), torch.float32)
            tensors[name] = torch.zeros(shape, dtype=dtype)

        def call(*values: torch.Tensor) -> Any:
            return pattern.fn(**dict(zip(tensors, values, strict=True)), **holes)

        graph = make_fx(call, pre_dispatch=True)(*tensors.values()).graph
        output = next(n for n in graph.nodes if n.op == "output").args[0]
        root = output[0] if isinstance(output, list | tuple) else output
        cut = {}
        for placeholder, name in zip((n for n in graph.nodes if n.op == "placeholder"), tensors, strict=True):
            cut[placeholder] = space.leaf(Var(name), tuple(int(d) for d in tensors[name].shape))
        term = Canon(space, cut, root)(root)
        names = frozenset(function_names(term))
        first = next(iter(tensors))
        contraction = names & {"matmul", "gather"}
        return cls(card, pattern, term, holes, names, tuple(tensors), None if contraction else first)


def _size(sizes: dict[str, int], symbol: str, primes: Any) -> int:
    sizes[symbol] = next(primes)
    return sizes[symbol]


def function_names(poly: Poly, seen: set[int] | None = None) -> set[str]:
    """The names of the functions in a term; `exp` when it has an exponential."""
    seen = set() if seen is None else seen
    names: set[str] = set()
    if poly.uid in seen:
        return names
    seen.add(poly.uid)
    for mono, _ in poly.terms:
        if mono.expo is not None:
            names |= {"exp"} | function_names(mono.expo, seen)
        for atom, _power in mono.factors:
            if atom.leaf is None:
                names.add(atom.name)
            for arg in atom.args:
                names |= function_names(arg, seen)
    return names


@dataclass
class Matcher:
    """One attempt to read a term as a template."""

    space: Space
    template: Template
    mismatch: Mismatch = field(default_factory=Mismatch)
    level: int = 0  # how deep in the pattern the matching stands: a failure further in came closer

    def match(self, term: Poly, known: Binding | None = None) -> Binding | None:
        """The bindings under which the template equals `term`, or None (then `mismatch` says where they part)."""
        return self._poly(self.template.term, term, dict(known or {}))

    def _fail(self, env: Binding, expected: Poly | Atom | str, got: Poly | Atom) -> None:
        score = 4 * len(env) + self.level
        if score > self.mismatch.score:
            text = expected if isinstance(expected, str) else show(expected)
            self.mismatch = Mismatch(score, text, show(got), got)

    def _variable(self, poly: Poly) -> str | None:
        atom = poly.atom
        return atom.leaf.name if atom is not None and isinstance(atom.leaf, Var) else None

    def _bind(self, env: Binding, name: str, value: Poly | float, at: Poly | Atom) -> Binding | None:
        bound = env.get(name)
        if bound is None:
            return {**env, name: value}
        same = bound is value or (
            isinstance(bound, float) and isinstance(value, float) and math.isclose(bound, value, rel_tol=RTOL)
        )
        if not same:
            text = show(bound) if isinstance(bound, Poly) else f"{bound:g}"
            self._fail(env, f"{name} = {text} again", at)
            return None
        return env

    def _poly(self, p: Poly, t: Poly, env: Binding) -> Binding | None:
        name = self._variable(p)
        if name is not None:
            return self._bind(env, name, t, t)
        # The most particular monomials first; a bare variable may take all that the others leave.
        order = sorted(p.terms, key=lambda m: (self._variable_mono(m[0]) is not None, -len(m[0].factors)))
        last = self._variable_mono(order[-1][0]) if order else None
        absorbs = last is not None and order[-1][1] == 1.0
        if len(t.terms) < len(p.terms) or (len(t.terms) > len(p.terms) and not absorbs):
            if p is not self.template.term:  # another number of terms altogether is not a near miss
                self._fail(env, p, t)
            return None
        return self._monos(order, list(t.terms), env, absorbs, t)

    def _variable_mono(self, mono: Mono) -> str | None:
        ok = mono.expo is None and len(mono.factors) == 1 and mono.factors[0][1] == 1
        leaf = mono.factors[0][0].leaf if ok else None
        return leaf.name if isinstance(leaf, Var) else None

    def _monos(
        self,
        todo: list[tuple[Mono, float]],
        left: list[tuple[Mono, float]],
        env: Binding,
        absorbs: bool,
        whole: Poly,
    ) -> Binding | None:
        if not todo:
            return env if not left else None
        (pm, pc), *rest = todo
        if not rest and absorbs:
            name = self._variable_mono(pm)
            assert name is not None
            return self._bind(env, name, self.space._poly(dict(left)), whole)
        for i, (tm, tc) in enumerate(left):
            found = self._mono(pm, pc, tm, tc, env)
            if found is not None:
                done = self._monos(rest, left[:i] + left[i + 1 :], found, absorbs, whole)
                if done is not None:
                    return done
        return None

    def _mono(self, pm: Mono, pc: float, tm: Mono, tc: float, env: Binding) -> Binding | None:
        term = self.space._poly({tm: tc})
        hole = next(
            (n for n, v in self.template.holes.items() if math.isclose(abs(pc), v, rel_tol=1e-9)), None
        )
        if hole is not None:
            bound = self._bind(env, hole, tc if pc > 0 else -tc, term)
            if bound is None:
                return None
            env = bound
        elif not math.isclose(pc, tc, rel_tol=RTOL):
            if len(pm.factors) == len(tm.factors) and (pm.expo is None) == (tm.expo is None):
                self._fail(env, f"the coefficient {pc:.6g} of {show(self.space._poly({pm: pc}))}", term)
            return None
        if (pm.expo is None) != (tm.expo is None) or len(pm.factors) != len(tm.factors):
            self._fail(env, self.space._poly({pm: pc}), term)
            return None
        todo = sorted(pm.factors, key=lambda f: isinstance(f[0].leaf, Var))
        found = self._factors(todo, list(tm.factors), env)
        if found is None or pm.expo is None or tm.expo is None:
            return found
        self.level += 1
        try:
            return self._poly(pm.expo, tm.expo, found)
        finally:
            self.level -= 1

    def _factors(
        self, todo: list[tuple[Atom, float]], left: list[tuple[Atom, float]], env: Binding
    ) -> Binding | None:
        if not todo:
            return env
        (pa, pp), *rest = todo
        for i, (ta, tp) in enumerate(left):
            if not math.isclose(pp, tp, rel_tol=RTOL):
                if pa.name == ta.name and pa.leaf is None:
                    self._fail(env, f"the power {pp:g} of {show(pa)}", ta)
                continue
            found = self._atom(pa, ta, env)
            if found is not None:
                done = self._factors(rest, left[:i] + left[i + 1 :], found)
                if done is not None:
                    return done
        return None

    def _atom(self, p: Atom, t: Atom, env: Binding) -> Binding | None:
        if isinstance(p.leaf, Var):
            return self._bind(env, p.leaf.name, self.space.from_atom(t), t)
        if p is t:
            return env
        if p.name == "permute" and t.name != "permute" and self._may_transpose(p, t):
            # The model keeps the matrix the other way round (a Conv1D): the variable is its transpose.
            return self._poly(p.args[0], permute(self.space, self.space.from_atom(t), inverse(p.attrs)), env)
        if p.name != t.name or len(p.args) != len(t.args) or p.leaf is not None:
            self._fail(env, p, t)
            return None
        if p.name == "permute":
            return self._permuted(p, t, env)
        if p.attrs != t.attrs and p.name != "reshape":
            self._fail(env, p, t)
            return None
        self.level += 1
        try:
            for pa, ta in zip(p.args, t.args, strict=True):
                found = self._poly(pa, ta, env)
                if found is None:
                    return None
                env = found
            return env
        finally:
            self.level -= 1

    def _may_transpose(self, p: Atom, t: Atom) -> bool:
        """True for a matrix that need not reach the operator in the layout of other inputs."""
        name = self._variable(p.args[0])
        return (
            name is not None
            and name not in self.template.pattern.aligned
            and len(t.shape) == len(p.attrs) == 2
        )

    def _permuted(self, p: Atom, t: Atom, env: Binding) -> Binding | None:
        """A pattern's transposed variable against any permutation: the variable takes the remaining permutation."""
        if len(p.attrs) != len(t.attrs):
            self._fail(env, p, t)
            return None
        undo = inverse(p.attrs)
        rest = tuple(t.attrs[i] for i in undo)
        return self._poly(p.args[0], permute(self.space, t.args[0], rest), env)


def show(term: Poly | Atom, depth: int = 0) -> str:
    """A term as a person writes it, cut short where it is deep."""
    if isinstance(term, Atom):
        if isinstance(term.leaf, Var):
            return term.leaf.name
        if term.leaf is not None:
            return term.leaf.name if isinstance(term.leaf, Node) else str(term.leaf)
        if depth > 3:
            return f"{term.name}(...)"
        inner = ", ".join([show(a, depth + 1) for a in term.args] + [str(a) for a in term.attrs])
        return f"({inner})" if term.name == "base" else f"{term.name}({inner})"
    if not term.terms:
        return "0"
    parts = []
    for mono, coef in term.terms[:6]:
        factors = [show(a, depth + 1) + ("" if p == 1 else f"^{p:g}") for a, p in mono.factors]
        if mono.expo is not None:
            factors.append(f"exp({show(mono.expo, depth + 1)})")
        if coef != 1 or not factors:
            factors.insert(0, f"{coef:.6g}")
        parts.append("*".join(factors))
    return " + ".join(parts) + (" + ..." if len(term.terms) > 6 else "")
