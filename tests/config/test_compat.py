"""Options of SGLang's speculative decoding: taken over, accepted with a warning, or refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outrider.config.base import describe_options, parse_options
from outrider.config.compat import FOREIGN
from outrider.config.draft import DraftOptions
from outrider.config.gateway import GatewayOptions
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs" / "speculative-options.md"


def draft(*argv: str) -> DraftOptions:
    return parse_options(DraftOptions, argv, prog="draft", env={})


def verify(*argv: str) -> VerifyOptions:
    return parse_options(VerifyOptions, argv, prog="verify", env={})


def test_a_command_line_for_another_engine_configures_the_draft(capsys: pytest.CaptureFixture[str]) -> None:
    options = draft(
        "--speculative-algorithm=STANDALONE", "--speculative-draft-model", "some/draft", "--speculative-num-steps", "4",
        "--speculative-eagle-topk=2", "--speculative-num-draft-tokens", "7", "--speculative-attention-mode", "decode",
        "--enable-torch-compile", "--speculative-draft-attention-backend=triton", "--speculative-ngram-capacity=5000",
    )  # fmt: skip
    assert options == DraftOptions(
        speculative_algorithm=("STANDALONE",),
        speculative_draft_model_path="some/draft",
        speculative_num_steps=4,
        speculative_eagle_topk=2,
        speculative_num_draft_tokens=7,
        capacity=5000,
    )
    warnings = capsys.readouterr().err.splitlines()
    assert warnings == [
        "draft: warning: --speculative-attention-mode decode has no effect: one kernel serves prompts and trees alike",
        "draft: warning: --enable-torch-compile has no effect: rounds and draft steps are CUDA graphs of our kernels",
        "draft: warning: --speculative-draft-attention-backend triton has no effect: "
        "a draft's attention is ours on a GPU and torch's on a CPU",
    ]


def test_verify_takes_what_is_verify_s() -> None:
    options = verify("--speculative-accept-threshold-acc=0.5", "--speculative-num-draft-tokens", "16")
    assert options == VerifyOptions(accept_threshold_acc=0.5, max_draft_tokens=16)
    assert verify("--speculative-draft-attention-backend=triton") == VerifyOptions()


def test_names_of_ours_may_have_underscores_as_well() -> None:
    options = verify("--max_total_tokens", "2000", "--context_length=100", "--speculative-num_draft_tokens", "16")
    assert options == VerifyOptions(max_total_tokens=2000, context_length=100, max_draft_tokens=16)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--speculative-draft-model-quantization fp8", "outrider quantize"),
        ("--speculative-draft-load-format=pt", "outrider convert"),
        ("--speculative-moe-runner-backend triton", "mixture-of-experts"),
        ("--speculative-dflash-block-size=8", "its own block_size"),
        ("--enable-dp-attention", "one replica"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(words: str, reason: str) -> None:
    flag = re.split("[ =]", words)[0]
    with pytest.raises(ConfigError, match=f"^{flag}.*: .*{reason}"):
        draft(*words.split())


@pytest.mark.parametrize("value", ["unquant", "none"])
def test_a_value_that_says_what_is_so_anyway_is_a_warning(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert draft("--speculative-draft-model-quantization", value) == DraftOptions()
    assert "has no effect" in capsys.readouterr().err


def test_a_switch_does_not_swallow_the_next_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert draft("--speculative-adaptive", "--capacity", "9000").capacity == 9000
    assert draft("--speculative-attention-mode", "--capacity=9000").capacity == 9000
    assert capsys.readouterr().err.count("warning") == 2


def test_the_words_of_other_engines_start_the_target() -> None:
    argv = "--model-path X --max-model-len 4096 --gpu_memory_utilization=0.5 --max-num-seqs 9 --enforce-eager -tp 1"
    assert verify(*argv.split(), "--no-enable-prefix-caching") == VerifyOptions(
        model="X",
        context_length=4096,
        mem_fraction_static=0.5,
        max_running_requests=9,
        disable_cuda_graph=True,
        disable_radix_cache=True,
    )


@pytest.mark.parametrize("words", ["--pp-size 2", "--dp-size=2", "--data_parallel_size 4"])
def test_what_needs_more_than_a_replica_is_answered_with_what_to_do(words: str) -> None:
    with pytest.raises(ConfigError, match=r"start several behind one gateway, each with --device cuda:N"):
        verify(*words.split())


def test_host_and_port_are_answered_with_the_address_options_of_the_command() -> None:
    with pytest.raises(ConfigError, match=r"^--host 0.0.0.0: .*use --address HOST:PORT for gRPC$"):
        verify("--host", "0.0.0.0")
    with pytest.raises(ConfigError, match=r"^--port 80: .*use --rest-address HOST:PORT for HTTP, --address HOST:PORT"):
        parse_options(GatewayOptions, ["--port=80"], prog="gateway", env={})


def test_every_renamed_option_has_ours() -> None:
    ours = {row.flag for kind in (DraftOptions, VerifyOptions, GatewayOptions) for row in describe_options(kind)}
    for entry in FOREIGN:
        assert bool(entry.renamed) + bool(entry.moot or entry.refused) == 1, entry.flag
        assert not entry.renamed or ours & set(entry.renamed), entry.flag
        assert entry.flag not in ours or entry.flag == "--speculative-num-draft-tokens"


def test_the_table_of_the_docs_is_this_one() -> None:
    """Every option is a row there, under the verdict that parsing gives."""
    rows = dict(re.findall(r"^\| `(--?[\w*-]+)[^|]*\| (supported|accepted|refused)", DOCS.read_text(), re.MULTILINE))
    for entry in FOREIGN:
        verdict = "supported" if entry.renamed else "accepted" if entry.moot else "refused"
        assert rows.get(entry.flag) == verdict, entry.flag
    ours = [row.flag for row in describe_options(DraftOptions) if row.flag.startswith("--speculative-")]
    assert all(rows.get(flag) == "supported" for flag in ours)
