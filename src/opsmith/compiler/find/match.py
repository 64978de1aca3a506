"""Matching a term against a card's pattern: variables bind to terms, marked constants to numbers.

Both sides are in normal form, so matching is structural: polynomials monomial by monomial (in any order, with
backtracking), functions by name. The mismatch that came closest is kept, for the report of near misses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from torch.fx import Node

from opsmith.compiler.algebra.pieces import Piece
from opsmith.compiler.algebra.terms import Atom, Mono, Poly, Space
from opsmith.compiler.algebra.views import inverse, permute
from opsmith.compiler.find.template import Template, Var

Binding = dict[str, "Poly | float"]
Match = Callable[[Any, Any, Binding], "Binding | None"]
# Constants written with six digits are the same constant; an unbiased variance is not a biased one.
RTOL = 2e-5


@dataclass
class Mismatch:
    """The closest failure so far: how far the matching came, what it wanted and what stood there."""

    score: int = -1
    expected: Poly | Atom | str = ""
    got: Poly | Atom | str = ""
    at: Poly | Atom | Node | None = None

    def texts(self, holes: dict[str, float]) -> tuple[str, str]:
        """What was wanted and what stood there, as people read it: most mismatches are never reported."""
        expected, got = (v if isinstance(v, str) else show(v) for v in (self.expected, self.got))
        for name, value in holes.items():
            expected = expected.replace(f"{value:.6g}", name)
        return expected, got


@dataclass
class Matcher:
    """One attempt to read a term as a template."""

    space: Space
    template: Template
    main: Node | None = None  # what the template's first variable is, where a reading says that
    mismatch: Mismatch = field(default_factory=Mismatch)
    level: int = 0  # how deep in the pattern the matching stands: a failure further in came closer
    # The pattern's blocks of the last axis: the term's.
    blocks: dict[Piece, Piece] = field(default_factory=dict)

    def match(self, term: Poly, known: Binding | None = None) -> Binding | None:
        """The bindings under which the template equals `term`, or None (then `mismatch` says where they part)."""
        return self._poly(self.template.term, term, dict(known or {}))

    def _fail(self, env: Binding, expected: Poly | Atom | str, got: Poly | Atom) -> Binding | None:
        """No binding; the mismatch is kept where it came closest, and where the main input has a say in it."""
        score = 4 * len(env) + self.level
        if score > self.mismatch.score and (self.main is None or self.main in parts(got)):
            self.mismatch = Mismatch(score, expected, got, got)
        return None

    @contextmanager
    def _deeper(self) -> Iterator[None]:
        self.level += 1
        try:
            yield
        finally:
            self.level -= 1

    def _bind(self, env: Binding, name: str, value: Poly | float, at: Poly | Atom) -> Binding | None:
        bound = env.get(name)
        if bound is None:
            return {**env, name: value}
        if bound is value:
            return env
        if isinstance(bound, float) and isinstance(value, float) and math.isclose(bound, value, rel_tol=RTOL):
            return env
        if name == self.template.cut and not self.level:
            return None  # another value than the main input, altogether
        text = show(bound) if isinstance(bound, Poly) else f"{bound:g}"
        return self._fail(env, f"{name} = {text} again", at)

    def _poly(self, p: Poly, t: Poly, env: Binding) -> Binding | None:
        if (name := _variable(p.atom)) is not None:
            return self._bind(env, name, t, t)
        negative = _variable(p.terms[0][0].atom) if len(p.terms) == 1 and p.terms[0][1] == -1 else None
        if negative is not None and len(t.terms) > 1:
            return self._bind(env, negative, self.space.scale(t, -1), t)
        # The most particular monomials first; a bare variable may take all that the others leave.
        order = sorted(p.terms, key=lambda m: (_variable(m[0].atom) is not None, -len(m[0].factors)))
        last = _variable(order[-1][0].atom) if order else None
        absorbs = last is not None and order[-1][1] == 1.0
        if len(t.terms) < len(p.terms) or (len(t.terms) > len(p.terms) and not absorbs):
            if p is not self.template.term:  # another number of terms altogether is not a near miss
                self._fail(env, p, t)
            return None

        def absorb(left: Sequence[tuple[Mono, float]], env: Binding) -> Binding | None:
            return self._bind(env, str(last), self.space._poly(dict(left)), t)

        if absorbs:
            return _paired(self._mono, order[:-1], t.terms, env, absorb)
        return _paired(self._mono, order, t.terms, env)

    def _mono(self, p: tuple[Mono, float], t: tuple[Mono, float], env: Binding) -> Binding | None:
        (pm, pc), (tm, tc) = p, t
        term = self.space._poly({tm: tc})
        holes = self.template.holes.items()
        hole = next((n for n, v in holes if math.isclose(abs(pc), v, rel_tol=1e-9)), None)
        if hole is not None:
            bound = self._bind(env, hole, tc if pc > 0 else -tc, term)
            if bound is None:
                return None
            env = bound
        same = hole is not None or math.isclose(pc, tc, rel_tol=RTOL)
        if (pm.expo is None) != (tm.expo is None) or len(pm.factors) != len(tm.factors):
            wanted = _functions(pm)
            # Else another thing altogether, as one product of matrices is of any other.
            near = same and (self.level or (wanted & _functions(tm) and wanted != {"matmul"}))
            return self._fail(env, self.space._poly({pm: pc}), term) if near else None
        # What is known already first: where that is not among the factors, the others need no look.
        todo = sorted(pm.factors, key=lambda f: 1 if f[0].leaf is None else 2 * (_variable(f[0]) not in env))
        found = _paired(self._factor, todo, tm.factors, env)
        if found is not None and not same:
            return self._fail(found, f"the coefficient {pc:.6g} of {show(self.space._poly({pm: pc}))}", term)
        if found is None or pm.expo is None or tm.expo is None:
            return found
        with self._deeper():
            return self._poly(pm.expo, tm.expo, found)

    def _factor(self, p: tuple[Atom, float], t: tuple[Atom, float], env: Binding) -> Binding | None:
        (pa, pp), (ta, tp) = p, t
        if math.isclose(pp, tp, rel_tol=RTOL):
            return self._atom(pa, ta, env)
        if pa.name == ta.name and pa.leaf is None and _powers(pa) <= _powers(ta):
            self._fail(env, f"the power {pp:g} of {show(pa)}", ta)
        return None

    def _atom(self, p: Atom, t: Atom, env: Binding) -> Binding | None:
        if isinstance(p.leaf, Var):
            return self._bind(env, p.leaf.name, self.space.from_atom(t), t)
        if p is t:
            return env
        if p.name == "permute" and len(t.shape) > len(p.attrs):
            return None  # a product of batches is no layer
        if p.name == "permute" and self._may_permute(p, t):
            # The variable takes the permutation that remains. Where the model keeps a matrix the other way round (a
            # Conv1D), it is the transpose. Batch and heads may be one axis.
            lacks = len(p.attrs) - len(t.shape)
            perm = inverse(tuple(i - lacks for i in p.attrs[lacks:]))
            return self._poly(p.args[0], permute(self.space.from_atom(t), perm), env)
        if p.name != t.name or len(p.args) != len(t.args) or p.leaf is not None:
            return self._fail(env, p, t) if self.level else None
        if p.name == "join":
            return self._joined(p, t, env)
        if (agreed := self._attrs(p, t, env)) is None:
            return self._fail(env, p, t)
        with self._deeper():
            found = _each(self._poly, p.args, t.args, agreed)
            if found is None and p.name == "larger":  # whichever of the two is named first
                return _each(self._poly, p.args, t.args[::-1], agreed)
            if found is None and p.name == "where" and _variable(p.args[0].atom) is not None:
                condition, first, second = t.args
                opposite = self.space.fn("not", condition)
                return _each(self._poly, p.args, (opposite, second, first), agreed)
            return found

    def _attrs(self, p: Atom, t: Atom, env: Binding) -> Binding | None:
        """Settings agree, or stand where the pattern has a marked constant."""

        def agree(wanted: Any, got: Any, env: Binding) -> Binding | None:
            hole = next((n for n, v in self.template.holes.items() if v == wanted), None)
            if hole is not None and isinstance(got, int | float):
                return self._bind(env, hole, got, t)
            return env if (self.blocks.get(wanted, wanted) if p.name == "take" else wanted) == got else None

        if p.name == "reshape":
            return env
        return _each(agree, p.attrs, t.attrs, env) if len(p.attrs) == len(t.attrs) else None

    def _joined(self, p: Atom, t: Atom, env: Binding) -> Binding | None:
        """Two joins of as many pieces, piece by piece."""
        (kind, sizes), (other, lengths) = p.attrs, t.attrs
        if kind != other:
            return self._fail(env, p, t)
        before = self.blocks
        if kind == "cat":
            starts, begins = (list(accumulate(n, initial=0)) for n in (sizes, lengths))
            self.blocks = {
                ("block", starts[i], sizes[i]): ("block", begins[i], lengths[i]) for i in range(len(sizes))
            }
        try:
            return _each(self._piece, p.args, t.args, env)
        finally:
            self.blocks = before

    def _piece(self, p: Poly, t: Poly, env: Binding) -> Binding | None:
        """A sum of pieces of the main input times variables: each variable is all that stands with its piece."""
        factors = [f for f in (self._coefficient(mono, coef) for mono, coef in p.terms) if f is not None]
        if len(factors) != len(p.terms):
            return self._poly(p, t, env)
        left = dict(t.terms)
        for wanted, sign, variable in factors:
            rest: dict[Mono, float] = {}
            for mono, coef in list(left.items()):
                main = [a for a, power in mono.factors if power == 1 and self._is_piece(wanted, a, env)]
                if len(main) == 1:
                    others = tuple(f for f in mono.factors if f[0] is not main[0])
                    rest[self.space.monomial(others, mono.expo).terms[0][0]] = sign * coef
                    del left[mono]
            if not rest:
                return self._fail(env, self.space.from_atom(wanted), t)
            found = self._poly(self.space.from_atom(variable), self.space._poly(rest), env)
            if found is None:
                return None
            env = found
        return self._fail(env, p, t) if left else env

    def _coefficient(self, mono: Mono, coef: float) -> tuple[Atom, float, Atom] | None:
        """A monomial of the pattern as (piece of the main input, sign, what it is multiplied by)."""
        if mono.expo is not None or abs(coef) != 1 or [p for _, p in mono.factors] != [1, 1]:
            return None
        (a, _), (b, _) = mono.factors
        main = self.template.variables[0]
        if _whole(a) == main:
            return a, coef, b
        return (b, coef, a) if _whole(b) == main else None

    def _is_piece(self, p: Atom, t: Atom, env: Binding) -> bool:
        """True when `t` is the piece of the main input that `p` is in the pattern."""
        if p.name != "take":
            return env.get(self.template.variables[0]) is self.space.from_atom(t)
        inner, other = p.args[0].atom, t.args[0].atom if t.name == "take" else None
        if inner is None or other is None:
            return False
        return self.blocks.get(p.attrs[0], p.attrs[0]) == t.attrs[0] and self._is_piece(inner, other, env)

    def _may_permute(self, p: Atom, t: Atom) -> bool:
        """True for a permutation, and for a matrix that need not reach the operator in the layout of other inputs."""
        if t.name == "permute":
            return len(t.attrs) == len(p.attrs) or (p.attrs[0] == 0 and len(t.attrs) == len(p.attrs) - 1)
        name, aligned = _variable(p.args[0].atom), self.template.pattern.recognition.aligned
        return name is not None and name not in aligned and len(t.shape) == len(p.attrs) == 2


def _paired(
    match: Match,
    wanted: Sequence[Any],
    got: Sequence[Any],
    env: Binding,
    rest: Callable[[Sequence[Any], Binding], Binding | None] = lambda left, env: env,
) -> Binding | None:
    """Each thing wanted with another one of those there are, in whatever order; `rest` takes what is left over."""
    if not wanted:
        return rest(got, env)
    for i, t in enumerate(got):
        found = match(wanted[0], t, env)
        done = None if found is None else _paired(match, wanted[1:], [*got[:i], *got[i + 1 :]], found, rest)
        if done is not None:
            return done
    return None


def _each(match: Match, wanted: Sequence[Any], got: Sequence[Any], env: Binding) -> Binding | None:
    """Several things matched in turn, each with what the ones before it have bound."""
    for p, t in zip(wanted, got, strict=True):
        if (found := match(p, t, env)) is None:
            return None
        env = found
    return env


def _variable(atom: Atom | None) -> str | None:
    return atom.leaf.name if atom is not None and isinstance(atom.leaf, Var) else None


def _functions(mono: Mono) -> set[str]:
    return {a.name for a, _ in mono.factors if a.leaf is None and a.name != "base"}


def _whole(atom: Atom) -> str | None:
    """The variable that an atom is a piece of."""
    while atom.name == "take" and atom.args[0].atom is not None:
        atom = atom.args[0].atom
    return _variable(atom)


def parts(term: Any) -> Iterator[Any]:
    """A term and all that stands within it, other than in a product of matrices: that is another value."""
    todo, seen = [term], set()
    while todo:
        if (term := todo.pop()) in seen:
            continue
        seen.add(term)
        yield term
        if isinstance(term, Atom):
            todo += (term.leaf,) if term.leaf is not None else term.args if term.name != "matmul" else ()
        elif isinstance(term, Poly):
            todo += [x for m, _ in term.terms for x in (m.expo, *(a for a, _ in m.factors))]


def _powers(term: Atom) -> set[float]:
    """Those of what stands within: whatever it is a power of itself, a mean of squares is no sum."""
    return {p for t in parts(term) if isinstance(t, Poly) for m, _ in t.terms for _, p in m.factors if p > 1}


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
    for mono, coef in term.terms:
        factors = [show(a, depth + 1) + ("" if p == 1 else f"^{p:g}") for a, p in mono.factors]
        if mono.expo is not None:
            factors.append(f"exp({show(mono.expo, depth + 1)})")
        if coef != 1 or not factors:
            factors.insert(0, f"{coef:.6g}")
        parts.append("*".join(factors))
    # In an order that does not depend on what was read before.
    parts.sort(key=lambda text: (text.count("*"), text.lstrip("-0123456789.*")))
    return " + ".join(parts[:6]) + (" + ..." if len(parts) > 6 else "")
