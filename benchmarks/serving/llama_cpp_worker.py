"""llama.cpp through `xllamacpp`, in a process of its own: a request per line on stdin, figures per line on stdout."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import xllamacpp


def main() -> None:
    """Argument: a GGUF file. A line in: {"prompt", "max_tokens"}; out: {"tokens", "seconds"}."""
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx = 2048
    params.n_parallel = 1
    params.cache_prompt = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    server = xllamacpp.Server(params)
    print(xllamacpp.get_system_info(), file=sys.stderr)
    for line in sys.stdin:
        job = json.loads(line)
        request = {
            "messages": [{"role": "user", "content": job["prompt"]}],
            "max_tokens": job["max_tokens"],
            "temperature": 0,
        }
        start = time.perf_counter()
        answer: dict[str, Any] = server.handle_chat_completions(request)
        seconds = time.perf_counter() - start
        print(json.dumps({"tokens": answer["usage"]["completion_tokens"], "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
