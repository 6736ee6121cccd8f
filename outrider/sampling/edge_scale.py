"""How far a draft model's word is taken: from its logits and the shared noise to edge scores."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.sampling.noise import DEFAULT_TAU

# Lower temperatures above 0 count as this, so that what `columns` gives keeps clear of the kernels' own bound.
_MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class EdgeScale:
    """Edge scores are log softmax(log_q * logit + noise * T * G), at temperature 0 log softmax(log_q * logit).

    The target takes the largest logit / T + G. A drafter's logits are off by as much at any temperature, so those over
    T are off by 1/T as much, and the noise of a low temperature says little. Where there is none, the chance that a
    token is the target's likeliest is not the chance that it is drawn: a drafter that would draw its first token with
    0.65 is right in 0.85 of such places. Both factors are above 0.

    Attributes:
        log_q: above `noise` for models that learned from the target's own distributions: theirs are means over what
            they do not see, flatter than any of them.
        noise: together with `log_q`, how far off the logits are: at temperature 1 both are 1 / tau if their errors are
            Gumbel variates of scale tau.
    """

    log_q: float = 1 / DEFAULT_TAU
    noise: float = 1 / DEFAULT_TAU

    def columns(self, temperature: float, rank_by_noise: bool) -> tuple[float, float, bool]:
        """(divisor, tau, whether noise is added): ranks are (logit / divisor + G) / tau, or logit / divisor without it.

        Without `rank_by_noise` logits are divided by the temperature alone.
        """
        if not temperature > 0:
            return 1 / self.log_q, 1.0, False
        temperature = max(temperature, _MIN_TEMPERATURE)
        if not rank_by_noise:
            return temperature, 1.0, False
        spread = self.noise * temperature
        return spread / self.log_q, 1 / spread, True


PLAIN_SCALE = EdgeScale()
# Fitted for the EAGLE-3 head of SmolLM2-135M-Instruct on text of prompts that nothing is measured on
# (benchmarks/notes/training.md); little else comes of depths up to 8 and of temperatures from 0.5 to 1.
HEAD_SCALE = EdgeScale(log_q=1.26, noise=1.05)
