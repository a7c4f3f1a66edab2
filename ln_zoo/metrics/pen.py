"""Mixture densities of pen offsets (Graves 2013, section 4.1)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class PenMixture(NamedTuple):
    """Density of the next offset (dx, dy), a mixture of M Gaussians, and of the end of a stroke.

    Example:
        >>> mixture = PenMixture.of(torch.zeros(5, 121))
        >>> mixture.mean.shape, mixture.nll(torch.zeros(5, 3)).shape
        (torch.Size([5, 20, 2]), torch.Size([5]))
    """

    #: Log odds that the point ends its stroke, (...,); the paper's e^ has the opposite sign (eq.
    #: 18).
    end: Tensor
    log_weights: Tensor  #: log pi, (..., M), eq. 19
    mean: Tensor  #: mu, (..., M, 2), eq. 20
    log_std: Tensor  #: log sigma, (..., M, 2), eq. 21
    correlation: Tensor  #: rho^, whose tanh is the correlation rho, (..., M), eq. 22

    @classmethod
    def of(
        cls, outputs: Tensor, min_log_std: float = -7.0, max_correlation: float = 0.999
    ) -> PenMixture:
        """Create a mixture from network outputs y^ (eq. 17-22).

        Offsets are discrete, so the density would grow without bound as a Gaussian shrinks onto a
        repeated value.

        Args:
            outputs: (\\*, 1 + 6 M): log odds, then M each of weights, dx means, dy means, log
                sigmas of dx and of dy, and rho^.
            min_log_std: lower bound of log sigma.
            max_correlation: bound of abs(rho).

        Raises:
            ValueError: if the last size is not 1 + 6 M.
        """
        count, rest = divmod(outputs.shape[-1] - 1, 6)
        if rest or not count:
            raise ValueError(
                f"outputs must have 1 + 6 M features for M components, got {outputs.shape[-1]}"
            )
        end, weights, dx, dy, sx, sy, correlation = outputs.split([1] + [count] * 6, dim=-1)
        bound = math.atanh(max_correlation)
        return cls(
            end.squeeze(-1),
            weights.log_softmax(-1),
            torch.stack([dx, dy], -1),
            torch.stack([sx, sy], -1).clamp(min=min_log_std),
            correlation.clamp(-bound, bound),
        )

    def offset_nll(self, offsets: Tensor) -> Tensor:
        """Negative log density of offsets (\\*, 2), nats (eq. 23-25)."""
        return -torch.logsumexp(self.log_weights + self._component_log_density(offsets), -1)

    def nll(self, points: Tensor) -> Tensor:
        """Negative log density of points (dx, dy, end of a stroke), (\\*, 3), nats (eq. 26)."""
        lift = F.binary_cross_entropy_with_logits(self.end, points[..., 2], reduction="none")
        return self.offset_nll(points[..., :2]) + lift

    def expectation(self) -> Tensor:
        """The mean offset, (\\*, 2)."""
        return (self.log_weights.exp().unsqueeze(-1) * self.mean).sum(-2)

    def sample(self, bias: float = 0.0, generator: torch.Generator | None = None) -> Tensor:
        """Sample points (dx, dy, end), (\\*, 3), one of each mixture.

        ``bias`` is b of section 5.4, at least 0: it divides sigma by e^b and raises pi to 1 + b,
        but does not apply to the end of strokes.
        """
        mixture = self.biased(bias)
        flat = mixture.log_weights.exp().view(-1, self.log_weights.shape[-1])
        drawn = torch.multinomial(flat, 1, generator=generator).view(*self.end.shape, 1)
        pairs = drawn.unsqueeze(-1).expand(*self.end.shape, 1, 2)
        mean, std = (a.gather(-2, pairs).squeeze(-2) for a in (self.mean, mixture.log_std.exp()))
        rho = self.correlation.gather(-1, drawn).squeeze(-1).tanh()
        noise = torch.empty_like(mean).normal_(generator=generator)
        first, second = noise.unbind(-1)
        both = torch.stack([first, rho * first + (1 - rho.square()).sqrt() * second], -1)
        lift = torch.bernoulli(self.end.sigmoid(), generator=generator)
        return torch.cat([mean + std * both, lift.unsqueeze(-1)], -1)

    def biased(self, bias: float) -> PenMixture:
        """The mixture under a bias; see `sample`. ValueError if it is negative."""
        if not bias >= 0:
            raise ValueError(f"bias must be at least 0, got {bias!r}")
        weights = ((1 + bias) * self.log_weights).log_softmax(-1)
        return self._replace(log_weights=weights, log_std=self.log_std - bias)

    def _component_log_density(self, offsets: Tensor) -> Tensor:
        d = (offsets.unsqueeze(-2) - self.mean) * (-self.log_std).exp()
        dx, dy = d.unbind(-1)
        # Z / (1 - rho^2) along the principal axes, as 2 / (1 +- tanh r) = 1 + exp(-+2 r). The
        # paper's form cancels if rho is near 1.
        twice = 2 * self.correlation
        along, across = (dx + dy).square(), (dx - dy).square()
        z = (along * (1 + (-twice).exp()) + across * (1 + twice.exp())) / 4
        # log(1 - tanh^2) without cancellation.
        log_rest = 2 * math.log(2) + F.logsigmoid(twice) + F.logsigmoid(-twice)
        return -0.5 * (z + log_rest) - self.log_std.sum(-1) - math.log(2 * math.pi)
