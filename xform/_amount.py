"""Exact amounts: numbers, and polynomials in trip counts that the program does not tell."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any


class Polynomial:
    """A sum of products of symbols with exact coefficients, such as `128·T1·T2 + 64·T1 + 3`.

    >>> t = Polynomial.symbol("T1")
    >>> 3 * (t + 2) + t
    4·T1 + 6
    >>> (3 * t + 1).at(T1=5)
    16
    """

    __slots__ = ("terms",)

    def __init__(self, terms: Mapping[tuple[str, ...], int | Fraction]):
        self.terms = {k: v for k, v in terms.items() if v}

    @classmethod
    def symbol(cls, name: str) -> Polynomial:
        """The polynomial that is one symbol."""
        return cls({(name,): 1})

    @classmethod
    def of(cls, amount: Amount) -> Polynomial:
        """A number as a polynomial."""
        return amount if isinstance(amount, Polynomial) else cls({(): amount})

    def __add__(self, other: Amount) -> Polynomial:
        out = dict(self.terms)
        for key, value in Polynomial.of(other).terms.items():
            out[key] = out.get(key, 0) + value
        return Polynomial(out)

    def __mul__(self, other: Amount) -> Polynomial:
        out: dict[tuple[str, ...], int | Fraction] = {}
        for a, x in self.terms.items():
            for b, y in Polynomial.of(other).terms.items():
                key = tuple(sorted((*a, *b)))
                out[key] = out.get(key, 0) + x * y
        return Polynomial(out)

    __radd__, __rmul__ = __add__, __mul__

    def __sub__(self, other: Amount) -> Polynomial:
        return self + Polynomial.of(other) * -1

    def __truediv__(self, n: int) -> Polynomial:
        return Polynomial({k: Fraction(v) / n for k, v in self.terms.items()})

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, int | Fraction | Polynomial):
            return NotImplemented
        return self.terms == Polynomial.of(other).terms

    def __hash__(self):
        return hash(frozenset(self.terms.items()))

    def __bool__(self) -> bool:
        return bool(self.terms)

    def at(self, **trips: int) -> Amount:
        """The value where the named symbols are known."""
        total: Amount = 0
        for key, value in self.terms.items():
            rest = []
            for name in key:
                value = value * trips[name] if name in trips else value
                rest += [] if name in trips else [name]
            total = Polynomial({tuple(rest): value}) + total
        assert isinstance(total, Polynomial) or total == 0
        return total if isinstance(total, int) else total.plain()

    def plain(self) -> Amount:
        """A number if no symbol is left."""
        if not self.terms:
            return 0
        return exact(self.terms[()]) if self.terms.keys() == {()} else self

    def __float__(self) -> float:
        if (value := self.plain()) is self:
            names = sorted({name for key in self.terms for name in key})
            raise ValueError(
                f"the amount is {self}: it depends on how often {', '.join(names)} runs. Say it: "
                f"`cost.at({', '.join(f'{name}=…' for name in names)})`."
            )
        return float(value)

    def __repr__(self) -> str:
        def term(key: tuple[str, ...], value: int | Fraction) -> str:
            return "·".join([*([] if value == 1 and key else [number(value)]), *key])

        ordered = sorted(self.terms.items(), key=lambda item: (-len(item[0]), item[0]))
        return " + ".join(term(*item) for item in ordered) or "0"

    def __format__(self, spec: str) -> str:
        return format(repr(self), "" if spec.endswith((",", "f", "g", "d")) else spec)


type Amount = int | Fraction | Polynomial
"""What is counted. Never a float: counts are exact."""


def exact(x: int | Fraction) -> int | Fraction:
    """A fraction as an integer where it is one."""
    return int(x) if isinstance(x, Fraction) and x.denominator == 1 else x


def constant(amount: Amount) -> int | Fraction:
    """An amount without symbols."""
    assert not isinstance(amount, Polynomial)
    return amount


def ratio(a: Amount, n: int) -> Amount:
    """`a / n`, exactly."""
    return a / n if isinstance(a, Polynomial) else exact(Fraction(a) / n)


def at(amount: Amount, trips: Mapping[str, int]) -> Amount:
    """An amount where some trip counts are known."""
    return amount.at(**trips) if isinstance(amount, Polynomial) else amount


def lower(a: Amount, b: Amount) -> Amount:
    """The lesser of two amounts; of polynomials, term by term, a lower bound."""
    return _pick(min, a, b)


def higher(a: Amount, b: Amount) -> Amount:
    """The greater of two amounts; of polynomials, term by term, an upper bound."""
    return _pick(max, a, b)


def _pick(pick, a: Amount, b: Amount) -> Amount:
    if not isinstance(a, Polynomial) and not isinstance(b, Polynomial):
        return pick(a, b)
    x, y = Polynomial.of(a).terms, Polynomial.of(b).terms
    return Polynomial({k: pick(x.get(k, 0), y.get(k, 0)) for k in x.keys() | y.keys()}).plain()


def number(x: Amount) -> str:
    """An amount for people: exact below a million, else with four digits and a prefix."""
    if isinstance(x, Polynomial):
        return repr(x)
    if abs(x) < 1e6:
        return f"{int(x):,}" if x == int(x) else f"{float(x):,.1f}"
    prefixes = {15: "P", 12: "T", 9: "G", 6: "M"}
    power = next(power for power in prefixes if abs(x) >= 10**power)
    value = float(Fraction(x) / 10**power)
    return f"{value:.4g} {prefixes[power]}" if value < 10_000 else f"{value:,.0f} {prefixes[power]}"
