"""Headless Chromium before the real services: float32, so that texts with and without speculation must be equal."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.cluster import Cluster
from outrider.config.gateway import GatewayOptions
from outrider.config.verify import VerifyOptions

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SIZES = {"desktop": {"width": 1440, "height": 900}, "phone": {"width": 390, "height": 844}}


@pytest.fixture(scope="session")
def chromium_path() -> str:
    path = next((found for found in map(shutil.which, NAMES) if found), None)
    if path is None:
        pytest.skip("there is no Chromium here; on Debian: apt-get install chromium")
    return path


@pytest.fixture(scope="module")
def chromium(chromium_path: str) -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs pip install -r requirements-browser.txt")
    # Chromium's sandbox does not work for root, and the page under test is ours.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def cluster(model_path: Path, chromium: Any) -> Iterator[Cluster]:
    verify = VerifyOptions(model=str(model_path), dtype="float32", max_total_tokens=8192)
    with Cluster(verify=verify) as running:
        yield running


@pytest.fixture(scope="module")
def locked(cluster: Cluster) -> Iterator[Cluster]:
    """A second gateway before the same verify service, which asks for a key."""
    options = GatewayOptions(api_key="k3y-for-pages", verify=(cluster.address("verify"),))
    with Cluster(gateway=options, services=["gateway"]) as running:
        yield running


class Visit:
    """A browser's window at the gateway's root, and what it did and complained of."""

    def __init__(self, browser: Any, url: str, size: str, scheme: str, **options: Any) -> None:
        phone = {"has_touch": True, "is_mobile": True} if size == "phone" else {}
        self.context = browser.new_context(viewport=SIZES[size], color_scheme=scheme, **phone, **options)
        self.context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.context.set_default_timeout(60_000)
        self.page = self.context.new_page()
        # Waits by these and not by wait_for_function: the page's policy refuses code made of text, to tests as well.
        self.expect = pytest.importorskip("playwright.sync_api").expect
        self.expect.set_options(timeout=60_000)
        self.url = url
        self.complaints: list[str] = []
        self.requests: list[Any] = []
        self.page.on("console", lambda entry: self._note(entry.type in ("error", "warning"), entry.text))
        self.page.on("pageerror", lambda error: self._note(True, str(error)))
        self.page.on("request", lambda request: self.requests.append(request))

    def _note(self, bad: bool, text: str) -> None:
        if bad:
            self.complaints.append(text)

    def open(self) -> Visit:
        self.page.goto(self.url)
        self.expect(self.page.locator("#model")).not_to_have_text("connecting")
        return self

    def set(self, **fields: Any) -> None:
        """Fills fields of the settings, by their ids with underscores."""
        self.page.evaluate("document.getElementById('settings').open = true")
        for name, value in fields.items():
            self.page.fill(f"#{name.replace('_', '-')}", str(value))

    def ask(self, question: str) -> None:
        self.page.fill("#question", question)
        self.page.press("#question", "Enter")

    def begin_long(self) -> None:
        """Asks for an answer that goes on, and waits for its first token."""
        self.set(max_tokens=1500)
        self.ask("Write a very long story about the sea.")
        self.page.wait_for_selector("article:last-of-type .text .token")

    def until_done(self) -> None:
        self.page.wait_for_selector("#stop:disabled", state="attached")

    def texts(self) -> list[str]:
        """Of the last turn's answers."""
        return list(self.page.locator("article:last-of-type .answer .text").all_text_contents())

    def written(self) -> str:
        """The last turn's first answer as it was written: what its button copies."""
        button = self.page.get_by_role("button", name="Copy this answer")
        button.last.click() if len(self.texts()) == 1 else button.nth(-2).click()
        return str(self.page.evaluate("navigator.clipboard.readText()"))

    def asked(self) -> list[dict[str, Any]]:
        """Bodies of the requests for answers."""
        return [request.post_data_json for request in self.requests if request.url.endswith("/v1/chat/completions")]

    def check(self) -> None:
        """Nothing was complained of, and nothing left the origin."""
        assert self.complaints == []
        assert self.requests and all(request.url.startswith(self.url) for request in self.requests)


@pytest.fixture
def visit(chromium: Any, cluster: Cluster) -> Iterator[Callable[..., Visit]]:
    """Opens a window; when the test ends, every one must have been quiet unless told otherwise."""
    visits: list[tuple[Visit, bool]] = []

    def open_visit(
        size: str = "desktop", scheme: str = "light", url: str = "", quiet: bool = True, **options: Any
    ) -> Any:
        made = Visit(chromium, f"{url or cluster.rest_url}/", size, scheme, **options)
        visits.append((made, quiet))
        return made.open()

    yield open_visit
    for made, quiet in visits:
        made.context.close()
        if quiet:
            made.check()
