"""`outrider top`: watch services at work, through their metrics pages. See docs/tools.md."""

from __future__ import annotations

import argparse
import ssl
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import urlsplit

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.segment import SegmentLines
from rich.table import Table
from rich.text import Text

from outrider.cli.options import add_connect_tls_options, number, whole_number
from outrider.cli.terminal import SERVICE_STYLES, make_console, printable
from outrider.config.base import expand
from outrider.config.service import KEY_FIX, gateway_key, peer_tls
from outrider.errors import ConfigError, UnavailableError
from outrider.metrics import WANTS_KEY, Histogram, MetricsPage
from outrider.rpc.tls import client_context
from outrider.rpc.transport import is_http_url

MAX_DEPTHS = 8
PANEL_WIDTH, MIN_PANEL_WIDTH = 46, 36
_VERIFY = "outrider_verify_"
_GATEWAY = "outrider_gateway_"
_DRAFT = "outrider_draft_"


@dataclass(frozen=True)
class TopFigure:
    """A figure's name and its value, ready to be shown."""

    name: str
    value: str
    alarm: bool = False
    """Whether the value deserves attention."""


@dataclass(frozen=True)
class PageView:
    """The figures of one page."""

    kind: str
    """gateway, verify, draft, or unknown."""
    source: str
    figures: tuple[TopFigure, ...]
    error: str = ""


def page_view(source: str, now: MetricsPage, before: MetricsPage, seconds: float) -> PageView:
    """Return a page's figures, over the `seconds` between its readings."""
    for kind, prefix, make in (
        ("gateway", _GATEWAY, _gateway),
        ("verify", _VERIFY, _verify),
        ("draft", _DRAFT, _draft),
    ):
        if any(name.startswith(prefix) for name in (*now.gauges, *now.counters)):
            return PageView(kind, source, tuple(make(now, now.since(before), max(seconds, 1e-6))))
    return PageView("unknown", source, (), "none of our services' pages")


def _gateway(now: MetricsPage, gained: MetricsPage, seconds: float) -> Iterator[TopFigure]:
    places = now.total(f"{_GATEWAY}max_answers")
    yield _count("running", now.total("vllm:num_requests_running"))
    yield _count("waiting", now.total("vllm:num_requests_waiting"))
    answers = now.total(f"{_GATEWAY}answers_in_flight")
    yield TopFigure("answers", f"{answers:.0f} of {places:.0f}", alarm=places > 0 and answers >= 0.9 * places)
    yield TopFigure("tokens/s", f"{gained.total('vllm:generation_tokens') / seconds:.1f}")
    yield TopFigure("requests/s", f"{gained.total('vllm:request_success') / seconds:.2f}")
    lengths = gained.histogram(f"{_GATEWAY}accept_length")
    yield TopFigure("accept length", f"{lengths.mean:.2f}" if lengths.count else "-")
    yield _by_depth(gained, "vllm:spec_decode_num_accepted_tokens_per_pos", lengths.count)
    for name, family in (("ttft", "time_to_first_token"), ("itl", "inter_token_latency")):
        for share in (0.5, 0.99):
            yield _ms(f"{name} p{100 * share:.0f}", gained.histogram(f"vllm:{family}_seconds"), share)
    yield TopFigure("pages", f"{100 * now.total('vllm:kv_cache_usage_perc'):.0f}%")
    yield TopFigure("drafts", f"{now.total(f'{_GATEWAY}healthy_drafts'):.0f}")
    states = [labels.rpartition(",")[2] for labels, value in now.labelled(f"{_GATEWAY}verify_state") if value]
    ready = sum(state == "ready" for state in states)
    yield TopFigure("replicas", f"{ready} of {len(states)} ready", alarm=ready < len(states))
    errors = {labels: count for labels, count in gained.labelled(f"{_GATEWAY}errors") if count}
    yield TopFigure("errors", f"{sum(errors.values()):.0f}", alarm=bool(errors))
    for labels, count in sorted(errors.items()):
        yield TopFigure(f"  {labels.replace(',', ' ')}", f"{count:.0f}", alarm=True)
    if now.total(f"{_GATEWAY}draining"):
        yield TopFigure("draining", "yes", alarm=True)


def _verify(now: MetricsPage, gained: MetricsPage, seconds: float) -> Iterator[TopFigure]:
    rounds = gained.total(f"{_VERIFY}rounds")
    lengths = gained.histogram(f"{_VERIFY}accept_length")
    yield _count("running", now.total(f"{_VERIFY}running_requests"))
    yield _count("waiting", now.total(f"{_VERIFY}waiting_requests"))
    yield TopFigure("tokens/s", f"{gained.total(f'{_VERIFY}committed_tokens') / seconds:.1f}")
    yield TopFigure("rounds/s", f"{rounds / seconds:.1f}")
    # Per request and round: one round may hold many requests.
    yield TopFigure("accept length", f"{lengths.mean:.2f}" if lengths.count else "-")
    yield _by_depth(gained, f"{_VERIFY}accepted_tokens_per_position", lengths.count)
    drafted = gained.total(f"{_VERIFY}drafted_rounds")
    yield TopFigure("hit rate", _share(gained.total(f"{_VERIFY}hit_rounds"), drafted))
    yield TopFigure("nodes/round", f"{gained.histogram(f'{_VERIFY}round_draft_tokens').mean:.1f}")
    yield _ms("round p50", gained.histogram(f"{_VERIFY}round_seconds"), 0.5)
    yield _ms("gap p50", gained.histogram(f"{_VERIFY}host_gap_seconds"), 0.5)
    for name in ("gpu", "drafting"):
        if (times := gained.histogram(f"{_VERIFY}{name}_seconds")).count:
            yield _ms(f"{name} p50", times, 0.5)
    hold = gained.total(f"{_VERIFY}hold_seconds") / rounds * 1e3 if rounds else 0.0
    yield TopFigure("hold", f"{hold:.2f} ms a round")
    used, pages = now.total(f"{_VERIFY}kv_pages_used"), now.total(f"{_VERIFY}kv_pages")
    yield TopFigure("pages", f"{used:.0f} of {pages:.0f}", alarm=pages > 0 and used > 0.95 * pages)
    healthy = now.total(f"{_VERIFY}healthy_drafts")
    # Drafters in verify's own process count as healthy, and need no connection.
    known = max(len(list(now.labelled(f"{_VERIFY}draft_connected"))), int(healthy))
    yield TopFigure("drafts", f"{healthy:.0f} of {known}", alarm=healthy < known)
    for address, answer in now.labelled(f"{_VERIFY}draft_answer_seconds"):
        yield TopFigure(f"answer of {address.rpartition('/')[2]}", f"{answer * 1e3:.2f} ms")
    yield TopFigure("plain rounds", _share(gained.total(f"{_VERIFY}fallback_rounds"), rounds))
    for name in ("preemptions", "failed_requests", "refused_requests", "slow_readers", "declines"):
        count = gained.total(f"{_VERIFY}{name}")
        if count or name == "preemptions":
            yield TopFigure(name.replace("_", " "), f"{count:.0f}", alarm=count > 0)


def _draft(now: MetricsPage, gained: MetricsPage, seconds: float) -> Iterator[TopFigure]:
    yield _count("sessions", now.total(f"{_DRAFT}sessions"))
    yield _count("requests", now.total(f"{_DRAFT}open_requests"))
    yield _count("live nodes", now.total(f"{_DRAFT}live_nodes"))
    yield TopFigure("nodes/s", f"{gained.total(f'{_DRAFT}nodes_grown') / seconds:.0f}")
    for source, count in gained.labelled(f"{_DRAFT}nodes_grown"):
        yield TopFigure(f"  {source}", f"{count / seconds:.0f}")
    outcomes = dict(gained.labelled(f"{_DRAFT}commits"))
    commits = sum(outcomes.values())
    yield TopFigure("commits/s", f"{commits / seconds:.1f}")
    for outcome, count in outcomes.items():
        yield TopFigure(f"  {outcome}", _share(count, commits))
    yield _ms("growth p50", gained.histogram(f"{_DRAFT}growth_seconds"), 0.5)
    places = gained.total(f"{_DRAFT}burst_places")
    if places:
        yield TopFigure("bursts/s", f"{gained.total(f'{_DRAFT}bursts') / seconds:.1f}")
        yield TopFigure("burst fill", _share(gained.total(f"{_DRAFT}burst_nodes"), places))
    for name in ("declines", "messages_dropped"):
        count = gained.total(f"{_DRAFT}{name}")
        yield TopFigure(name.replace("_", " "), f"{count:.0f}", alarm=count > 0)


def _by_depth(gained: MetricsPage, family: str, rounds: float) -> TopFigure:
    """Return the share of rounds that accepted a draft token at each depth, the root's children first. As in the accept
    length, rounds without drafts count, too."""
    depths = sorted((int(labels.rpartition(",")[2]), count) for labels, count in gained.labelled(family))
    shares = [f"{100 * count / rounds:.0f}" for _, count in depths[:MAX_DEPTHS] if rounds and count]
    return TopFigure("accepted by depth, %", " ".join(shares) or "-")


def _count(name: str, value: float) -> TopFigure:
    return TopFigure(name, f"{value:.0f}")


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def _ms(name: str, histogram: Histogram, share: float) -> TopFigure:
    return TopFigure(name, f"{histogram.quantile(share) * 1e3:.2f} ms" if histogram.count else "-")


_MEANINGS = (
    ("p50, p99", "half of them, and 99 of 100, took at most this long"),
    ("accept length", "tokens that a request commits in a round, on average"),
    ("accepted by depth, %", "share of these rounds that accepted the first, second, ... draft token of a path"),
    ("answers", "being generated, of the most at once"),
    ("ttft", "time to the first token"),
    ("itl", "time between two tokens"),
    ("pages", "KV pages in use"),
    ("drafts", "healthy draft services, and drafters in verify's process"),
    ("replicas", "verify services that the gateway may send requests to"),
    ("draining", "the service takes no new requests and is about to end"),
    ("hit rate", "share of rounds with drafts that had a tree without waiting"),
    ("nodes/round", "draft tokens that a round verifies"),
    ("round", "time of a round"),
    ("gap", "time between two rounds with the device idle"),
    ("gpu", "time of a round on the GPU"),
    ("drafting", "time of drafting inside a round on the GPU"),
    ("hold", "time that rounds waited for drafts"),
    ("answer of", "a draft service: time from a commit to its nodes"),
    ("plain rounds", "share of rounds without any draft although there are drafts"),
    ("preemptions", "requests that gave up their pages and are computed again"),
    ("slow readers", "answers ended because they were left unread"),
    ("sessions", "verify services connected to a draft service"),
    ("requests", "open requests of a draft service"),
    ("live nodes", "draft tokens in all its trees; nodes/s: growth by drafter"),
    ("commits/s", "commits from verify, by what they did to the tree"),
    ("growth", "time of one slice of growing trees"),
    ("burst fill", "share of the places in bursts that were used"),
    ("declines", "requests that a draft service does not draft for"),
    ("messages dropped", "by the draft service, as invalid or too late"),
)

DEFAULT_PAGES = ("127.0.0.1:8000", "127.0.0.1:9102", "127.0.0.1:9103")
"""Pages of gateway, verify and draft."""

READ_SECONDS = 5.0


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(
        [
            "what the figures mean (rates and times cover the time between two readings):",
            *(f"  {name:<21} {text}" for name, text in _MEANINGS),
        ]
    )
    parser.add_argument(
        "pages",
        nargs="*",
        default=[],
        metavar="PAGE",
        help="Metrics pages of gateways, verify and draft services, host:port or URL. "
        f"Default: {' '.join(DEFAULT_PAGES)}, the last one if there is a draft service.",
    )
    parser.add_argument(
        "--interval", type=number(0.05, 3600), default=2.0, help="Seconds between two readings. Default: 2."
    )
    parser.add_argument("--once", action="store_true", help="Read twice, print once, and end.")
    parser.add_argument("--count", type=whole_number(1, 1 << 30), help="End after this many readings.")
    parser.add_argument(
        "--api-key-file", type=expand, help="File with the gateway's API key. Default: $OUTRIDER_API_KEY."
    )
    parser.add_argument("--connect", action=_NoConnect, help=argparse.SUPPRESS)
    add_connect_tls_options(parser, "--tls")


class _NoConnect(argparse.Action):
    """Refuses the option that names a gateway's gRPC door in other commands."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parser.error(
            "--connect: not an option of top; give pages as arguments: outrider top host:port, of a REST door or "
            "--metrics-address"
        )


class Watch:
    """Reads pages again and again, and computes figures of the time between two readings."""

    def __init__(
        self, pages: Sequence[str], token: str = "", tls: ssl.SSLContext | None = None, optional: Sequence[str] = ()
    ) -> None:
        """Pages in `optional` are left out until they have been read once."""
        self._urls = [page_url(page) for page in (*pages, *optional)]
        self._awaited = {page_url(page) for page in optional}
        self._token = token
        self._tls = tls
        self._former: dict[str, tuple[float, MetricsPage]] = {}
        self._keyed: set[str] = set()

    def read(self) -> list[PageView]:
        """Read all pages at once. A page that cannot be read becomes a view with an error."""
        with ThreadPoolExecutor(max_workers=len(self._urls)) as pool:
            views = list(zip(self._urls, pool.map(self._one, self._urls), strict=True))
        self._awaited -= {url for url, view in views if not view.error}
        return [view for url, view in views if url not in self._awaited]

    def _one(self, url: str) -> PageView:
        source = urlsplit(url).netloc
        try:
            page = self._page(url)
        except UnavailableError as error:
            self._former.pop(url, None)
            fix = f"; {KEY_FIX}" if error.code == WANTS_KEY else ""
            return PageView("unknown", source, (), error.message + fix)
        at = time.monotonic()
        before_at, before = self._former.get(url, (at, page))
        self._former[url] = at, page
        return page_view(source, page, before, at - before_at)

    def _page(self, url: str) -> MetricsPage:
        """Read a page. Only pages that ask for a key get one, since the key is the gateway's."""
        if url not in self._keyed:
            try:
                return MetricsPage.read(url, timeout=READ_SECONDS, tls=self._tls)
            except UnavailableError as error:
                if error.code != WANTS_KEY or not self._token:
                    raise
            self._keyed.add(url)
        return MetricsPage.read(url, token=self._token, timeout=READ_SECONDS, tls=self._tls)


def page_url(page: str) -> str:
    """Return the URL of a page given as host:port or URL. Raises ConfigError."""
    url = page if "://" in page else f"http://{page}"
    if not is_http_url(url):
        raise ConfigError(
            f"{page!r} is no metrics page; write host:port, or a URL that begins with http:// or https://"
        )
    parts = urlsplit(url)
    return url if parts.path not in ("", "/") else f"{parts.scheme}://{parts.netloc}/metrics"


def run(arguments: argparse.Namespace) -> int:
    """Watch until interrupted. With --once, return exit code 1 if no page could be read."""
    token = gateway_key(arguments)
    files = peer_tls(arguments, "connect")
    tls = client_context(files) if files else None
    pages, optional = arguments.pages, []
    if not pages:
        gateway, *pages, draft = DEFAULT_PAGES
        pages, optional = [f"https://{gateway}" if tls else gateway, *pages], [draft]
    watch = Watch(pages, token, tls, optional)
    console = make_console(color=not arguments.no_color)
    count = 1 if arguments.once else arguments.count
    try:
        watch.read()
        if console.is_terminal and not console.is_dumb_terminal and not arguments.once:
            return _live(console, watch, arguments.interval, count)
        return _lines(console, watch, arguments.interval, count)
    except KeyboardInterrupt:
        return 0


def _readings(watch: Watch, interval: float, count: int | None) -> Iterator[list[PageView]]:
    done = 0
    while count is None or done < count:
        time.sleep(interval)
        yield watch.read()
        done += 1


def _lines(console: Console, watch: Watch, interval: float, count: int | None) -> int:
    """Print a line for each page and reading, for a log or a pipe. Return 1 if the last reading only had errors."""
    views: list[PageView] = []
    for views in _readings(watch, interval, count):
        for view in views:
            console.print(line_of(view), soft_wrap=True)
    return 1 if all(view.error for view in views) else 0


def _live(console: Console, watch: Watch, interval: float, count: int | None) -> int:
    views: list[PageView] = []
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for views in _readings(watch, interval, count):
            live.update(_fitted(console, picture_of(views, console.width)), refresh=True)
    console.print(picture_of(views, console.width))
    return 0


def _fitted(console: Console, picture: Group) -> Group:
    """Cut the picture to the terminal's height, with a line that says so; the screen would cut silently."""
    lines = console.render_lines(picture, pad=False)
    hidden = len(lines) - (console.height - 1)
    if hidden <= 1:
        return picture
    hint = Text(f"{hidden} more lines: make the window higher or wider, or name fewer pages", "dim")
    return Group(SegmentLines(lines[: console.height - 1], new_lines=True), hint)


def line_of(view: PageView) -> str:
    """Return a view as one line."""
    at = time.strftime("%H:%M:%S")
    if view.error:
        return printable(f"{at} {view.source}: {view.error}")
    figures = "  ".join(f"{figure.name.strip()} {figure.value}" for figure in view.figures)
    return printable(f"{at} {view.kind} {view.source}  {figures}")


def picture_of(views: Sequence[PageView], width: int) -> Group:
    """Return all views side by side, as many as `width` columns hold; they are narrowed if that makes two fit."""
    half = (width - 1) // 2
    panel = min(half, PANEL_WIDTH) if half >= MIN_PANEL_WIDTH else PANEL_WIDTH
    head = Text(f"outrider top   {time.strftime('%H:%M:%S')}   Ctrl-C leaves; --help explains the figures", "dim")
    return Group(head, Columns([_panel(view, panel) for view in views], padding=(0, 1)))


def _panel(view: PageView, width: int) -> Panel:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    # Fold long lines instead of cutting them: the ends tell two drafts apart and have the deepest rates.
    table.add_column(overflow="fold")
    table.add_column(justify="right", overflow="fold")
    for figure in view.figures:
        table.add_row(printable(figure.name), Text(printable(figure.value), "bold red" if figure.alarm else ""))
    body = Text(printable(view.error), "red") if view.error else table
    style = SERVICE_STYLES.get(view.kind, "red" if view.error else "")
    return Panel(body, title=f"{view.kind} {view.source}", border_style=style, width=width)
