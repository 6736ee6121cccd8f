"""What `outrider top` shows of a metrics page: figures from what came between two readings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from outrider.metrics import Histogram, MetricsPage

MAX_DEPTHS = 8
_VERIFY = "outrider_verify_"
_GATEWAY = "outrider_gateway_"
_DRAFT = "outrider_draft_"


@dataclass(frozen=True)
class Figure:
    """A name and its value, ready to be shown."""

    name: str
    value: str
    alarm: bool = False
    """Worth a look."""


@dataclass(frozen=True)
class View:
    """One page."""

    kind: str
    """gateway, verify, draft, or unknown."""
    source: str
    figures: tuple[Figure, ...]
    error: str = ""


def kind_of(page: MetricsPage) -> str:
    """Whose page it is."""
    for kind, prefix in (("gateway", _GATEWAY), ("verify", _VERIFY), ("draft", _DRAFT)):
        if any(name.startswith(prefix) for name in (*page.gauges, *page.counters)):
            return kind
    return "unknown"


def view_of(source: str, now: MetricsPage, before: MetricsPage, seconds: float) -> View:
    """A page's figures, over the `seconds` between its readings."""
    kind = kind_of(now)
    make = _MAKERS.get(kind)
    if make is None:
        return View(kind, source, (), "none of our services' pages")
    return View(kind, source, tuple(make(now, now.since(before), max(seconds, 1e-6))))


def _gateway(now: MetricsPage, gained: MetricsPage, seconds: float) -> Iterator[Figure]:
    places = now.total(f"{_GATEWAY}max_answers")
    yield _count("running", now.total("vllm:num_requests_running"))
    yield _count("waiting", now.total("vllm:num_requests_waiting"))
    answers = now.total(f"{_GATEWAY}answers_in_flight")
    yield Figure("answers", f"{answers:.0f} of {places:.0f}", alarm=places > 0 and answers >= 0.9 * places)
    yield Figure("tokens/s", f"{gained.total('vllm:generation_tokens') / seconds:.1f}")
    yield Figure("requests/s", f"{gained.total('vllm:request_success') / seconds:.2f}")
    lengths = gained.histogram(f"{_GATEWAY}accept_length")
    yield Figure("accept length", f"{lengths.mean:.2f}" if lengths.count else "-")
    drafted = gained.total("vllm:spec_decode_num_drafts")
    yield _by_depth(gained, "vllm:spec_decode_num_accepted_tokens_per_pos", drafted)
    yield _ms("ttft p50", gained.histogram("vllm:time_to_first_token_seconds"), 0.5)
    yield _ms("ttft p99", gained.histogram("vllm:time_to_first_token_seconds"), 0.99)
    yield _ms("itl p50", gained.histogram("vllm:inter_token_latency_seconds"), 0.5)
    yield _ms("itl p99", gained.histogram("vllm:inter_token_latency_seconds"), 0.99)
    yield Figure("pages", f"{100 * now.total('vllm:kv_cache_usage_perc'):.0f}%")
    yield Figure("drafts", f"{now.total(f'{_GATEWAY}healthy_drafts'):.0f}")
    yield from _replicas(now)
    yield from _errors(gained, f"{_GATEWAY}errors")
    if now.total(f"{_GATEWAY}draining"):
        yield Figure("draining", "yes", alarm=True)


def _replicas(now: MetricsPage) -> Iterator[Figure]:
    states = [labels.rpartition(",")[2] for labels, value in now.labelled(f"{_GATEWAY}verify_state") if value]
    ready = sum(state == "ready" for state in states)
    yield Figure("replicas", f"{ready} of {len(states)} ready", alarm=ready < len(states))


def _verify(now: MetricsPage, gained: MetricsPage, seconds: float) -> Iterator[Figure]:
    rounds = gained.total(f"{_VERIFY}rounds")
    lengths = gained.histogram(f"{_VERIFY}accept_length")
    yield _count("running", now.total(f"{_VERIFY}running_requests"))
    yield _count("waiting", now.total(f"{_VERIFY}waiting_requests"))
    yield Figure("tokens/s", f"{gained.total(f'{_VERIFY}committed_tokens') / seconds:.1f}")
    yield Figure("rounds/s", f"{rounds / seconds:.1f}")
    # By request and round: a round of verify may hold many requests.
    yield Figure("accept length", f"{lengths.mean:.2f}" if lengths.count else "-")
    yield _by_depth(gained, f"{_VERIFY}accepted_tokens_per_position", lengths.count)
    drafted = gained.total(f"{_VERIFY}drafted_rounds")
    yield Figure("hit rate", _share(gained.total(f"{_VERIFY}hit_rounds"), drafted))
    yield Figure("nodes/round", f"{gained.histogram(f'{_VERIFY}round_draft_tokens').mean:.1f}")
    yield _ms("round p50", gained.histogram(f"{_VERIFY}round_seconds"), 0.5)
    yield _ms("gap p50", gained.histogram(f"{_VERIFY}host_gap_seconds"), 0.5)
    if gained.histogram(f"{_VERIFY}gpu_seconds").count:
        yield _ms("gpu p50", gained.histogram(f"{_VERIFY}gpu_seconds"), 0.5)
    hold = gained.total(f"{_VERIFY}hold_seconds") / rounds * 1e3 if rounds else 0.0
    yield Figure("hold", f"{hold:.2f} ms a round")
    used, pages = now.total(f"{_VERIFY}kv_pages_used"), now.total(f"{_VERIFY}kv_pages")
    yield Figure("pages", f"{used:.0f} of {pages:.0f}", alarm=pages > 0 and used > 0.95 * pages)
    healthy = now.total(f"{_VERIFY}healthy_drafts")
    known = len(list(now.labelled(f"{_VERIFY}draft_connected")))
    yield Figure("drafts", f"{healthy:.0f} of {known}", alarm=healthy < known)
    for address, answer in now.labelled(f"{_VERIFY}draft_answer_seconds"):
        yield Figure(f"answer of {_short(address)}", f"{answer * 1e3:.2f} ms")
    yield Figure("plain rounds", _share(gained.total(f"{_VERIFY}fallback_rounds"), rounds))
    for name in ("preemptions", "failed_requests", "refused_requests", "slow_readers", "declines"):
        count = gained.total(f"{_VERIFY}{name}")
        if count or name == "preemptions":
            yield Figure(name.replace("_", " "), f"{count:.0f}", alarm=count > 0)


def _draft(now: MetricsPage, gained: MetricsPage, seconds: float) -> Iterator[Figure]:
    yield _count("sessions", now.total(f"{_DRAFT}sessions"))
    yield _count("requests", now.total(f"{_DRAFT}open_requests"))
    yield _count("live nodes", now.total(f"{_DRAFT}live_nodes"))
    yield Figure("nodes/s", f"{gained.total(f'{_DRAFT}nodes_grown') / seconds:.0f}")
    for source, count in gained.labelled(f"{_DRAFT}nodes_grown"):
        yield Figure(f"  {source}", f"{count / seconds:.0f}")
    outcomes = dict(gained.labelled(f"{_DRAFT}commits"))
    commits = sum(outcomes.values())
    yield Figure("commits/s", f"{commits / seconds:.1f}")
    for outcome, count in outcomes.items():
        yield Figure(f"  {outcome}", _share(count, commits))
    yield _ms("growth p50", gained.histogram(f"{_DRAFT}growth_seconds"), 0.5)
    places = gained.total(f"{_DRAFT}burst_places")
    if places:
        yield Figure("bursts/s", f"{gained.total(f'{_DRAFT}bursts') / seconds:.1f}")
        yield Figure("burst fill", _share(gained.total(f"{_DRAFT}burst_nodes"), places))
    for name in ("declines", "messages_dropped"):
        count = gained.total(f"{_DRAFT}{name}")
        yield Figure(name.replace("_", " "), f"{count:.0f}", alarm=count > 0)


def _by_depth(gained: MetricsPage, family: str, rounds: float) -> Figure:
    """Share of rounds that accepted a draft token at each depth, the root's children first."""
    depths = sorted((int(labels.rpartition(",")[2]), count) for labels, count in gained.labelled(family))
    shares = [f"{100 * count / rounds:.0f}" for _, count in depths[:MAX_DEPTHS] if rounds and count]
    return Figure("accepted by depth, %", " ".join(shares) or "-")


def _errors(gained: MetricsPage, family: str) -> Iterator[Figure]:
    found = {labels: count for labels, count in gained.labelled(family) if count}
    yield Figure("errors", f"{sum(found.values()):.0f}", alarm=bool(found))
    for labels, count in sorted(found.items()):
        yield Figure(f"  {labels.replace(',', ' ')}", f"{count:.0f}", alarm=True)


def _count(name: str, value: float) -> Figure:
    return Figure(name, f"{value:.0f}")


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def _ms(name: str, histogram: Histogram, share: float) -> Figure:
    return Figure(name, f"{histogram.quantile(share) * 1e3:.2f} ms" if histogram.count else "-")


def _short(address: str) -> str:
    return address.rpartition("/")[2]


_MAKERS: dict[str, Callable[[MetricsPage, MetricsPage, float], Iterator[Figure]]] = {
    "gateway": _gateway,
    "verify": _verify,
    "draft": _draft,
}
