"""A small algebra in which every spelling of an operator has one normal form.

A term is a polynomial: a sum of monomials with real coefficients. A monomial is a product of atoms raised to
powers, times `exp(polynomial)`. An atom is a leaf (a graph node, or a pattern's variable) or a function of
polynomials (a mean, a matmul, erf). The constructors apply the laws of arithmetic as they build:

- a mean or sum is linear, and what is constant along its axis leaves it; so the maximum that a safe softmax
  subtracts cancels, and `mean((x - mean(x))^2)` equals `mean(x^2) - mean(x)^2`;
- `exp` turns sums into products and undoes `log`; `tanh` and `sigmoid` are written with `exp`;
- constants leave a matmul, and so does what is constant along a row of its left operand.

All of it is arithmetic on reals: whether the rounding is acceptable is decided later, by the proof on real inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import zip_longest
from typing import Any

Dim = Any  # an int, or a sympy expression for a symbolic size
Shape = tuple[Dim, ...]

MAX_MONOMIALS = 24  # beyond this a value is treated as a leaf: operators are small, whole networks are not


class TooLarge(Exception):
    """The normal form of a value has more monomials than an operator could have."""


@dataclass(frozen=True, eq=False)
class Atom:
    """A leaf (`leaf` is set) or a function of polynomials."""

    uid: int
    name: str
    attrs: tuple[Any, ...]
    args: tuple[Poly, ...]
    shape: Shape
    leaf: Any = None


@dataclass(frozen=True, eq=False)
class Mono:
    """A product of atoms to powers, times `exp(expo)`."""

    uid: int
    factors: tuple[tuple[Atom, float], ...]
    expo: Poly | None

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the functions in it; `exp` when it has an exponential."""
        own = {a.name for a, _ in self.factors if a.leaf is None} | ({"exp"} if self.expo else set())
        inner = [*(arg for a, _ in self.factors for arg in a.args), *([self.expo] if self.expo else [])]
        return frozenset(own).union(*(p.names for p in inner))

    @property
    def shape(self) -> Shape:
        """The shape of the product."""
        return broadcast((*(a.shape for a, _ in self.factors), self.expo.shape if self.expo else ()))

    @property
    def atom(self) -> Atom | None:
        """The atom, when the product is one atom to the first power."""
        single = self.expo is None and len(self.factors) == 1 and self.factors[0][1] == 1
        return self.factors[0][0] if single else None


@dataclass(frozen=True, eq=False)
class Poly:
    """A sum of monomials with coefficients, in a fixed order."""

    uid: int
    terms: tuple[tuple[Mono, float], ...]
    shape: Shape
    space: Space

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the functions in it."""
        return frozenset().union(*(m.names for m, _ in self.terms))

    def __add__(self, other: Poly | float) -> Poly:
        return self.space.add(self, self.space.of(other))

    def __sub__(self, other: Poly | float) -> Poly:
        return self.space.add(self, self.space.of(other), -1)

    def __rsub__(self, other: float) -> Poly:
        return self.space.of(other) - self

    def __neg__(self) -> Poly:
        return self * -1

    def __mul__(self, other: Poly | float) -> Poly:
        return self.space.mul(self, other) if isinstance(other, Poly) else self.space.scale(self, other)

    def __truediv__(self, other: Poly | float) -> Poly:
        return self * self.space.of(other) ** -1

    def __rtruediv__(self, other: float) -> Poly:
        return self**-1 * other

    def __pow__(self, r: float) -> Poly:
        return self.space.power(self, r)

    __radd__, __rmul__ = __add__, __mul__

    @property
    def constant(self) -> float | None:
        """The value of a polynomial without atoms, else None."""
        if not self.terms:
            return 0.0
        (mono, coef), *rest = self.terms
        return coef if not rest and not mono.factors and mono.expo is None else None

    @property
    def atom(self) -> Atom | None:
        """The atom, when the polynomial is one atom to the first power with coefficient one."""
        single = len(self.terms) == 1 and self.terms[0][1] == 1.0
        return self.terms[0][0].atom if single else None


def is_row_constant(shape: Shape) -> bool:
    """True when a value of this shape does not change along the last axis of what it is broadcast to."""
    return not shape or (isinstance(shape[-1], int) and shape[-1] == 1)


def broadcast(shapes: Iterable[Shape]) -> Shape:
    """The shape of an elementwise result; sizes are trusted (the program has run)."""
    axes = zip_longest(*map(reversed, shapes), fillvalue=1)
    return tuple([next((d for d in dims if not (isinstance(d, int) and d == 1)), 1) for dims in axes])[::-1]


def _accumulate(terms: dict[Mono, float], mono: Mono, coef: float) -> None:
    """Add to a coefficient; what cancels but for rounding is zero."""
    before = terms.get(mono, 0.0)
    total = before + coef
    terms[mono] = 0.0 if before and abs(total) < 1e-9 * abs(coef) else total


class Space:
    """Interns terms, so that equal terms are one object and comparison is identity."""

    def __init__(self) -> None:
        # What equal terms come to is computed once: a model's layers are read from many nodes, again and again.
        for law in ("from_atom", "add", "scale", "mul", "power", "exp", "reduce", "matmul"):
            setattr(self, law, cache(getattr(self, law)))
        self._atoms: dict[Any, Atom] = {}
        self._monos: dict[Any, Mono] = {}
        self._polys: dict[Any, Poly] = {}
        self.one = self._mono((), None)
        self.zero = self._poly({})
        self.i = self.fn("i", shape=())  # the imaginary unit

    def leaf(self, value: Any, shape: Shape) -> Poly:
        """The term of an opaque value: a graph node, or a pattern's variable."""
        key = ("leaf", id(value))
        if key not in self._atoms:
            self._atoms[key] = Atom(len(self._atoms), "leaf", (), (), shape, value)
        return self.from_atom(self._atoms[key])

    def fn(self, name: str, *args: Poly, shape: Shape | None = None, attrs: tuple[Any, ...] = ()) -> Poly:
        """A function of terms that no law takes apart; without a shape, element by element."""
        key = (name, attrs, args or shape)
        if key not in self._atoms:
            shape = broadcast(a.shape for a in args) if shape is None else shape
            self._atoms[key] = Atom(len(self._atoms), name, attrs, args, shape)
        return self.from_atom(self._atoms[key])

    def from_atom(self, atom: Atom, power: float = 1) -> Poly:
        """One atom to a power, as a polynomial."""
        return self._poly({self._mono(((atom, power),), None): 1.0})

    def const(self, value: float) -> Poly:
        return self._poly({self.one: float(value)})

    def of(self, value: Poly | float) -> Poly:
        return value if isinstance(value, Poly) else self.const(value)

    def _mono(self, factors: tuple[tuple[Atom, float], ...], expo: Poly | None) -> Mono:
        factors = tuple(sorted(((a, p) for a, p in factors if p != 0), key=lambda f: (f[0].uid, f[1])))
        if expo is not None and not expo.terms:
            expo = None
        key = (factors, expo)
        if key not in self._monos:
            self._monos[key] = Mono(len(self._monos), factors, expo)
        return self._monos[key]

    def _poly(self, terms: dict[Mono, float]) -> Poly:
        kept = sorted(((m, c) for m, c in terms.items() if c != 0.0), key=lambda t: t[0].uid)
        if len(kept) > MAX_MONOMIALS:
            raise TooLarge
        # A coefficient to six digits.
        key = tuple([(m, c if c in (1.0, -1.0) else float(f"{c:.6g}")) for m, c in kept])
        if key not in self._polys:
            shape = broadcast(m.shape for m, _ in kept)
            self._polys[key] = Poly(len(self._polys), tuple(kept), shape, self)
        return self._polys[key]

    def add(self, a: Poly, b: Poly, scale: float = 1.0) -> Poly:
        """a + scale * b."""
        terms = dict(a.terms)
        for mono, coef in b.terms:
            _accumulate(terms, mono, scale * coef)
        return self._poly(terms)

    def scale(self, a: Poly, factor: float) -> Poly:
        return self._poly({m: c * factor for m, c in a.terms})

    def mul(self, a: Poly, b: Poly) -> Poly:
        """a * b, expanded."""
        if len(a.terms) * len(b.terms) > MAX_MONOMIALS:
            raise TooLarge
        terms: dict[Mono, float] = {}
        for ma, ca in a.terms:
            for mb, cb in b.terms:
                mono, sign = self._mono_mul(ma, mb)
                _accumulate(terms, mono, ca * cb * sign)
        return self._poly(terms)

    def _mono_mul(self, a: Mono, b: Mono) -> tuple[Mono, float]:
        powers: dict[Atom, float] = dict(a.factors)
        for atom, power in b.factors:
            powers[atom] = powers.get(atom, 0) + power
        sign, unit = 1.0, self.i.atom
        if unit is not None and powers.get(unit) == 2:
            del powers[unit]
            sign = -1.0
        expo = a.expo if b.expo is None else b.expo if a.expo is None else self.add(a.expo, b.expo)
        return self._mono(tuple(powers.items()), expo), sign

    def monomial(self, factors: tuple[tuple[Atom, float], ...], expo: Poly | None = None) -> Poly:
        """A product of atoms to powers, times `exp(expo)`."""
        return self._poly({self._mono(factors, expo): 1.0})

    def power(self, a: Poly, r: float) -> Poly:
        """a ** r: small whole powers are expanded, one monomial is taken apart, a sum becomes a base."""
        if r == 1:
            return a
        if r in (2, 3, 4):
            return self.mul(a, self.power(a, r - 1))
        if len(a.terms) == 1:
            mono, coef = a.terms[0]
            if float(r).is_integer() or (coef > 0 and self._separable(mono)):
                factors = tuple((atom, p * r) for atom, p in mono.factors)
                expo = mono.expo * r if mono.expo else None
                return self._poly({self._mono(factors, expo): coef**r})
        # The content is taken out, so that sqrt(2a + 2b) and sqrt(a + b) differ by a coefficient only.
        content = max((abs(c) for m, c in a.terms if m is not self.one), default=1.0)
        base: Any = self.fn("base", a * (1.0 / content)).atom
        return self.from_atom(base, r) * float(content**r)

    @staticmethod
    def _separable(mono: Mono) -> bool:
        """True when roots and logarithms may be taken factor by factor, wherever they have a value.

        One factor of unknown sign is positive where the product is; two need not be, and an even power hides
        its sign: the root of a square is no identity.
        """
        whole = [(a, p) for a, p in mono.factors if float(p).is_integer()]
        # A sum of exponentials is positive.
        unknown = [p for a, p in whole if a.name != "sum" or not all(m.expo for m, _ in a.args[0].terms)]
        return len(unknown) <= 1 and all(p % 2 for p in unknown)

    def exp(self, a: Poly) -> Poly:
        """e ** a, with constants taken out and logarithms undone, but for a mask's beside scores."""
        result, rest = self.const(1), {}
        for mono, c in a.terms:
            atom = mono.atom
            if mono is self.one and abs(c) < 700:  # what hides a score stays with the mask that it belongs to
                result *= math.exp(c)
            elif atom and atom.name == "log" and (len(a.terms) == 1 or "exp" in atom.args[0].names):
                result *= atom.args[0] ** c
            else:
                rest[mono] = c
        return self.monomial((), self._poly(rest)) * result

    def rebuilt(self, a: Poly, of: Callable[[Atom], Poly], of_exponent: Callable[[Poly], Poly]) -> Poly:
        """a with each of its atoms, and each exponent, as what becomes of it."""
        result = self.zero
        for mono, coef in a.terms:
            term = self.const(coef)
            for atom, power in mono.factors:
                term *= of(atom) ** power
            if mono.expo is not None:
                term *= self.exp(of_exponent(mono.expo))
            result += term
        return result

    def log(self, a: Poly) -> Poly:
        """log a; a product becomes a sum."""
        if len(a.terms) != 1 or a.terms[0][1] <= 0 or not self._separable(a.terms[0][0]):
            return self.fn("log", a)
        mono, coef = a.terms[0]
        result = self.const(math.log(coef))
        for atom, p in mono.factors:
            base = atom.args[0] if atom.name == "base" else self.from_atom(atom)
            result += self.fn("log", base) * p
        return result if mono.expo is None else result + mono.expo

    def sigmoid(self, a: Poly) -> Poly:
        return 1 / (1 + self.exp(-a))

    def tanh(self, a: Poly) -> Poly:
        return 2 * self.sigmoid(2 * a) - 1

    def erf(self, a: Poly) -> Poly:
        """erf, with the sign of an odd function taken out."""
        lead = max(a.terms, key=lambda t: abs(t[1]), default=(self.one, 1.0))[1]
        sign = -1.0 if lead < 0 else 1.0
        return self.fn("erf", a * sign) * sign

    def _split(self, mono: Mono) -> tuple[Mono, Mono]:
        """A monomial as (what is constant along the last axis) times (what is not)."""
        constant = tuple(f for f in mono.factors if is_row_constant(f[0].shape))
        varying = tuple(f for f in mono.factors if f not in constant)
        inner = mono.expo.terms if mono.expo else ()
        fixed = {m: c for m, c in inner if is_row_constant(m.shape)}
        moving = {m: c for m, c in inner if m not in fixed}
        return self._mono(constant, self._poly(fixed)), self._mono(varying, self._poly(moving))

    def reduce(self, name: str, a: Poly, size: Dim, *, as_written: bool = False) -> Poly:
        """mean or sum over the last axis, kept with size one. Sums of exponentials stay sums, the rest are means."""
        result = self.zero
        shape = (*a.shape[:-1], 1)
        for mono, coef in a.terms:
            fixed, moving = self._split(mono)
            outer = self._poly({fixed: coef})
            kept = name if as_written or not isinstance(size, int) else "sum" if moving.expo else "mean"
            if kept != name:
                outer *= 1.0 / size if name == "mean" else float(size)
            if moving is not self.one:
                outer *= self.fn(kept, self._poly({moving: 1.0}), shape=shape)
            elif kept == "sum":
                outer *= self.fn(kept, self.const(1), shape=shape, attrs=(size,))
            result += outer
        return result

    def matmul(self, a: Poly, b: Poly, shape: Shape) -> Poly:
        """a @ b, with constants, and what is constant along a's rows, outside; not a sign: what is limited has one."""
        outer = self.const(1)
        if len(a.terms) == 1 and a.terms[0][1] != -1.0:
            mono, coef = a.terms[0]
            fixed, moving = self._split(mono)
            outer, a = self._poly({fixed: coef}), self._poly({moving: 1.0})
        if len(b.terms) == 1 and abs(b.terms[0][1]) != 1.0:
            outer, b = outer * b.terms[0][1], self._poly({b.terms[0][0]: 1.0})
        index = a.atom
        if index is not None and index.name == "one_hot":
            return outer * self.fn("gather", b, index.args[0], shape=shape)
        return outer * self.fn("matmul", a, b, shape=shape)
