"""Which class runs which architecture. Classes are imported only when a model is loaded."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.models.base import CausalLM

# One decoder serves the whole family: its members differ in biases, norms and rotary scaling, which ModelConfig states.
ARCHITECTURES = {
    "LlamaForCausalLM": "outrider.models.llama:LlamaFamily",
    "Qwen2ForCausalLM": "outrider.models.llama:LlamaFamily",
    "Qwen3ForCausalLM": "outrider.models.llama:LlamaFamily",
    "MiMoForCausalLM": "outrider.models.llama:LlamaFamily",
}


def model_class(architecture: str) -> type[CausalLM]:
    """The class for a supported architecture. Raises KeyError for another; ModelConfig refuses those before."""
    module, name = ARCHITECTURES[architecture].split(":")
    found: type[CausalLM] = getattr(import_module(module), name)
    return found
