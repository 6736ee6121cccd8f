"""The target's features from the verify service's process to a drafter, over both streams."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from cuda_harness import VOCAB, small_model
from draft_door import serve_door
from draft_fakes import ScriptedDrafter
from feature_draft import random_projection, true_features
from tokenizers import Tokenizer, models

from outrider.config.draft import DraftOptions
from outrider.config.verify import VerifyOptions
from outrider.drafting.base import Needs
from outrider.drafting.tree_growth import Tree
from outrider.protocol.speculation import Features
from outrider.rpc.channel import open_channel
from outrider.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from verify_service.main import serve

LAYERS = (0, 3, 1)


class NotingDrafter(ScriptedDrafter):
    """Keeps texts and features of all requests, and guesses nothing of use."""

    needs = Needs(hidden_size=64, feature_layers=LAYERS, max_positions=100)

    def __init__(self) -> None:
        super().__init__(lambda node: {(node.token + 1) % VOCAB: 0.6})
        self.texts: dict[int, list[int]] = {}
        self.rows: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)

    def open(self, tree: Tree) -> None:
        super().open(tree)
        self.texts[tree.handle] = list(tree.author.tokens)

    def commit(self, request: int, tokens: Sequence[int], root: int, live: Collection[int]) -> None:
        super().commit(request, tokens, root, live)
        self.texts[request] += tokens

    def take_features(self, request: int, features: Features) -> None:
        data = torch.frombuffer(bytearray(features.data), dtype=getattr(torch, features.dtype))
        for place, row in enumerate(data.view(features.count, -1)):
            self.rows[request][features.start + place] = row


async def generate(stub: verify_pb2_grpc.VerifyServiceStub, prompt: list[int], max_tokens: int) -> list[int]:
    request = verify_pb2.VerifyServiceGenerateRequest(
        request_id="test",
        prompt_token_ids=prompt,
        sampling=common_pb2.SamplingParams(temperature=0.0),
        max_tokens=max_tokens,
        ignore_eos=True,
    )
    return [token async for message in stub.Generate(request) for token in message.token_ids]


class OfferingDrafter(NotingDrafter):
    """Offers a projection."""

    projection = random_projection(LAYERS, 64, 64)
    needs = Needs(hidden_size=64, feature_layers=LAYERS, max_positions=100, projection=projection)

    def take_features(self, request: int, features: Features) -> None:
        assert features.projected
        super().take_features(request, features)


async def test_drafters_get_the_features_of_what_verify_commits_raw_and_projected(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = small_model(folder)
    words = {f"word{number}": number for number in range(VOCAB)}
    Tokenizer(models.WordLevel(words, unk_token="word0")).save(str(folder / "tokenizer.json"))
    drafters = NotingDrafter(), OfferingDrafter()
    async with AsyncExitStack() as stack:
        for number, drafter in enumerate(drafters):
            await stack.enter_async_context(serve_door(tmp_path / f"d{number}", drafter, DraftOptions()))
        options = VerifyOptions(
            model=str(folder),
            dtype="float32",
            threads=1,
            max_total_tokens=1024,
            metrics_address="",
            address=f"unix:{tmp_path}/v",
            draft=tuple(f"unix:{tmp_path}/d{number}" for number in range(2)),
        )
        stop = asyncio.Event()
        verify = asyncio.create_task(serve(options, stop))
        channel = open_channel(options.address)
        try:
            stub = verify_pb2_grpc.VerifyServiceStub(channel)
            await stub.GetInfo(verify_pb2.VerifyServiceGetInfoRequest(), wait_for_ready=True, timeout=60)

            async def ask(prompts: Sequence[list[int]], max_tokens: int) -> None:
                """All at once: each draft gets half of them."""
                answers = await asyncio.gather(*[generate(stub, prompt, max_tokens) for prompt in prompts])
                assert {len(answer) for answer in answers} == {max_tokens}

            # Until all streams are open, requests are decoded plainly.
            for _ in range(500):
                if all(drafter.texts for drafter in drafters):
                    break
                await ask([[1, 2, 3]] * 2, 4)
            prompts = [list(range(number, number + 30)) for number in (1, 1, 9, 20)]
            known = {tuple(prompt) for prompt in prompts}
            # On a busy machine verify may do without a draft that answers late.
            for _ in range(10):
                await ask(prompts, 40)
                if all(len(complete(drafter, known)) >= 2 for drafter in drafters):
                    break
            await ask([list(range(30))] * 2, 100)
        finally:
            await channel.close()
            stop.set()
            assert await verify == 0
    for drafter in drafters:
        check(drafter, model)
        assert len(complete(drafter, known)) >= 2


def complete(drafter: NotingDrafter, prompts: set[tuple[int, ...]]) -> list[int]:
    """Requests with these prompts whose features came, but for what was under way when they ended."""
    served = [handle for handle, text in list(drafter.texts.items()) if tuple(text[:30]) in prompts]
    return [handle for handle in served if len(drafter.rows.get(handle, ())) > 60]


def check(drafter: NotingDrafter, model: Any) -> None:
    """What arrived is right, and without gaps."""
    for handle, rows in drafter.rows.items():
        text = drafter.texts[handle]
        assert sorted(rows) == list(range(len(rows))), "a position is missing"
        text = text[: len(rows)]
        expected = true_features(model, text, LAYERS)[: len(rows)]
        if isinstance(drafter, OfferingDrafter):
            matrix = torch.frombuffer(bytearray(drafter.projection.data), dtype=torch.float32).view(64, -1)
            expected = expected @ matrix.T
        found = torch.stack([rows[position] for position in range(len(text))])
        assert ((found - expected[: len(found)]).norm(dim=1) / expected.norm(dim=1)).max() < 1e-4
        assert len(drafter.texts[handle]) <= 100, "a request went past the drafter's longest sequence"
