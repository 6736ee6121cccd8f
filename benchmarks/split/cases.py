"""The cases of the split benchmark, in the form of the command line."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from outrider.config.base import parse_options
from outrider.config.draft import DraftOptions
from outrider.errors import ConfigError

SHORT_NAMES = {
    "steps": "speculative_num_steps",
    "topk": "speculative_eagle_topk",
    "nodes": "speculative_num_draft_tokens",
}
"""Draft options with a short name in cases; all others have the option's name, with - or _."""


@dataclass(frozen=True)
class SplitCase:
    """One way to answer all prompts."""

    drafter: str
    """"plain", or the algorithms as in --speculative-algorithm, joined by "+", with "@LABEL" for another model."""
    lockstep: bool = False
    colocated: bool = False
    """Whether verify drafts inside its own rounds, with the first model; a draft service drafts with the others."""
    json: bool = False
    """Whether answers are JSON of a schema."""
    batch: int = 1
    temperature: float = 0.0
    context: int = 0
    """Tokens of a prompt, which joins several questions; 0 for single questions."""
    num_tokens: int = 0
    """Tokens of an answer; 0 for --max-tokens."""
    num_prompts: int = 0
    """Number of prompts; 0 for --limit, but at least two for each place of a batch."""
    options: dict[str, str] = field(default_factory=dict)
    """Further draft options by field name."""

    @classmethod
    def parse(cls, text: str) -> SplitCase:
        """Parse a case like `standalone,lockstep,steps=4,topk=1,t=0.8,b=16`. Raises ConfigError."""
        drafter, *words = text.split(",")
        case = cls(drafter)
        for word in words:
            name, equals, value = word.partition("=")
            if not equals:
                if name not in ("lockstep", "colocated", "json"):
                    raise ConfigError(f"{text}: {name!r} is neither lockstep, colocated, json, nor name=value")
                case = replace(case, **{name: True})
            elif name == "b":
                case = replace(case, batch=int(value))
            elif name == "t":
                case = replace(case, temperature=float(value))
            elif name == "ctx":
                case = replace(case, context=int(value))
            elif name == "out":
                case = replace(case, num_tokens=int(value))
            elif name == "n":
                case = replace(case, num_prompts=int(value))
            else:
                full = SHORT_NAMES.get(name, name.replace("-", "_"))
                case = replace(case, options={**case.options, full: value})
        return case

    @property
    def drafts(self) -> bool:
        """Whether there is a draft."""
        return self.drafter != "plain"

    @property
    def parts(self) -> list[str]:
        """Each drafter, with "@LABEL" for another model than its own."""
        return self.drafter.split("+") if self.drafts else []

    @property
    def inside(self) -> str:
        """The part that verify drafts inside its rounds; empty if there is none."""
        return next((part for part in self.parts if part != "ngram"), "") if self.colocated else ""

    @property
    def outside(self) -> list[str]:
        """Parts that a draft service drafts: all but the first model if verify drafts itself."""
        return [part for part in self.parts if part != self.inside]

    @property
    def has_service(self) -> bool:
        """Whether a draft service drafts."""
        return bool(self.outside)

    @property
    def mode(self) -> str:
        """Words for the way of drafting; empty without drafts."""
        if not self.drafts:
            return ""
        words = ["colocated"] * self.colocated + ["lockstep"] * self.lockstep
        return " ".join(words) or "split"

    @property
    def load(self) -> tuple[int, float, int, int, int, bool]:
        """Key of the load: cases with the same one answer the same prompts under the same load."""
        return self.batch, self.temperature, self.context, self.num_tokens, self.num_prompts, self.json

    @property
    def target(self) -> str:
        """Key of the verify service: the same service answers all cases with the same key."""
        options = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.inside} {self.mode} {options}".strip() if self.colocated else self.mode if self.lockstep else ""

    @property
    def decoding(self) -> str:
        """How tokens are chosen."""
        return f"t{self.temperature:g}" if self.temperature else "greedy"

    def title(self, model: str, dtype: str) -> str:
        """Return the case's name in results."""
        long_names = {full: name for name, full in SHORT_NAMES.items()}
        options = [f"{long_names.get(name, name)}={value}" for name, value in self.options.items()]
        context = f"ctx{self.context // 1024}k" if self.context else ""
        length = f"out{self.num_tokens}" if self.num_tokens else ""
        prompts = f"n{self.num_prompts}" if self.num_prompts else ""
        load = [f"b{self.batch}", context, length, prompts, "json" * self.json]
        words = [model, self.drafter, self.mode, *options, *load, dtype, self.decoding]
        return " ".join(word for word in words if word)

    def verify_arguments(self, paths: dict[str, Path]) -> list[str]:
        """Return the options of this case's verify service beyond those of all cases. Raises ConfigError."""
        mode = ["--lockstep"] if self.lockstep else []
        if not self.colocated:
            return mode
        return [*mode, *self._drafters([self.inside], paths), *self._further()]

    def draft_options(self, paths: dict[str, Path], common: list[str]) -> DraftOptions:
        """Return the draft service's options; `paths` are model folders by label. Raises ConfigError."""
        argv = [*common, *self._drafters(self.outside, paths)]
        # If verify drafts inside its rounds, further options are verify's.
        argv += [] if self.colocated else self._further()
        if self.lockstep:
            argv.append("--lockstep")
        return parse_options(DraftOptions, argv)

    def _drafters(self, parts: list[str], paths: dict[str, Path]) -> list[str]:
        argv = [f"--speculative-algorithm={','.join(part.partition('@')[0].upper() for part in parts)}"]
        for part in parts:
            label = part.rpartition("@")[2]
            if part == "ngram":
                continue
            if label not in paths:
                raise ConfigError(f"{self.drafter}: give its folder with --draft {label}=PATH")
            argv.append(f"--speculative-draft-model-path={paths[label]}")
        return argv

    def _further(self) -> list[str]:
        return [f"--{name.replace('_', '-')}={value}" for name, value in self.options.items()]
