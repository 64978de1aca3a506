"""Hours of mixed work on optimized models, every answer checked: is anything wrong, kept, or slower at the end?

    python benchmarks/soak.py serve --minutes 60 --json soak-serve.json --svg soak-serve.svg
    python benchmarks/soak.py train --minutes 60

`serve` answers requests from three threads at once: batches of an encoder of many sizes, text from a decoder as it is
and from one in int8, greedy and by beams, and requests that are cancelled halfway. `train` trains a decoder with
gradient checkpointing, beside the same model without opsmith, evaluates it now and then and saves it. Each answer is
held to the same model in float64, each text to its logits. Every kind is done once before time begins. It fails where
an answer is wrong. Of half an hour or more the first third is warm-up: new lengths still capture graphs, and oneDNN
fills its cache of 1024 primitives. It fails, too, where memory grows by 1 MB a minute or more after that, where the
slowest 1 % of calls that are all alike take 10 % longer in the last tenth of the time than in the one behind the
warm-up, or where graphs are still captured in the second half. Times mean something on a machine that is idle else.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import opsmith
from opsmith.measure import describe
from opsmith.operator import Tolerance
from opsmith.ops import PackedLinear

VOCABULARY = 512
THREADS = 3
BEAMS = 3
SAMPLE = 5.0  # seconds
GROWTH = 1.0  # MB a minute that memory may grow by
SLOWER = 1.10  # and what alike calls may take at the end
SETTLED = 1 / 3  # of the time
LEAST_MINUTES = 30.0  # that growth and times are judged by
# Each operator is held to its card's policy; a model is a chain of them, so errors of some add up.
WHOLE_MODEL = Tolerance(factor=3.0, ulps=4.0)
# What is above its bound is judged by the worst of so many of eager's, each with weights a rounding away: late in
# training a row may stand for next to nothing before a norm, and eager's error there is small or 20 times it by luck.
DRAWS = 50


class Cancelled(Exception):
    """A caller has gone away."""


@dataclass
class Soak:
    """What was seen: filled by several threads, judged at the end."""

    minutes: float
    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds, MB
    graphs: list[tuple[float, int]] = field(default_factory=list)
    alike: list[tuple[float, float]] = field(default_factory=list)  # seconds, ms that it took
    start: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def now(self) -> float:
        return time.monotonic() - self.start

    @property
    def over(self) -> bool:
        return self.now > 60 * self.minutes or len(self.wrong) >= 20

    def count(self, kind: str, why: str) -> None:
        """An answer, and what is wrong with it, if anything is."""
        with self.lock:
            self.answers[kind] += 1
            if why:
                self.wrong.append(f"{kind}: {why}")

    def sample(self, graphs: int) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.memory.append((self.now, pages * os.sysconf("SC_PAGE_SIZE") / 1e6))
        self.graphs.append((self.now, graphs))

    def between(self, values: list[tuple[float, Any]], first: float, last: float) -> list[tuple[float, Any]]:
        """Those of a part of the time, as fractions of it."""
        return [v for v in values if first * 60 * self.minutes <= v[0] <= last * 60 * self.minutes]

    def judged(self) -> dict[str, Any]:
        self.minutes = min(self.minutes, self.now / 60)  # twenty faults end it early
        settled = self.between(self.memory, SETTLED, 1)
        at, megabytes = [t / 60 for t, _ in settled], [mb for _, mb in settled]
        growth = statistics.linear_regression(at, megabytes).slope if len(settled) > 1 else 0.0
        p99 = [
            statistics.quantiles([ms for _, ms in part], n=100)[98]
            for part in (self.between(self.alike, SETTLED, SETTLED + 0.1), self.between(self.alike, 0.9, 1))
            if len(part) > 1
        ]
        late = [graphs for _, graphs in self.between(self.graphs, 0.5, 1)]
        drift = []
        if growth >= GROWTH:
            drift.append(f"memory grows by {growth:.2f} MB a minute")
        if len(p99) == 2 and p99[1] > SLOWER * p99[0]:
            drift.append(f"the slowest 1 % took {p99[0]:.1f} ms at the beginning and {p99[1]:.1f} at the end")
        if late and late[-1] > late[0]:
            drift.append(f"{late[-1] - late[0]} graphs were captured in the second half")
        faults = [*self.wrong, *(drift if self.minutes >= LEAST_MINUTES else ())]
        return {
            "machine": asdict(describe()),
            "minutes": round(self.minutes, 1),
            "answers": dict(self.answers),
            "wrong": len(self.wrong),
            "growth, MB a minute": round(growth, 3),
            "p99, ms": [round(ms, 2) for ms in p99],
            "graphs": self.graphs[-1][1] if self.graphs else 0,
            "faults": faults,
            "memory": self.memory,
        }


def llama(layers: int = 4) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=704,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def bert() -> Any:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=1024,
        max_position_embeddings=256,
    )
    return BertModel(config)


def tokens(draw: random.Random, batch: int, length: int) -> torch.Tensor:
    return torch.tensor([[draw.randrange(VOCABULARY) for _ in range(length)] for _ in range(batch)])


@dataclass(frozen=True)
class Served:
    """An optimized model beside the same one as it was, and in float64."""

    model: Any
    eager: Any
    exact: Any

    @classmethod
    def of(cls, model: Any, quantize: str | None = None) -> Served:
        model.eval()
        eager = copy.deepcopy(model)
        if quantize:
            for linear in [m for m in eager.modules() if isinstance(m, torch.nn.Linear)]:
                linear.weight.data = PackedLinear.from_linear(linear, format=quantize).dequantize()
        return cls(opsmith.optimize(model, quantize=quantize), eager, copy.deepcopy(eager).double())

    def fault(self, inputs: dict[str, Any], got: torch.Tensor) -> str:
        """What is wrong with a result that is not text."""
        with torch.no_grad():
            verdict = WHOLE_MODEL.check(got, self.eager(**inputs)[0], self.exact(**inputs)[0])
        return "" if verdict.ok else f"{verdict.why}, of {list(inputs['input_ids'].shape)}"

    def misspelled(self, text: torch.Tensor, prompt: int) -> str:
        """Where greedy text [1, tokens] is not the likeliest, unless eager could not tell the two apart."""
        with torch.no_grad():
            exact = self.exact(text).logits[0, prompt - 1 : -1]
            error = (self.eager(text).logits[0, prompt - 1 : -1] - exact).abs().max()
        gap = exact.max(-1).values - exact.gather(-1, text[0, prompt:, None])[:, 0]
        worst = int(gap.argmax())
        return (
            "" if gap[worst] <= 4 * error else f"token {worst} of a text is {gap[worst]:.2e} below the best"
        )


def serve(soak: Soak) -> None:
    encoder, decoder, small = Served.of(bert()), Served.of(llama()), Served.of(llama(), "int8")

    def encode(draw: random.Random) -> str:
        batch, length = draw.randint(1, 8), draw.randint(4, 128)
        ids = tokens(draw, batch, length)
        mask = torch.ones_like(ids)
        for row in range(1, batch):
            mask[row, draw.randint(1, length) :] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
        with torch.no_grad():
            got = encoder.model(**inputs)[0]
        return encoder.fault(inputs, got)

    def generate(served: Served, draw: random.Random, **how: Any) -> tuple[torch.Tensor, int]:
        prompt = draw.randint(2, 48)
        ids = tokens(draw, 1, prompt)
        mask = torch.ones_like(ids)
        more = draw.randint(2, 24)
        text = served.model.generate(ids, attention_mask=mask, max_new_tokens=more, do_sample=False, **how)
        assert text.shape == (1, prompt + more), text.shape
        return text, prompt

    def greedy(draw: random.Random) -> str:
        return decoder.misspelled(*generate(decoder, draw))

    def rounded(draw: random.Random) -> str:
        return small.misspelled(*generate(small, draw))

    def beams(draw: random.Random) -> str:
        state = draw.getstate()

        def again(model: Any, **how: Any) -> torch.Tensor:
            same = random.Random()
            same.setstate(state)
            return generate(Served(model, model, model), same, num_beams=BEAMS, **how)[0]

        text, prompt = generate(decoder, draw, num_beams=BEAMS)
        gaps = []

        def scores(of: torch.Tensor) -> torch.Tensor:
            logs = decoder.exact(of).logits[:, prompt - 1 : -1].log_softmax(-1)
            return logs.gather(-1, of[:, prompt:, None]).sum((1, 2))

        def look(ids: torch.Tensor, logs: torch.Tensor) -> torch.Tensor:
            past, done = scores(ids), ids.shape[1] - prompt
            past[1:] -= math.inf if done == 0 else 0  # all begin alike
            *_, last, dropped = (past[:, None] + logs).flatten().topk(BEAMS + 1).values
            gaps.append(float(last - dropped) / (done + 1))
            return logs

        with torch.no_grad():
            if (scores(text) - scores(again(decoder.eager))).abs() <= 1e-3:
                return ""
            apart = float((scores(text) - scores(again(decoder.exact, logits_processor=[look]))).abs())
            # Where the last beam and the one behind it are as good as equal, either may be dropped, and what follows
            # parts: each token adds its error to a beam's score.
            error = (decoder.eager(text).logits - decoder.exact(text).logits).abs().max()
        near = apart <= 1e-3 or min(gaps) <= 4 * error
        return "" if near else f"the best beam's score is {apart:.2e} from float64's, and not eager's"

    def cancel(draw: random.Random) -> str:
        left = draw.randint(1, 6)

        def gone(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            nonlocal left
            left -= 1
            if left <= 0:
                raise Cancelled
            return torch.zeros(ids.shape[0], dtype=torch.bool)

        ids = tokens(draw, 1, draw.randint(2, 48))
        try:
            decoder.model.generate(ids, max_new_tokens=8, stopping_criteria=[gone])
        except Cancelled:
            return ""
        return "a cancelled request went on"

    same = {"input_ids": torch.arange(128).view(2, 64) % VOCABULARY}

    def alike(_: random.Random) -> str:
        begin = time.perf_counter()
        with torch.no_grad():
            got = encoder.model(**same)[0]
        soak.alike.append((soak.now, 1e3 * (time.perf_counter() - begin)))
        return encoder.fault(same, got)

    kinds: dict[Callable[[random.Random], str], int] = {
        encode: 6,
        greedy: 4,
        rounded: 3,
        beams: 1,
        cancel: 1,
        alike: 6,
    }

    for kind in kinds:
        soak.count(kind.__name__, kind(random.Random(-1)))
    soak.start = time.monotonic()

    def work(number: int) -> None:
        draw = random.Random(number)
        while not soak.over:
            (kind,) = draw.choices(list(kinds), list(kinds.values()))
            try:
                soak.count(kind.__name__, kind(draw))
            except Exception as error:  # whatever it is, it is what this looks for
                soak.count(kind.__name__, f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        soak.sample(sum(len(s.model.opsmith.graphs) for s in (encoder, decoder, small)))
        time.sleep(SAMPLE)


def train(soak: Soak) -> None:
    model = llama(2)
    eager = copy.deepcopy(model)
    for one in (model, eager):
        one.gradient_checkpointing_enable()
        one.config.use_cache = False
        one.train()
    opsmith.optimize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    draw, held = random.Random(0), torch.arange(256).view(2, 128) * 7 % VOCABULARY
    sampled = None
    while sampled is None or not soak.over:
        batch, length = draw.randint(1, 4), draw.choice((32, 64, 96, 128))
        ids = tokens(draw, batch, length)
        # So that each step is compared, and not what they add up to.
        eager.load_state_dict(model.state_dict())
        begin = time.perf_counter()
        got = _step(model, ids)
        if (batch, length) == (2, 64):
            soak.alike.append((soak.now, 1e3 * (time.perf_counter() - begin)))
        judge = Judge(eager, partial(_step, ids=ids))
        for name, result in got.items():
            soak.count("loss" if name == "loss" else "gradient", judge.fault(name, result))
        optimizer.step()
        if draw.random() < 0.05:
            eager.load_state_dict(model.state_dict())
            for one in (model, eager):
                one.eval()
            judge = Judge(eager, partial(_logits, ids=held))
            soak.count("evaluation", judge.fault("logits", _logits(model, held)["logits"]))
            model.train()
            eager.train()
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                again = type(model).from_pretrained(folder)
            alike = all(
                torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True)
            )
            soak.count("saved", "" if alike else "what was saved is not what there is")
        if sampled is None:
            soak.start = time.monotonic()
        if sampled is None or soak.now - sampled > SAMPLE:
            sampled = soak.now
            soak.sample(len(model.opsmith.graphs))


def _step(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def _logits(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {"logits": model(ids).logits}


class Judge:
    """Holds results to eager's in float64, by eager's largest error in draws that are made as they are needed."""

    def __init__(self, eager: Any, run: Callable[[Any], dict[str, torch.Tensor]]) -> None:
        self.eager, self.run, self.draws = eager, run, 0
        self.exact, self.worst = run(copy.deepcopy(eager).double()), run(eager)

    def fault(self, name: str, got: torch.Tensor) -> str:
        while not (verdict := WHOLE_MODEL.check(got, self.worst[name], self.exact[name])).ok:
            if self.draws == DRAWS:
                return f"{name}: {verdict.why}, of {DRAWS} draws"
            self._draw()
        return ""

    def _draw(self) -> None:
        """Eager with its weights moved by half a unit in the last place at most, as roundings do."""
        self.draws += 1
        other = copy.deepcopy(self.eager)
        with torch.no_grad():
            for p in other.parameters():
                p.copy_(p.double() * (1 + (2 * torch.rand_like(p, dtype=torch.float64) - 1) * 2.0**-24))
        for name, result in self.run(other).items():
            errors = [(one - self.exact[name]).abs().max() for one in (result, self.worst[name])]
            if errors[0] > errors[1]:
                self.worst[name] = result


def picture(result: dict[str, Any], alike: list[tuple[float, float]], file: Path) -> None:
    from matplotlib import pyplot

    figure, (memory, calls) = pyplot.subplots(2, 1, figsize=(9, 5), layout="constrained", sharex=True)
    memory.plot([t / 60 for t, _ in result["memory"]], [mb for _, mb in result["memory"]])
    memory.set_ylabel("memory of the process, MB")
    memory.set_ylim(bottom=0)
    calls.plot([t / 60 for t, _ in alike], [ms for _, ms in alike], ".", markersize=1, rasterized=True)
    calls.set_ylabel("calls that are alike, ms")
    calls.set_yscale("log")
    calls.set_xlabel("minutes")
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("serve", "train"))
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    soak = Soak(args.minutes)
    {"serve": serve, "train": train}[args.kind](soak)
    result = {"kind": args.kind, **soak.judged()}
    for file in filter(None, (args.json, args.svg)):
        file.parent.mkdir(parents=True, exist_ok=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    if args.svg:
        picture(result, soak.alike, args.svg)
    told = {key: value for key, value in result.items() if key not in ("machine", "memory")}
    print(json.dumps(told, indent=1))
    sys.exit(bool(result["faults"]))


if __name__ == "__main__":
    main()
