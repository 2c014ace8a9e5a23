"""vLLM's engine as a contestant. It runs in vLLM's environment, which has none of fastgrpo's packages."""

import os
from collections.abc import Callable
from typing import Any

from benchmarks.contestants import Entry


def entry(path: str, cases: dict[str, dict[str, Any]]) -> Entry:
    """Create vLLM's engine for the model in `path`, with a variant per case of bench_vllm.py."""
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    from vllm import LLM, SamplingParams, __version__

    engine = LLM(path, dtype="float32", max_model_len=2048, logprobs_mode="processed_logprobs")

    def roll(prompts: list[list[int]], group: int, lengths: list[int]) -> Callable[[], None]:
        def call() -> None:
            engine.reset_prefix_cache()  # of the last call
            outputs = engine.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts],
                [
                    SamplingParams(
                        n=group, temperature=1.0, max_tokens=limit, ignore_eos=True, logprobs=0, detokenize=False
                    )
                    for limit in lengths
                ],
                use_tqdm=False,
            )
            assert sum(len(one.token_ids) for output in outputs for one in output.outputs) == group * sum(lengths)

        return call

    return Entry({f"{name}/vLLM": roll(**case) for name, case in cases.items()}, about={"vllm": __version__})
