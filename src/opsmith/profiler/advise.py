"""Advice: one small rule each, with what was seen, what it is worth at most, what to type and how to check it.

A rule's gain is never more than what its rows lost, and nothing is said of a gain below the noise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator

from opsmith.profiler.costs import bare
from opsmith.profiler.data import ATTENTION, COPIES, FRAMEWORK, MATMUL, NORM, Advice, Bill, Phase, Row, sums
from opsmith.profiler.result import Profile
from opsmith.profiler.roofline import Roofs

LEAST_SHARE = 0.03  # of the phase: less is not worth a line, however quiet the machine
REPEATED = 4  # equal calls in one layer that make a loop
FASTER = 1.3  # how many times faster bfloat16 must be here to be worth a change of numbers
PADDED = 0.3
SHORT = 64  # axes beyond this many are a vocabulary's or a feature's, not a group's

# What a rule says: title, evidence, seconds to gain, what to do, how to see that it worked.
Said = tuple[str, str, float, str, str]
Rule = Callable[[Profile, Phase, Roofs], Iterator[Said]]
RULES: dict[str, Rule] = {}


def rule(name: str) -> Callable[[Rule], Rule]:
    """Enter a rule under the name that a report calls it by."""
    return lambda fn: RULES.setdefault(name, fn)


def advise(profile: Profile, phase: Phase, roofs: Roofs) -> list[Advice]:
    """What to do about a phase, what gains most first."""
    if not phase.wall:
        return []
    least = phase.wall * max(LEAST_SHARE, phase.noise)
    found = []
    for name, each in RULES.items():
        for title, evidence, seconds, action, check in each(profile, phase, roofs):
            gain = min(max(seconds, 0.0), 0.99 * phase.wall)
            speedup = phase.wall / (phase.wall - gain)
            found.append(Advice(name, phase.name, title, evidence, gain, speedup, action, check))
    return sorted((a for a in found if a.gain > least), key=lambda a: -a.gain)


@rule("unfused norm")
def unfused_norm(profile: Profile, phase: Phase, roofs: Roofs) -> Iterator[Said]:
    """A norm that is written as several PyTorch calls goes through memory once for each of them."""
    norms = Bill((), [r for r in phase.rows if r.kind == NORM and r.composite])
    if norms.rows:
        first = max(norms.rows, key=lambda r: r.seconds)
        yield (
            f"{norms.calls:.0f} norms are written out as {len(first.pieces) or 'several'} PyTorch calls each",
            f"{_took(norms)}, where one pass over memory takes {norms.least * 1e3:.2g} ms",
            norms.lost,
            f"opsmith.optimize(model, example_inputs), or call opsmith.ops.{first.operator.split()[0]} "
            f"{_where(first)}",
            _again(phase, "the norm's row says fused, and loses less"),
        )


@rule("materialized attention scores")
def materialized_scores(profile: Profile, phase: Phase, roofs: Roofs) -> Iterator[Said]:
    """Attention as two products and a softmax writes and reads a matrix of queries times keys."""
    written = Bill((), [r for r in phase.rows if r.kind == ATTENTION and r.composite])
    if written.rows:
        first = max(written.rows, key=lambda r: r.seconds)
        yield (
            f"attention writes its scores to memory: {len(first.pieces) or 'several'} PyTorch calls for one operator",
            f"{_took(written)}, where the roofs allow {written.least * 1e3:.2g} ms",
            written.lost,
            "opsmith.optimize(model, example_inputs), or torch.nn.functional.scaled_dot_product_attention "
            f"{_where(first)}",
            _again(phase, "attention is fused"),
        )


@rule("float32")
def float32(profile: Profile, phase: Phase, roofs: Roofs) -> Iterator[Said]:
    """Products in float32 on a machine whose bfloat16 is faster."""
    wide, narrow = roofs.compute("float32"), roofs.compute("bfloat16")
    rows = [r for r in phase.rows if r.kind in (MATMUL, ATTENTION) and r.dtype == "float32" and r.known]
    if not rows or wide is None or narrow is None or narrow / wide < FASTER:
        return
    ratio = narrow / wide
    shares = {"compute": 1 - 1 / ratio, "memory": 0.5}
    gain = sum(min(r.seconds * shares.get(r.bound, 0.0), r.seconds - r.flops / narrow) for r in rows)
    yield (
        f"products run in float32, and bfloat16 is {ratio:.1f} times as fast here",
        f"{_took(Bill((), rows))} in float32; measured {wide / 1e9:.0f} against {narrow / 1e9:.0f} GFLOP/s",
        gain,
        "opsmith.optimize(model, example_inputs, dtype=torch.bfloat16), where the model's accuracy allows it",
        _again(phase, "the products' rows say bfloat16") + "; hold the results to those of float32",
    )


@rule("copies in a loop")
def copies_in_a_loop(profile: Profile, phase: Phase, roofs: Roofs) -> Iterator[Said]:
    """The same copy, made again and again."""
    copies = {"clone", "contiguous", "copy", "_to_copy"}
    often = (r for r in phase.rows if r.kind == COPIES and r.calls >= REPEATED)
    found = Bill((), [r for r in often if copies & {*map(bare, r.pieces)}])
    if found.rows:
        first = max(found.rows, key=lambda r: r.seconds)
        yield (
            f"a copy of {first.shape} is made {first.calls:.0f} times {_in(first)}",
            f"{found.calls:.0f} equal copies ({', '.join(first.pieces)}) take {_ms(found.seconds)} and compute nothing",
            found.seconds,
            "take .contiguous() (or .clone(), .to()) out of the loop, or leave it out: most operators take views",
            _again(phase, "the row of copies is gone"),
        )


@rule("logits for all positions")
def all_logits(profile: Profile, phase: Phase, roofs: Roofs) -> Iterator[Said]:
    """The vocabulary's logits for every position, where the next token needs those of the last."""
    sequences = phase.facts.get("sequences", 0.0)
    if phase.name != "prefill" or not sequences:
        return
    for row in phase.rows:
        sizes = [[*map(int, found.split("×"))] for found in re.findall(r"\d+(?:×\d+)+", row.shape)]
        if row.kind != MATMUL or len(sizes) < 2 or len(sizes[1]) != 2 or len(sizes[0]) < 2:
            continue
        rows = math.prod(sizes[0][:-1])
        width, wide = sizes[0][-1], max(sizes[1])
        if rows > sequences and wide >= 4 * width and wide > 16 * SHORT and row.calls == 1:
            yield (
                f"logits are computed for {rows} positions, and {sequences:.0f} are needed",
                f"{row.operator} {row.shape}: {_ms(row.seconds)}",
                row.seconds * (1 - sequences / rows),
                "pass logits_to_keep=1 (Hugging Face), or take hidden[:, -1:] before the output layer",
                _again(phase, "the output layer's row has one position for each sequence"),
            )


@rule("one thread")
def one_thread(profile: Profile, phase: Phase, roofs: Roofs) -> Iterator[Said]:
    """One thread, on a machine that has several cores."""
    cores = int(profile.machine.get("cores") or 1)
    if phase.facts.get("threads") != 1.0 or cores < 2:
        return
    seconds = Bill((), [r for r in phase.rows if r.bound in ("compute", "memory")]).seconds
    yield (
        f"one thread computes, and there are {cores} cores",
        f"operators that threads would share take {_ms(seconds)}",
        seconds * (1 - 1 / cores),
        f"torch.set_num_threads({cores}), and no OMP_NUM_THREADS=1 in the environment",
        _again(phase, "the trust panel names more threads"),
    )


@rule("loop over heads")
def loop_over_heads(profile: Profile, phase: Phase, roofs: Roofs) -> Iterator[Said]:
    """Attention head by head: many small operators where one takes them all."""
    rows = [
        r
        for r in phase.rows
        if r.calls >= REPEATED
        and (r.kind == ATTENTION or bare(r.operator.split()[0]) in _PER_HEAD)
        and (r.layer or not profile.optimized)  # else it may be unknown, and all fall together
    ]
    if rows:
        loops = Bill((), rows)
        layer = next(iter(sums(rows, "layer")))
        most = max((r for r in rows if r.layer == layer), key=lambda r: r.calls)
        yield (
            f"a Python loop calls {most.operator} {most.calls:.0f} times with one shape {_in(most)}",
            f"{_names(rows)}: {loops.calls:.0f} calls, {_ms(loops.seconds)}; all heads at once are one call",
            loops.lost,
            "reshape to [batch, heads, length, width] and call scaled_dot_product_attention once",
            _again(phase, "attention is called once a layer"),
        )


@rule("padding")
def padding(profile: Profile, phase: Phase, roofs: Roofs) -> Iterator[Said]:
    """Most of the batch is padding, which is computed like everything else."""
    part = phase.facts.get("padding", 0.0)
    if part >= PADDED:
        busy = sum(r.seconds for r in phase.rows if r.kind != FRAMEWORK and r.bound in ("compute", "memory"))
        yield (
            f"{part:.0%} of the tokens are padding",
            f"attention_mask keeps {1 - part:.0%} of {phase.tokens} tokens; what scales with them takes {_ms(busy)}",
            part * busy,
            "batch sequences of like length, or pack them: opsmith.ops.attention_varlen",
            "profile a batch of real lengths, and compare µs per token that is none of the padding",
        )


_PER_HEAD = {"matmul", "bmm", "baddbmm", "softmax", "_softmax"}


def _where(row: Row) -> str:
    return f"at {row.source}" if row.source else _in(row)


def _in(row: Row) -> str:
    return f"in {row.layer}" if row.layer else "in the model"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _names(rows: Iterable[Row]) -> str:
    return ", ".join(dict.fromkeys(r.operator for r in rows))


def _took(found: Bill) -> str:
    return f"{_names(found.rows)}: {_ms(found.seconds)}"


def _again(phase: Phase, what: str) -> str:
    return f"profile {phase.name} again with --against this profile: {what}"
