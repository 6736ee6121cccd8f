"""The services as real processes on a tiny model, and a client of them."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from harness import tiny_model
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer, models

from outrider.cli.cluster import Cluster
from outrider.config.verify import VerifyOptions
from outrider.rpc.channel import open_channel
from outrider.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc


def tiny_folder(folder: Path, vocab_size: int = 61) -> Path:
    """A checkpoint of harness.tiny_model, with a tokenizer of words."""
    tiny_model(folder)
    words = {f"word{number}": number for number in range(vocab_size)}
    Tokenizer(models.WordLevel(words, unk_token="word0")).save(str(folder / "tokenizer.json"))
    return folder


def tiny_options(folder: Path, **changes: object) -> VerifyOptions:
    """Options of a verify service that is exact."""
    values: dict[str, object] = {
        "model": str(folder),
        "dtype": "float32",
        "threads": 1,
        "max_total_tokens": 4096,
        "max_running_requests": 4,
        "served_model_name": "tiny",
    }
    return VerifyOptions(**values | changes)  # type: ignore[arg-type]


@dataclass
class Reply:
    """What a call gave."""

    token_ids: list[int] = field(default_factory=list)
    num_accepted: int = 0
    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""


async def generate(
    cluster: Cluster,
    prompt: Sequence[int],
    max_tokens: int,
    speculate: bool = True,
    on_token: Callable[[int], None] = lambda count: None,
) -> Reply:
    """A whole greedy answer; `on_token` is told how many tokens there are so far."""
    request = gateway_pb2.GatewayServiceGenerateRequest(
        prompt_token_ids=gateway_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParams(temperature=0.0),
        max_tokens=max_tokens,
        ignore_eos=True,
        speculation=gateway_pb2.SPECULATION_ON if speculate else gateway_pb2.SPECULATION_OFF,
    )
    reply = Reply()
    async with open_channel(cluster.gateway_address) as channel:
        try:
            async for response in gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request):
                reply.token_ids += response.token_ids
                if response.HasField("usage"):
                    reply.num_accepted = response.usage.num_accepted_tokens
                on_token(len(reply.token_ids))
        except grpc.aio.AioRpcError as error:
            reply.code, reply.details = error.code(), error.details() or ""
    return reply


async def generate_all(
    cluster: Cluster,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    speculate: bool = True,
    on_token: Callable[[int], None] = lambda count: None,
) -> list[Reply]:
    """All at once."""
    calls = (generate(cluster, prompt, max_tokens, speculate, on_token) for prompt in prompts)
    return list(await asyncio.gather(*calls))


def metric(url: str, name: str, **labels: str) -> float:
    """A figure of a metrics page, summed over whatever labels are not given; 0 if it is not there."""
    text = urllib.request.urlopen(url, timeout=10).read().decode()
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return sum(
        sample.value for sample in samples if sample.name == name and labels.items() <= dict(sample.labels).items()
    )
