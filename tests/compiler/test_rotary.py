"""The rotary embedding is found in every model that has one, whatever its spelling, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import opsmith
import opsmith.ops
from tests.compiler.graphs import found_in
from tests.compiler.models import ROTARY, UNTIMED, Truth, causal, ids, seeded

_X, _TABLE = (2, 3, 7, 8), (2, 7, 8)


@pytest.mark.parametrize("name", ROTARY)
def test_models_rotate_with_our_operator(name: str) -> None:
    model = seeded(lambda: causal(name))
    truth = Truth(model)
    options = {"use_cache": False, "return_dict": False}
    opsmith.optimize(model, {"input_ids": ids(2, 8), **options}, config=UNTIMED)
    report = model.opsmith.report
    assert report.rolled_back == []
    assert report.found.get("rope_qk") == 1
    assert not [miss for miss in report.misses if "rope" in miss]
    (step,) = [s for s in model.opsmith.plan.shapes[0].steps if s.operator == "rope_qk"]
    assert step.implementation == "native"
    for batch, length in [(2, 8), (3, 5)]:
        inputs: dict[str, Any] = {"input_ids": ids(batch, length), **options}
        with torch.no_grad():
            truth.check(model(**inputs), **inputs)
    assert len(model.opsmith.graphs) == 1


def _angles(table: Any) -> tuple[Any, Any]:
    return table.cos(), table.sin()


def _rotated(x: Any, cos: Any, sin: Any) -> Any:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def _hugging_face(x: Any, angles: Any) -> Any:
    cos, sin = _angles(torch.cat((angles, angles), -1))
    return _rotated(x, cos.unsqueeze(1), sin.unsqueeze(1))


def _halves(x: Any, angles: Any) -> Any:
    cos, sin = (t[:, None] for t in _angles(angles))
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _scaled(x: Any, angles: Any) -> Any:
    """YaRN's factor on the tables."""
    cos, sin = (t.unsqueeze(1) * 1.25 for t in _angles(torch.cat((angles, angles), -1)))
    return _rotated(x, cos, sin)


def _tokens_first(x: Any, angles: Any) -> Any:
    cos, sin = _angles(angles.tile(2))
    return _rotated(x.transpose(1, 2).contiguous(), cos.unsqueeze(2), sin.unsqueeze(2))


def _every_two(x: Any, angles: Any) -> Any:
    cos, sin = _angles(torch.repeat_interleave(angles, 2, dim=-1)[:, None])
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + turned * sin


def _complex(x: Any, angles: Any) -> Any:
    turn = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(z * turn).flatten(3).type_as(x)


def _given_complex(x: Any, turn: Any) -> Any:
    z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(z * torch.view_as_complex(turn)[:, None]).flatten(-2)


def _unbound(x: Any, angles: Any) -> Any:
    cos, sin = (t[:, None] for t in _angles(angles))
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def _rearranged(x: Any, angles: Any) -> Any:
    """Halves by a view, as einops has them (PaLM-pytorch, the first Qwen)."""
    cos, sin = (t[:, None] for t in _angles(torch.cat((angles, angles), -1)))
    first, second = x.unflatten(-1, (2, -1)).unbind(-2)
    return x * cos + torch.cat((-second, first), -1) * sin


def _copied(x: Any, angles: Any) -> Any:
    """Each angle twice, by an axis of copies (rotary-embedding-torch)."""
    cos, sin = _angles(angles[..., None].expand(*angles.shape, 2).reshape(*angles.shape[:-1], -1)[:, None])
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * cos + torch.stack((-second, first), -1).flatten(-2) * sin


def _partial(x: Any, angles: Any) -> Any:
    return torch.cat((_hugging_face(x[..., :4], angles[..., :2]), x[..., 4:]), -1)


def _deinterleaved(x: Any, angles: Any) -> Any:
    b, h, n, d = x.shape
    return _hugging_face(x.view(b, h, n, d // 2, 2).transpose(4, 3).reshape(b, h, n, d), angles)


def _back(x: Any, angles: Any) -> Any:
    """By minus the angle, as nanochat does, on halves."""
    cos, sin = (t[:, None] for t in _angles(angles))
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos + second * sin, first * (-sin) + second * cos), -1)


def _back_by_columns(x: Any, angles: Any) -> Any:
    """The same as transformers has it."""
    cos, sin = (t.unsqueeze(1) for t in _angles(torch.cat((angles, angles), -1)))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((second, -first), -1) * sin


def _back_given(x: Any, cos: Any, sin: Any) -> Any:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return x * cos + torch.cat((x[..., 4:], -x[..., :4]), dim=-1) * sin


def _given(x: Any, cos: Any, sin: Any) -> Any:
    return _rotated(x, cos.unsqueeze(1), sin.unsqueeze(1))


_ANGLES = (2, 7, 4)
SPELLINGS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    (_hugging_face, (_X, _ANGLES), {}),
    (_halves, (_X, _ANGLES), {}),
    (_scaled, (_X, _ANGLES), {}),
    (_tokens_first, (_X, _ANGLES), {}),
    (_every_two, (_X, _ANGLES), {"interleaved": True}),
    (_complex, (_X, _ANGLES), {"interleaved": True}),
    (_given_complex, (_X, (2, 7, 4, 2)), {"interleaved": True}),
    (_unbound, (_X, _ANGLES), {"interleaved": True}),
    (_rearranged, (_X, _ANGLES), {}),
    (_copied, (_X, _ANGLES), {"interleaved": True}),
    (_partial, (_X, _ANGLES), {"rotary_dim": 4}),
    (_deinterleaved, (_X, _ANGLES), {}),
    (_given, (_X, _TABLE, _TABLE), {}),
    (_back, (_X, _ANGLES), {}),
    (_back_by_columns, (_X, _ANGLES), {}),
    (_back_given, (_X, _TABLE, _TABLE), {}),
]


def _inputs(shapes: tuple[Any, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _of_sections(angles: Any) -> tuple[Any, Any]:
    """Tables of positions in time, height and width, as Qwen2-VL puts them together, once for all layers."""
    halves = (torch.cat([m[i] for i, m in enumerate(t.split([1, 1, 2], -1))], -1) for t in _angles(angles))
    cos, sin = (torch.cat((half, half), -1) for half in halves)
    return cos, sin


def test_tables_in_sections_are_shared_by_layers() -> None:
    def layers(x: Any, y: Any, angles: Any) -> Any:
        cos, sin = (t.unsqueeze(1) for t in _of_sections(angles))
        return _rotated(x, cos, sin), _rotated(y, cos, sin)

    found, got, want = found_in(layers, _inputs((_X, _X, (3, 2, 7, 4))), True)
    assert [s.card.name for s in found.apart] == ["rope", "rope"], [str(m) for m in found.misses]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", SPELLINGS, ids=lambda c: c[0].__name__.strip("_"))
def test_every_spelling_is_found(case: tuple[Any, Any, dict[str, Any]], dynamic: bool) -> None:
    fn, shapes, options = case
    found, got, want = found_in(fn, _inputs(shapes), dynamic)
    (site,) = found.sites
    assert site.card.name == "rope", [str(m) for m in found.misses]
    assert {k: v for k, v in site.arguments.items() if k not in ("x", "cos", "sin")} == options
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


class _Turn(nn.Module):
    """DeepSeek's own rotation."""

    def forward(self, x: Any, turn: Any) -> Any:
        z = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
        turn = turn.view(1, z.size(1), 1, z.size(-1))
        return torch.view_as_real(z * turn).flatten(3).to(x.dtype)


class _Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Turn() for _ in range(2))
        self.register_buffer("turn", torch.polar(torch.ones(20, 4), torch.randn(20, 4)))

    def forward(self, x: Any) -> Any:
        turn = self.turn[: x.size(1)]
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = layer(x, turn)
        return x


def test_a_complex_table_from_before_a_break_may_have_sizes_that_vary() -> None:
    model = _Broken()
    fast: Any = opsmith.optimize(_Broken(), torch.randn(2, 7, 3, 8), config=UNTIMED)
    fast.load_state_dict(model.state_dict())
    assert fast.opsmith.report.found == {"rope": 1}, (
        fast.opsmith.report.misses
    )  # one graph serves both layers
    for n in (7, 5):
        x = torch.randn(2, n, 3, 8)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-6)


def test_what_only_moves_a_rotation_is_no_near_miss() -> None:
    """CodeGen's: tables by position, a part of each head, and the heads put first."""

    def moved(x: Any, table: Any, positions: Any) -> Any:
        cos, sin = (t[:, :, None].repeat_interleave(2, -1) for t in table[positions].chunk(2, -1))
        part = x[..., :4]
        turned = torch.stack((-part[..., 1::2], part[..., ::2]), dim=-1).flatten(-2)
        return torch.cat((part * cos + turned * sin, x[..., 4:]), -1).permute(0, 2, 1, 3)

    found, got, want = found_in(
        moved, [*_inputs(((2, 7, 3, 8), (9, 4))), torch.arange(14).view(2, 7) % 9], True
    )
    assert [s.card.name for s in found.apart] == ["embedding", "rope"]
    assert [str(m) for m in found.misses] == []
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_table_read_by_positions_is_that_of_rotation_and_of_embedding(dynamic: bool) -> None:
    """The first Llama of Hugging Face, and StableLM: rows by position, and then an axis for the heads."""

    def turned(x: Any, cos: Any, sin: Any) -> Any:
        positions = torch.arange(x.shape[2])[None].expand(x.shape[0], -1)
        return _rotated(x, *(t[positions].unsqueeze(1) for t in (cos, sin)))

    table = torch.randn(9, 4)
    tables = [f(torch.cat((table, table), -1)) for f in (torch.cos, torch.sin)]
    found, got, want = found_in(turned, [torch.randn(_X), *tables], dynamic)
    assert "rope" in [s.card.name for s in found.apart]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def _wrong_sign(x: Any, angles: Any) -> Any:
    cos, sin = (t[:, None] for t in _angles(angles))
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos - first * sin), -1)


def _other_halves(x: Any, angles: Any) -> Any:
    cos, sin = _angles(torch.cat((angles, 2 * angles), -1))
    return _rotated(x, cos.unsqueeze(1), sin.unsqueeze(1))


def _halves_by_neighbors(x: Any, angles: Any) -> Any:
    """A table for halves on pairs of neighbors."""
    cos, sin = _angles(torch.cat((angles, angles), -1)[:, None])
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + turned * sin


def _conjugate_of_one(x: Any, angles: Any) -> Any:
    """A rotation of the second half by another angle than the first."""
    cos, sin = (t[:, None] for t in _angles(angles))
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * sin + first * sin), -1)


def _along_heads(x: Any, angles: Any) -> Any:
    """As many heads as tokens, and angles that grow with the head."""
    cos, sin = _angles(torch.cat((angles, angles), -1))
    return _rotated(x, cos.unsqueeze(2), sin.unsqueeze(2)) * 1.0


@pytest.mark.parametrize(
    "fn", [_wrong_sign, _other_halves, _halves_by_neighbors, _conjugate_of_one], ids=lambda f: f.__name__[1:]
)
def test_what_only_looks_like_a_rotation_is_reported(fn: Callable[..., Any]) -> None:
    found, got, want = found_in(fn, _inputs((_X, _ANGLES)), False)
    assert found.sites == []
    (miss,) = [m for m in found.misses if m.operator == "rope"]
    assert "test_rotary.py:" in miss.where
    assert torch.equal(got, want)


def test_angles_go_with_the_axis_that_the_table_has() -> None:
    """With as many heads as tokens the shapes alone don't say which of both is turned."""
    found, got, want = found_in(_along_heads, _inputs(((2, 7, 7, 8), _ANGLES)), False)
    (site,) = found.sites
    assert site.card.name == "rope"
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_queries_and_keys_by_other_tables_are_not_rotated_together() -> None:
    def both(q: Any, k: Any, a: Any, b: Any) -> Any:
        tables = [[t.unsqueeze(1) for t in _angles(torch.cat((x, x), -1))] for x in (a, b)]
        return _rotated(q, *tables[0]), _rotated(k, *tables[1])

    shapes = (_X, (2, 1, 7, 8), _ANGLES, _ANGLES)
    found, got, want = found_in(both, _inputs(shapes), False)
    assert [s.card.name for s in found.sites] == ["rope", "rope"]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)

    def together(q: Any, k: Any, a: Any) -> Any:
        cos, sin = (t.unsqueeze(1) for t in _angles(torch.cat((a, a), -1)))
        return _rotated(q, cos, sin), _rotated(k, cos, sin)

    found, got, want = found_in(together, _inputs(shapes[:3]), False)
    assert [s.card.name for s in found.sites] == ["rope_qk"]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_part_of_each_head_that_is_known_when_called_is_left_as_it_is() -> None:
    """A size that a graph is given, as behind a break where hidden states are asked for: its pieces have no order."""

    class Partial(torch.nn.Module):
        def forward(self, x: torch.Tensor, angles: torch.Tensor, size: int) -> torch.Tensor:
            turned, kept, angles = x[..., :size], x[..., size:], angles[..., :size]
            first, second = turned.chunk(2, -1)
            turned = turned * angles.cos() + torch.cat((-second, first), -1) * angles.sin()
            return torch.cat((turned, kept), -1)

    inputs, model = (torch.randn(2, 3, 5, 8), torch.randn(5, 8), 4), Partial()
    expected = model(*inputs)
    opsmith.optimize(model, config=UNTIMED)
    torch.testing.assert_close(model(*inputs), expected)
    assert not model.opsmith.unread
