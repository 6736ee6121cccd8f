"""`outrider top`: services as they work, from their metrics pages. See docs/tools.md."""

from __future__ import annotations

import argparse
import os
import ssl
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outrider.cli.answer import printable
from outrider.cli.options import number, whole_number
from outrider.cli.terminal import SERVICE_STYLES, make_console
from outrider.config.service import read_secret
from outrider.errors import ConfigError, UnavailableError
from outrider.metrics import WANTS_KEY, MetricsPage
from outrider_tools.cli.top_figures import View, view_of

DEFAULT_PAGES = ("127.0.0.1:8000", "127.0.0.1:9102", "127.0.0.1:9103")

READ_SECONDS = 5.0


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "pages",
        nargs="*",
        default=list(DEFAULT_PAGES),
        metavar="PAGE",
        help="Metrics pages of gateways, verify and draft services, host:port or URL. "
        f"Default: {' '.join(DEFAULT_PAGES)}.",
    )
    parser.add_argument(
        "--interval", type=number(0.05, 3600), default=2.0, help="Seconds between two readings. Default: 2."
    )
    parser.add_argument("--once", action="store_true", help="Read twice, print once, end.")
    parser.add_argument("--count", type=whole_number(1, 1 << 30), help="End after so many.")
    parser.add_argument(
        "--api-key-file", type=Path, help="File with the gateway's API key; by default $OUTRIDER_API_KEY."
    )
    parser.add_argument("--tls-ca", default="", help="Certificates that those of https pages must be signed with.")


class Watch:
    """Reads pages again and again, and tells what came in between."""

    def __init__(self, pages: Sequence[str], token: str = "", tls: ssl.SSLContext | None = None) -> None:
        self._urls = [page_url(page) for page in pages]
        self._token = token
        self._tls = tls
        self._former: dict[str, tuple[float, MetricsPage]] = {}
        self._keyed: set[str] = set()

    def read(self) -> list[View]:
        """All pages, side by side; one that cannot be read is a view with an error."""
        with ThreadPoolExecutor(max_workers=len(self._urls)) as pool:
            return list(pool.map(self._one, self._urls))

    def _one(self, url: str) -> View:
        source = urlsplit(url).netloc
        try:
            page = self._page(url)
        except UnavailableError as error:
            self._former.pop(url, None)
            return View("unknown", source, (), error.message)
        at = time.monotonic()
        before_at, before = self._former.get(url, (at, page))
        self._former[url] = at, page
        return view_of(source, page, before, at - before_at)

    def _page(self, url: str) -> MetricsPage:
        """The key is the gateway's: it goes to pages alone that ask for one."""
        if url not in self._keyed:
            try:
                return MetricsPage.read(url, timeout=READ_SECONDS, tls=self._tls)
            except UnavailableError as error:
                if error.code != WANTS_KEY or not self._token:
                    raise
            self._keyed.add(url)
        return MetricsPage.read(url, token=self._token, timeout=READ_SECONDS, tls=self._tls)


def page_url(page: str) -> str:
    """The URL of a page that was given as host:port or URL. Raises ConfigError."""
    url = page if "://" in page else f"http://{page}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"{page!r} is no metrics page; write host:port, or a URL that begins with http:// or https://"
        )
    return url if parts.path not in ("", "/") else f"{parts.scheme}://{parts.netloc}/metrics"


def run(arguments: argparse.Namespace) -> int:
    """Watch until interrupted; with --once, exit code 1 if no page could be read."""
    token = read_secret(os.environ.get("OUTRIDER_API_KEY", ""), arguments.api_key_file, "OUTRIDER_API_KEY")
    tls = ssl.create_default_context(cafile=str(Path(arguments.tls_ca).expanduser())) if arguments.tls_ca else None
    watch = Watch(arguments.pages, token, tls)
    console = make_console(color=not arguments.no_color)
    count = 1 if arguments.once else arguments.count
    try:
        watch.read()
        if console.is_terminal and not arguments.once:
            return _live(console, watch, arguments.interval, count)
        return _lines(console, watch, arguments.interval, count)
    except KeyboardInterrupt:
        return 0


def _readings(watch: Watch, interval: float, count: int | None) -> Iterator[list[View]]:
    done = 0
    while count is None or done < count:
        time.sleep(interval)
        yield watch.read()
        done += 1


def _lines(console: Console, watch: Watch, interval: float, count: int | None) -> int:
    """A line for each page and reading: what a log or a pipe wants."""
    views: list[View] = []
    for views in _readings(watch, interval, count):
        for view in views:
            console.print(line_of(view), soft_wrap=True)
    return 1 if all(view.error for view in views) else 0


def _live(console: Console, watch: Watch, interval: float, count: int | None) -> int:
    views: list[View] = []
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for views in _readings(watch, interval, count):
            live.update(picture_of(views), refresh=True)
    console.print(picture_of(views))
    return 0


def line_of(view: View) -> str:
    """A view in one line."""
    at = time.strftime("%H:%M:%S")
    if view.error:
        return printable(f"{at} {view.source}: {view.error}")
    figures = "  ".join(f"{figure.name.strip()} {figure.value}" for figure in view.figures)
    return printable(f"{at} {view.kind} {view.source}  {figures}")


def picture_of(views: Sequence[View]) -> Group:
    """All views side by side."""
    head = Text(f"outrider top   {time.strftime('%H:%M:%S')}   Ctrl-C leaves", "dim")
    return Group(head, Columns([_panel(view) for view in views], padding=(0, 1)))


def _panel(view: View) -> Panel:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for figure in view.figures:
        table.add_row(printable(figure.name), Text(printable(figure.value), "bold red" if figure.alarm else ""))
    body = Text(printable(view.error), "red") if view.error else table
    style = SERVICE_STYLES.get(view.kind, "red" if view.error else "")
    return Panel(body, title=f"{view.kind} {view.source}", border_style=style, width=46)
