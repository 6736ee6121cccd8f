"""`outrider chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import grpc
from rich.console import Console
from rich.text import Text

from outrider.cli.client import Message, Sampling, generate, list_models, open_gateway
from outrider.cli.options import (
    MAX_SEED,
    MAX_TOKENS_LIMIT,
    add_connect_tls_options,
    add_service_options,
    given_service_flags,
    make_cluster,
    number,
    whole_number,
)
from outrider.cli.terminal import FinishedAnswer, StartDisplay, legend, make_console, show_answer
from outrider.config.service import TlsFiles, peer_tls
from outrider.errors import EXIT_FAILURE, EXIT_INTERRUPTED, ConfigError, OutriderError, count_of

_REPEAT_SECONDS = 0.1
"""Time between two tries to deliver a signal that has not interrupted a read."""

HELP = "/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C cuts an answer short"


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--connect", metavar="ADDRESS", help="gRPC address of a running gateway; by default, start one."
    )
    add_connect_tls_options(parser)
    parser.add_argument("--system", default="", help="System message.")
    tokens = whole_number(1, MAX_TOKENS_LIMIT)
    parser.add_argument("--max-tokens", type=tokens, default=512, help="Most tokens of an answer. Default: 512.")
    # Small models lose the thread at the API's default of 1.
    parser.add_argument(
        "--temperature", type=number(0, 2), default=0.2, help="Sampling temperature; 0 is greedy. Default: 0.2."
    )
    parser.add_argument(
        "--top-p", type=number(1e-6, 1), help="Sample from the most likely tokens up to this total probability."
    )
    parser.add_argument("--seed", type=whole_number(0, MAX_SEED), help="Seed that makes sampling repeatable.")
    parser.add_argument("--plain", action="store_true", help="Ask for plain decoding, without speculation.")
    add_service_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Chat until the user leaves; return 1 if an answer failed and input is not a terminal, else 0."""
    _leave_on_signals()
    in_terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # valid_text sends such bytes as question marks
    console = make_console(color=not arguments.no_color)
    # Without a terminal, stdout carries the answers alone.
    notes = console if in_terminal else make_console(color=not arguments.no_color, stderr=True)
    sampling = Sampling(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
        speculation=not arguments.plain,
    )
    with _gateway(arguments, notes) as (address, api_key), asyncio.Runner() as runner:
        channel = runner.run(_open(address, api_key, peer_tls(arguments, "connect")))
        first = [("system", arguments.system)] if arguments.system else []
        chat = Conversation(console, notes, runner, channel, sampling, first)
        try:
            chat.greet()
            for question in questions(notes):
                if question == "/quit":
                    break
                chat.take(question)
        finally:
            runner.run(channel.close())
    return EXIT_FAILURE if chat.failed and not in_terminal else 0


def _leave_on_signals() -> None:
    """Make SIGTERM and SIGHUP end the process through its `with` blocks. Ctrl-C ends only a line or an answer.

    Python handles a signal that comes just before the main thread begins to read a line only when the read returns,
    which may be never. So a thread, woken by each signal, sends it again until it is handled.
    """
    # nohup's ignored SIGHUP stays ignored.
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    main = threading.get_ident()
    leaving, left_at = threading.Event(), 0.0
    receiver, sender = socket.socketpair()
    sender.setblocking(False)

    def leave(*_: object) -> None:
        nonlocal left_at
        signal.set_wakeup_fd(-1)
        leaving.set()
        if time.monotonic() - left_at > _REPEAT_SECONDS:  # else the thread repeated a signal handled in the meantime
            left_at = time.monotonic()
            sys.exit(EXIT_INTERRUPTED)

    def repeat() -> None:
        while (signum := receiver.recv(1)[0]) not in numbers:
            pass
        while not leaving.wait(_REPEAT_SECONDS):
            signal.pthread_kill(main, signum)

    for signum in numbers:
        signal.signal(signum, leave)
    signal.set_wakeup_fd(sender.detach())
    threading.Thread(target=repeat, name="signals", daemon=True).start()


@contextlib.contextmanager
def _gateway(arguments: argparse.Namespace, console: Console) -> Iterator[tuple[str, str]]:
    """Yield address and API key of the gateway to talk to; without --connect, run one until the block ends."""
    if arguments.connect is not None:
        if given := given_service_flags(arguments):
            raise ConfigError(f"{given[0]}: with --connect no service is started here; leave one of the two out")
        yield arguments.connect, os.environ.get("OUTRIDER_API_KEY", "")
        return
    display = StartDisplay(console)
    cluster = make_cluster(arguments, console, display, fixed_ports=False, supervise=True)
    with display.started(cluster):
        yield cluster.gateway_address, cluster.api_key


def questions(console: Console) -> Iterator[str]:
    """Yield what the user types, line by line, until the end of input. Ctrl-C at the prompt discards the line."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() its editing and history)
    prompt = "\nyou> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print(f"\n{HELP}")
            continue
        if line:
            yield line


@dataclass
class Conversation:
    """The messages so far, and the connection that answers them. Answers go to `console`, other text to `notes`."""

    console: Console
    notes: Console
    runner: asyncio.Runner
    channel: grpc.aio.Channel
    sampling: Sampling
    first: Sequence[Message]
    """Messages in front of the conversation, such as the system message; /reset keeps them."""
    messages: list[Message] = field(default_factory=list)
    failed: bool = False

    def greet(self) -> None:
        """Print which models answer and what the colours mean. Raises OutriderError if no gateway answers."""
        models = self.runner.run(list_models(self.channel))
        self.notes.print(f"\n{', '.join(name for name, _ in models)}: {HELP}")
        if self.notes.color_system and not self.notes.no_color:
            self.notes.print(legend())

    def take(self, line: str) -> None:
        """Carry out a command, or get a question answered. Failed questions are not remembered."""
        if line == "/reset":
            self.messages = []
            self.notes.print("forgotten")
        elif line.startswith("/"):
            self.notes.print(HELP)
        else:
            self._ask(("user", line))

    def _ask(self, question: Message) -> None:
        stream = generate(self.channel, [*self.first, *self.messages, question], self.sampling)
        try:
            answer = self.runner.run(show_answer(stream, self.console))
        except KeyboardInterrupt:
            self.failed = True
            self.notes.print("(cut short; not remembered)")
        except OutriderError as error:
            self.failed = True
            self.notes.print(f"error: {error.message}")
        else:
            self.messages += [question, ("assistant", answer.text)]
            self.notes.print(Text(summary(answer), "dim"))


def summary(answer: FinishedAnswer) -> str:
    """Return an answer's figures in one line."""
    usage = answer.usage
    return (
        f"{count_of(usage.completion_tokens, 'token')}, {answer.tokens_per_second:.1f} a second, "
        f"accept length {usage.accept_length:.2f}, {usage.num_accepted_tokens} of "
        f"{count_of(usage.num_draft_tokens, 'draft token')} accepted"
    )


async def _open(address: str, api_key: str, tls: TlsFiles | None) -> grpc.aio.Channel:
    return open_gateway(address, api_key, tls)
