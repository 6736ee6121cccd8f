"""Options of `outrider bench`: vLLM's and SGLang's words where they have one."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from outrider.cli.options import MAX_SEED, number, whole_number
from outrider.errors import ConfigError
from outrider_tools.bench.runner import Point

DEFAULT_PROMPTS = 64
MAX_CONCURRENCY = 4096


def _rates(text: str) -> list[float]:
    one = number(1e-3, 1e6)
    return [math.inf if part.strip() == "inf" else one(part.strip()) for part in text.split(",")]


def _concurrencies(text: str) -> list[int]:
    one = whole_number(1, MAX_CONCURRENCY)
    return [one(part.strip()) for part in text.split(",")]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    _add_door(parser.add_argument_group("the gateway"))
    _add_load(parser.add_argument_group("the load"))
    _add_prompts(parser.add_argument_group("the prompts"))
    _add_sampling(parser.add_argument_group("the answers"))
    _add_report(parser.add_argument_group("the report"))


def points_of(arguments: argparse.Namespace) -> list[Point]:
    """The loads to measure: every rate with every concurrency. Raises ConfigError."""
    rates: list[float] = arguments.request_rate
    concurrencies: list[int] = arguments.max_concurrency or [0]
    if concurrencies == [0] and any(map(math.isinf, rates)) and arguments.num_prompts is None and arguments.duration:
        raise ConfigError("--max-concurrency: not set; with --duration a closed loop needs it, or set --request-rate")
    count = arguments.num_prompts
    if count is None:
        count = 0 if arguments.duration else DEFAULT_PROMPTS
    return [
        Point(
            concurrency=most,
            rate=rate,
            burstiness=arguments.burstiness,
            num_prompts=count,
            seconds=arguments.duration,
            timeout=arguments.timeout,
            seed=arguments.seed,
        )
        for rate in rates
        for most in concurrencies
    ]


def _add_door(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--backend",
        choices=("grpc", "openai", "openai-chat"),
        default="grpc",
        help="Which door: gRPC (the default), /v1/completions, or /v1/chat/completions.",
    )
    group.add_argument("--connect", default="127.0.0.1:50051", help="Of the gRPC door. Default: 127.0.0.1:50051.")
    group.add_argument(
        "--base-url", default="http://127.0.0.1:8000", help="Of the REST door. Default: http://127.0.0.1:8000."
    )
    group.add_argument(
        "--metrics-url",
        default="",
        help="The gateway's metrics page, for acceptance by depth where the door does not tell it; by default the REST "
        "door's.",
    )
    group.add_argument("--api-key-file", type=Path, help="File with the API key; by default $OUTRIDER_API_KEY.")
    for word, text in (
        ("ca", "certificates that the gateway's must be signed with; turns TLS on over gRPC"),
        ("cert", "certificate to show the gRPC door"),
        ("key", "its private key"),
        ("name", "name in the gateway's certificate, if it is not the address"),
    ):
        group.add_argument(f"--connect-tls-{word}", default="", help=f"TLS: {text}.")
    group.add_argument("--model", default="", help="Name of the model; empty for the served one.")


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--num-prompts",
        type=whole_number(1, 10_000_000),
        help=f"Requests of each point. Default: {DEFAULT_PROMPTS}, or any number with --duration.",
    )
    group.add_argument(
        "--duration",
        type=number(0.1, 1e6),
        default=0.0,
        help="Seconds of each point: no request begins later, and what comes later does not count for throughput.",
    )
    group.add_argument(
        "--max-concurrency",
        type=_concurrencies,
        help="Requests at once; several, comma separated, are measured one after the other. Default: all of them.",
    )
    group.add_argument(
        "--request-rate",
        type=_rates,
        default=[math.inf],
        help="Requests a second, whatever the answers take; several, comma separated. Default: inf, a closed loop.",
    )
    group.add_argument(
        "--burstiness",
        type=number(0.01, 1000),
        default=1.0,
        help="Of arrivals: 1 (the default) is a Poisson process, less comes in bursts, more is more even.",
    )
    group.add_argument(
        "--num-warmups", type=whole_number(0, 100_000), default=8, help="Requests before all points. Default: 8."
    )
    group.add_argument(
        "--timeout", type=number(0.1, 86400), default=600.0, help="Seconds that a request may take. Default: 600."
    )
    group.add_argument("--seed", type=whole_number(0, MAX_SEED), default=0, help="Of prompts and arrivals. Default: 0.")


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dataset-path",
        type=Path,
        help="JSONL file: objects with prompt, turns, messages or prompt_token_ids, and max_tokens if they like. When "
        "it ends it begins anew. By default prompts are random token ids.",
    )
    tokens = whole_number(1, 1 << 20)
    group.add_argument("--random-input-len", type=tokens, default=128, help="Tokens of a random prompt. Default: 128.")
    group.add_argument(
        "--random-output-len",
        type=tokens,
        default=128,
        help="Most tokens of an answer, with a file too. Default: 128.",
    )
    group.add_argument(
        "--random-range-ratio",
        type=number(0, 0.999),
        default=0.0,
        help="Lengths are drawn from this share below to this share above. Default: 0.",
    )
    group.add_argument(
        "--random-vocab-size",
        type=whole_number(1, 1 << 24),
        default=10000,
        help="Random ids are below this, and above 255 where it is over 512. Default: 10000.",
    )
    group.add_argument("--raw", action="store_true", help="Over gRPC, send texts as they are and not as a user's turn.")


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--temperature", type=number(0, 2), default=0.0, help="Default: 0, greedy.")
    group.add_argument("--top-p", type=number(1e-6, 1), help="By default, the server's.")
    group.add_argument("--top-k", type=whole_number(0, 1 << 24), help="By default, the server's.")
    group.add_argument("--sampling-seed", type=whole_number(0, MAX_SEED), help="Of every request; by default none.")
    group.add_argument("--ignore-eos", action="store_true", help="Answers go on to their most tokens.")
    group.add_argument("--plain", action="store_true", help="Ask for plain decoding, without speculation.")


def _add_report(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--out", type=Path, help="JSON file to write.")
    group.add_argument("--plot", type=Path, help="Image to draw; needs matplotlib.")
    group.add_argument("--label", default="gateway", help="First words of each case: model, drafter, mode.")
    group.add_argument("--device-name", default="", help="What the services run on; by default this processor.")
    group.add_argument("--save-detailed", action="store_true", help="Write every request's figures into --out, too.")
