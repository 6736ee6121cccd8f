"""All cases of `chaos.py`, in the order in which they run: those of one world follow each other."""

from __future__ import annotations

from functools import partial

from chaos_cases import (
    Case,
    aired,
    corrupted,
    disconnected,
    disguised,
    drained,
    flapping,
    full_disk,
    killed,
    misused,
    restarted,
    stopped,
    weathered,
)
from chaos_clients import unread, vanishing
from chaos_link import Air
from chaos_proxy import Weather

LATE_AIR = Air(delay=0.05, jitter=0.02, loss=0.03)
LATE_WEATHER = Weather(delay=0.05, jitter=0.02, loss=0.03)
PLAIN_SPEED = "Tokens come at plain speed meanwhile."
UNNOTICED = "Nothing but a change of speed."

CASES: dict[str, Case] = {
    "draft_killed": Case(
        "SIGKILL of the draft", "plain", partial(killed, name="draft"), f"{PLAIN_SPEED} No stream ends or waits."
    ),
    "draft_stopped": Case(
        "SIGSTOP and SIGCONT of the draft",
        "plain",
        partial(stopped, name="draft"),
        "The same; verify gives the session up after two seconds without an answer.",
    ),
    "draft_restarted": Case(
        "restart of the draft",
        "plain",
        partial(restarted, name="draft"),
        "The same; the draft serves what it has open before it ends.",
        lasts=0.0,
    ),
    "draft_flapping": Case("draft killed whenever it is back", "plain", flapping, f"{PLAIN_SPEED}"),
    "client_vanishes": Case(
        "clients that reset their connection in mid-stream",
        "plain",
        partial(misused, client=lambda world, seed: vanishing(world.cluster.rest_url, seed), count=3),
        "Others share the machine with answers that are cancelled as soon as their client is gone.",
    ),
    "client_slow": Case(
        "clients that do not read",
        "plain",
        partial(misused, client=lambda world, seed: unread(world.cluster.rest_url), count=3),
        "Others share the machine with them, and do not wait for them.",
    ),
    "verify_killed": Case(
        "SIGKILL of verify",
        "plain",
        partial(killed, name="verify"),
        "Streams end with UNAVAILABLE; new requests get UNAVAILABLE or 503 with Retry-After until verify is back.",
        lasts=0.25,
        may_fail=True,
        may_refuse=True,
    ),
    "gateway_drained": Case(
        "SIGTERM of the gateway",
        "plain",
        drained,
        "Streams finish; new requests get UNAVAILABLE or 503 with Retry-After until a gateway is there.",
        lasts=0.25,
        may_refuse=True,
    ),
    "messages_lost": Case("a third of its messages lost", "relayed", partial(corrupted, kind="lost"), UNNOTICED),
    "messages_truncated": Case(
        "half of its messages cut short", "relayed", partial(corrupted, kind="truncated"), UNNOTICED
    ),
    "messages_duplicated": Case(
        "all messages two to four times", "relayed", partial(corrupted, kind="duplicated"), UNNOTICED
    ),
    "messages_reordered": Case("messages in any order", "relayed", partial(corrupted, kind="reordered"), UNNOTICED),
    "messages_stale": Case("old messages among the new ones", "relayed", partial(corrupted, kind="stale"), UNNOTICED),
    "messages_flipped": Case("bits of every message flipped", "relayed", partial(corrupted, kind="flipped"), UNNOTICED),
    "messages_garbage": Case(
        "noise, and trees of nonsense for real requests", "relayed", partial(corrupted, kind="garbage"), UNNOTICED
    ),
    "messages_hostile": Case("all of these at random", "relayed", partial(corrupted, kind="hostile"), UNNOTICED),
    "tokens_foreign": Case(
        "a drafter that guesses in another tokenizer's ids",
        "relayed",
        partial(corrupted, kind="foreign"),
        "Nothing is accepted, and soon nothing is verified.",
    ),
    "tokenizer_wrong": Case(
        "a drafter that says it has another tokenizer",
        "relayed",
        partial(disguised, tokenizer_hash="0" * 64),
        f"{PLAIN_SPEED} Verify's log names both values; it asks again every 2 seconds.",
    ),
    "vocabulary_wrong": Case(
        "a drafter of a vocabulary of 97 tokens",
        "relayed",
        partial(disguised, vocab_size=97),
        f"{PLAIN_SPEED} What is guessed past the smaller vocabulary is dropped.",
    ),
    "network_late": Case("50 to 70 ms and 3 % loss each way", "linked", partial(aired, air=LATE_AIR), UNNOTICED),
    "network_parted": Case("no packet passes", "linked", partial(aired, air=Air(loss=1.0)), PLAIN_SPEED),
    "proxy_late": Case(
        "the same delay and loss by a proxy", "proxied", partial(weathered, weather=LATE_WEATHER), UNNOTICED
    ),
    "proxy_thin": Case("8 KB/s", "proxied", partial(weathered, weather=Weather(rate=8192)), UNNOTICED),
    "proxy_cut": Case(
        "connections that end in mid-frame", "proxied", partial(weathered, weather=Weather(cut=0.02)), UNNOTICED
    ),
    "proxy_reset": Case("connections reset about every 0.7 s", "proxied", disconnected, UNNOTICED),
    "logs_full": Case(
        "a full disk below the logs of all services", "logged", full_disk, "Nothing; lines are missing from the logs."
    ),
}
