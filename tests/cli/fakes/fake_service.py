"""Stands in for a service: reports its addresses, says a few lines, ends on SIGTERM, or misbehaves as told.

The environment variable FAKE_<NAME> chooses: broken, taken, mute, loading, stubborn, family, alone (n-grams
draft, whatever was asked for); anything else behaves well. NAME is that of the socket or ready file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path


def main() -> int:
    options = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])
    ready_file = Path(options["ready-file"])
    mode = os.environ.get(f"FAKE_{ready_file.stem.upper()}", "")
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if mode in ("stubborn", "loading") else lambda *_: stopped.set())
    print(f"hello from {ready_file.stem}, threads {os.environ['OMP_NUM_THREADS']}, process {os.getpid()}", flush=True)
    if mode == "broken":
        print("the flux is not compensated", file=sys.stderr, flush=True)
        return 3
    if mode == "taken":
        print("--metrics-address: cannot bind 127.0.0.1:1: Address already in use", file=sys.stderr, flush=True)
        return 2
    if mode == "family":
        grandchild = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        print(f"grandchild {grandchild.pid}", flush=True)
    if mode not in ("mute", "loading"):
        addresses = {
            key.replace("-", "_"): options[key].replace(":0", ":4711")
            for key in ("address", "metrics-address", "rest-address")
            if key in options
        }
        model = {"model": "fake-1b", "dtype": "float8", "device": "abacus", "context_length": "77"}
        about = model if ready_file.stem == "verify" else {}
        asked = options.get("speculative-algorithm", "").replace(",", "+")
        about["drafters"] = "NGRAM" if mode == "alone" else asked
        draft = ready_file.with_suffix(".tmp")
        draft.write_text(json.dumps({**addresses, **about, "arguments": sys.argv[1:]}))
        draft.replace(ready_file)
    stopped.wait()
    print("bye", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
