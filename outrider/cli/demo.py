"""`outrider demo`: start everything, stream an answer, show the figures, stop everything."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from itertools import takewhile

from rich.console import Console
from rich.table import Table

from outrider.cli.client import Sampling, generate, open_gateway, valid_text
from outrider.cli.cluster import Cluster
from outrider.cli.options import (
    MAX_TOKENS_LIMIT,
    add_connect_tls_options,
    add_service_options,
    make_cluster,
    whole_number,
)
from outrider.cli.terminal import FinishedAnswer, StartDisplay, drafters_text, legend, make_console, show_answer
from outrider.config.service import TlsFiles, peer_tls
from outrider.errors import count_of

# The answer repeats its context, as in edits, summaries and retrieval, so the NGRAM drafter has something to copy.
PROMPT = """Write this shopping list again, in the same order:

1. Two bottles of milk
2. Half a pound of butter
3. A dozen eggs from the farm
4. Three pounds of potatoes
5. A jar of strawberry jam
6. One loaf of dark bread
7. A bag of green apples"""


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--prompt", default=PROMPT, help="Question to ask.")
    tokens = whole_number(1, MAX_TOKENS_LIMIT)
    parser.add_argument("--max-tokens", type=tokens, default=160, help="Most tokens of the answer. Default: 160.")
    add_connect_tls_options(parser)
    add_service_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the demonstration; return 0 if all services ended cleanly."""
    console = make_console(color=not arguments.no_color)
    display = StartDisplay(console)
    cluster = make_cluster(arguments, console, display, fixed_ports=False, supervise=False)
    with display.started(cluster):
        for name in cluster.services:
            console.print(f"  {name:<8} process {cluster.children[name].pid}, {cluster.address(name)}", soft_wrap=True)
        console.print(f"  guesses  {drafters_text(cluster.drafters)}", soft_wrap=True)
        asyncio.run(_show(console, cluster, peer_tls(arguments, "connect"), arguments.prompt, arguments.max_tokens))
        console.print("\nstopping")
        endings = cluster.close()
    for name, ending in endings.items():
        console.print(f"  {name:<8} {ending}")
    return 0 if set(endings.values()) == {"ended"} else 1


async def _show(console: Console, cluster: Cluster, tls: TlsFiles | None, prompt: str, max_tokens: int) -> None:
    async with open_gateway(cluster.gateway_address, cluster.api_key, tls) as channel:
        messages = [("user", prompt)]
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
        console.print("\nThe prompt:\n")
        console.print(valid_text(prompt))
        # Warm up: neither answer pays for the services' first prompt, and both find the prompt in the cache.
        await show_answer(generate(channel, messages, Sampling(temperature=0.0, max_tokens=1)), None)
        console.print("\nThe answer, over gRPC, token by token:\n")
        with_drafts = await show_answer(generate(channel, messages, sampling), console)
        if console.color_system and not console.no_color:
            console.print()
            console.print(legend())
        console.print("\nThe same again without speculation, for comparison ...")
        plain_sampling = Sampling(temperature=0.0, max_tokens=max_tokens, speculation=False)
        plain = await show_answer(generate(channel, messages, plain_sampling), None)
    console.print()
    console.print(figures(with_drafts, plain))
    console.print(compare(with_drafts.text, plain.text))
    console.print(remark(prompt), soft_wrap=True)


def figures(with_drafts: FinishedAnswer, plain: FinishedAnswer) -> Table:
    """Return a table of both answers' figures, side by side."""
    table = Table("", "with speculation", "without")
    for column in table.columns[1:]:
        column.justify = "right"
    rows: tuple[tuple[str, Callable[[FinishedAnswer], str]], ...] = (
        ("tokens", lambda a: f"{a.usage.completion_tokens}"),
        ("tokens per second", lambda a: f"{a.tokens_per_second:.1f}"),
        ("prompt tokens", lambda a: f"{a.usage.prompt_tokens}"),
        ("of these from the cache", lambda a: f"{a.usage.cached_prompt_tokens}"),
        ("time to first token", lambda a: f"{1000 * a.seconds_to_first_token:.0f} ms"),
        ("rounds", lambda a: f"{a.usage.num_rounds}"),
        ("accept length: tokens / rounds", lambda a: f"{a.usage.accept_length:.2f}"),
        ("draft tokens verified", lambda a: f"{a.usage.num_draft_tokens}"),
        ("draft tokens accepted", lambda a: f"{a.usage.num_accepted_tokens}"),
    )
    for label, cell in rows:
        table.add_row(label, cell(with_drafts), cell(plain))
    return table


def remark(prompt: str) -> str:
    """Return a remark on how far the figures can be generalised."""
    text = (
        "Each column is one answer to one prompt, measured once on this machine: speeds and rounds vary from run to "
        "run, and what drafts gain from prompt to prompt. `outrider bench` measures many."
    )
    return text + ("\nThis prompt suits drafts: its answer repeats what it holds." if prompt == PROMPT else "")


def compare(first: str, second: str) -> str:
    """Say whether the two texts are equal, and if not, why."""
    if first == second:
        return "Both texts are the same, character by character."
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    return (
        f"The texts differ after {count_of(same, 'character')}: in bfloat16 forwards of different widths round "
        "differently. With --dtype float32 they are the same."
    )
