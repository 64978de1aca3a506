"""One engine in a process of its own: reads a job from standard input, writes what came of it to the file it names.

    {"model": folder, "options": of LLM, "waves": [[prompt, ...], ...], "new_tokens": 16, "result": file}

Each wave of prompts (lists of token ids) is generated for when the one before is done.
"""

import json
import sys
from collections import Counter
from typing import Any


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Generate greedily for every wave."""
    from torch.profiler import ProfilerActivity, profile
    from vllm import LLM, SamplingParams

    options = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "seed": 0, **job["options"]}
    llm = LLM(job["model"], skip_tokenizer_init=True, disable_log_stats=False, **options)
    params = SamplingParams(
        max_tokens=job["new_tokens"],
        temperature=0.0,
        detokenize=False,
        ignore_eos=True,
        prompt_logprobs=0 if job.get("logprobs") else None,
    )
    waves = []
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for wave in job["waves"]:
            waves.append(llm.generate([{"prompt_token_ids": ids} for ids in wave], params, use_tqdm=False))
    result = {
        "tokens": [[list(one.outputs[0].token_ids) for one in wave] for wave in waves],
        "cached": [[one.num_cached_tokens for one in wave] for wave in waves],
        "preemptions": sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"),
        "operators": sorted({e.name for e in profiled.events() if e.name.startswith(("opsmith::", "_C::"))}),
        "layers": llm.apply_model(layers)[0],
        "refusals": llm.apply_model(refusals)[0],
        "weights": llm.apply_model(weights)[0],
    }
    if job.get("logprobs"):
        result["logprobs"] = [
            [next(iter(at.values())).logprob for at in one.prompt_logprobs[1:]]
            for wave in waves
            for one in wave
        ]
    if abort := job.get("abort"):
        result["after_abort"] = aborted(llm.llm_engine, abort, params)
    return result


def aborted(engine: Any, prompts: list[list[int]], params: Any) -> list[int]:
    """Start all prompts, stop all but the last after three steps; the tokens of the last."""
    for i, ids in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": ids}, params)
    for _ in range(3):
        engine.step()
    engine.abort_request([str(i) for i in range(len(prompts) - 1)])
    last: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.request_id == str(len(prompts) - 1)
            last = list(output.outputs[0].token_ids)
    return last


def layers(model: Any) -> dict[str, int]:
    """How many there are of each class of module."""
    return Counter(type(module).__name__ for module in model.modules())


def refusals(model: Any) -> list[str | None]:
    """Of each attention layer, why it is vLLM's own; "" where it is ours."""
    impls = [module.impl for module in model.modules() if hasattr(module, "impl")]
    return [getattr(impl, "refusal", "no plugin") or "" for impl in impls]


def weights(model: Any) -> int:
    """Bytes that the model's parameters and buffers take."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


if __name__ == "__main__":
    job = json.load(sys.stdin)
    with open(job["result"], "w") as file:
        json.dump(run(job), file)
