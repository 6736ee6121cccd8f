"""transformers.generate in a process of its own: a request per line on stdin, its figures per line on stdout.

Apart from the services, so that each side keeps the OpenMP settings that suit it.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import transformers


def main() -> None:
    """Arguments: model folder and dtype. A line in: {"prompt", "max_tokens"}; out: {"tokens", "seconds"}."""
    folder, dtype = sys.argv[1:3]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    for line in sys.stdin:
        job = json.loads(line)
        messages = [{"role": "user", "content": job["prompt"]}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        start = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=job["max_tokens"], do_sample=False)
        seconds = time.perf_counter() - start
        print(json.dumps({"tokens": output.shape[1] - inputs["input_ids"].shape[1], "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
