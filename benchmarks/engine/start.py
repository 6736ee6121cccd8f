"""Time until verify's engine can serve: at its very first start, when all kernels are compiled, and at a second one.

    python -m benchmarks.engine.start --model /models/llama-8b --speculative-algorithm EAGLE3 \
        --speculative-draft-model-path /models/eagle3-8b --out FILE.json

Each start is its own process; both share a cache of compiled kernels that is empty at first. Weights are in the page
cache if they have been read before. Doors and gateway are not counted. Options that are not listed here are verify's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import device_name
from outrider.config.base import parse_options
from outrider.config.verify import VerifyOptions
from outrider_tools.bench.report import Row, write_report

CHILD = "--measure-one-start"
STARTS = ("kernels compiled anew", "kernels compiled before")


def measure(argv: list[str]) -> dict[str, float]:
    """Return the seconds of each part of a start in this process; imports are counted from here."""
    begin = time.perf_counter()
    from verify_service.engine.build import build
    from verify_service.engine.loading import load, load_draft

    options = parse_options(VerifyOptions, argv)
    imported = time.perf_counter()
    path, model = load(options)
    draft = load_draft(options, path, model)
    loaded = time.perf_counter()
    build(options, path, model, draft)
    end = time.perf_counter()
    return {
        "import_seconds": imported - begin,
        "load_seconds": loaded - imported,
        "build_seconds": end - loaded,
        "engine_start_seconds": end - begin,
    }


def start_apart(argv: list[str], cache: str) -> dict[str, float]:
    """Call `measure` in a new process, with compiled kernels in the folder `cache`."""
    command = [sys.executable, "-m", "benchmarks.engine.start", CHILD, *argv]
    environment = os.environ | {"TRITON_CACHE_DIR": cache}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Parse options, start twice and write the report."""
    if CHILD in sys.argv:
        print(json.dumps(measure([word for word in sys.argv[1:] if word != CHILD])))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", default="llama-8b eagle3 colocated r64 bf16", help="the case's name in results")
    parser.add_argument("--out", type=Path)
    arguments, argv = parser.parse_known_args()
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for name in STARTS:
            found = start_apart(argv, cache)
            case = f"{arguments.label} {name}"
            print(case, {part: round(seconds, 1) for part, seconds in found.items()}, flush=True)
            rows += [Row(case, part, seconds, "s") for part, seconds in found.items()]
    if arguments.out:
        write_report(arguments.out, "start", device_name(), rows, ("torch", "triton"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
