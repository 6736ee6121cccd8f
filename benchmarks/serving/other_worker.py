"""Another engine in its own process: reads a request per line from stdin, writes its figures per line to stdout.

Arguments: `transformers` with a model folder and a dtype, or `llamacpp` with a GGUF file. Input: {"prompt",
"max_tokens"}; output: {"tokens", "seconds"}. It is separate from the services so that each side keeps the OpenMP
settings that suit it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Answer = Callable[[str, int], tuple[int, float]]
"""Takes a prompt and the most tokens of its answer; returns the answer's tokens and seconds."""


def transformers_engine(folder: str, dtype: str) -> Answer:
    """Return transformers.generate as an engine; times exclude the tokenizer."""
    import torch
    import transformers

    torch.set_num_threads(_num_threads())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    def answer(prompt: str, max_tokens: int) -> tuple[int, float]:
        inputs = tokenizer.apply_chat_template(
            _messages(prompt), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        start = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        return output.shape[1] - inputs["input_ids"].shape[1], time.perf_counter() - start

    return answer


def llama_cpp_engine(file: str) -> Answer:
    """Return llama.cpp as an engine, through `xllamacpp`."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx = 2048
    params.n_parallel = 1
    params.cache_prompt = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = _num_threads()
    server = xllamacpp.Server(params)
    print(xllamacpp.get_system_info(), file=sys.stderr)

    def answer(prompt: str, max_tokens: int) -> tuple[int, float]:
        start = time.perf_counter()
        found: dict[str, Any] = server.handle_chat_completions(
            {"messages": _messages(prompt), "max_tokens": max_tokens, "temperature": 0}
        )
        return found["usage"]["completion_tokens"], time.perf_counter() - start

    return answer


def _num_threads() -> int:
    return len(os.sched_getaffinity(0))


def _messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def main() -> None:
    """Answer until stdin ends."""
    engine, *arguments = sys.argv[1:]
    answer = {"transformers": transformers_engine, "llamacpp": llama_cpp_engine}[engine](*arguments)
    for line in sys.stdin:
        job = json.loads(line)
        tokens, seconds = answer(job["prompt"], job["max_tokens"])
        print(json.dumps({"tokens": tokens, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
