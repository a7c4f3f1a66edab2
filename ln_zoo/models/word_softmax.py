"""Softmax over a vocabulary: full, adaptive or sampled."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn import init

SoftmaxName = Literal["full", "adaptive", "sampled"]

#: Bound of initial weights, as in the released skip-thoughts code.
_SCALE = 0.1
#: Logits per block of tokens, on GPUs and on CPUs, where they should fit the cache.
_BLOCK = (2**27, 2**22)


class FullSoftmax(nn.Module):
    """Score every word: p(w | h) proportional to exp(v_w h + b_w) (Kiros et al. 2015, eq. 8).

    ``features`` is the size D of a state, ``words`` the number V of words. Parameters: ``weight``
    (V, D), drawn from U(-0.1, 0.1); ``bias`` (V,), zeros.
    """

    def __init__(self, features: int, words: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(words, features))
        self.bias = nn.Parameter(torch.empty(words))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init.uniform_(self.weight, -_SCALE, _SCALE)
        init.zeros_(self.bias)

    def loss(self, states: Tensor, targets: Tensor) -> Tensor:
        """Training loss summed over tokens, in nats; here the negative log likelihood.

        ``states`` are (M, D), ``targets`` word indices, int64 (M,).
        """
        if torch.is_autocast_enabled(states.device.type):
            return F.cross_entropy(self._logits(states), targets, reduction="sum")
        loss: Tensor = _SummedNLL.apply(states, self.weight, self.bias, targets)
        return loss

    def nll(self, states: Tensor, targets: Tensor) -> Tensor:
        """Negative log likelihood of each token in nats, (M,); arguments as `loss`."""
        return F.cross_entropy(self._logits(states), targets, reduction="none")

    def _logits(self, states: Tensor) -> Tensor:
        return F.linear(states, self.weight, self.bias)


class _SummedNLL(torch.autograd.Function):
    """Negative log likelihood of a linear softmax, a block of tokens at a time.

    The logits of a block stay in the cache, and gradients are computed at once. The logits of all
    tokens would take 70 MB for 1,800 tokens and 10,000 words, three times.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        learns = any(ctx.needs_input_grad)
        gradients = (
            [torch.empty_like(states), torch.zeros_like(weight), torch.zeros_like(bias)]
            if learns
            else []
        )
        total = states.new_zeros(())
        block = max(1, _BLOCK[states.device.type == "cpu"] // len(weight))
        for begin in range(0, len(states), block):
            rows = slice(begin, begin + block)
            h, places = states[rows], targets[rows].unsqueeze(1)
            logits = torch.addmm(bias, h, weight.t())
            torch.log_softmax(logits, 1, out=logits)
            total -= logits.gather(1, places).sum()
            if learns:
                shares = logits.exp_()
                shares.scatter_add_(1, places, shares.new_full((), -1.0).expand_as(places))
                torch.mm(shares, weight, out=gradients[0][rows])
                gradients[1].addmm_(shares.t(), h)
                gradients[2] += shares.sum(0)
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*(a * grad for a in ctx.saved_tensors), None)


class SampledSoftmax(FullSoftmax):
    """A full softmax that in training compares each target with a sample of words.

    Words are sampled by Zipf's law from their indices, which must be in order of frequency: P(w) =
    log((w + 2) / (w + 1)) / log(V + 1). All targets of a batch share ``samples`` words, sampled
    with replacement; each logit is corrected by the log of the expected count of its word (Jean et
    al. 2015, arXiv 1412.2007; the correction of TensorFlow's ``sampled_softmax``). A target is
    excluded from its own sample. `loss` is then not a likelihood; `nll` scores every word.
    """

    def __init__(self, features: int, words: int, samples: int) -> None:
        super().__init__(features, words)
        self.samples = samples

    def loss(self, states: Tensor, targets: Tensor) -> Tensor:
        words = len(self.weight)
        # On the CPU, whose generator state checkpoints store.
        uniform = torch.rand(self.samples, dtype=torch.float64)
        drawn = (uniform * math.log(words + 1)).exp().long().sub(1).clamp(0, words - 1)
        drawn = drawn.to(targets.device)
        sampled = F.linear(states, self.weight[drawn], self.bias[drawn]) - self._expected(drawn)
        sampled = sampled.masked_fill(targets.unsqueeze(1) == drawn, -math.inf)
        true = (states * self.weight[targets]).sum(-1) + self.bias[targets]
        true = true - self._expected(targets)
        logits = torch.cat([true.unsqueeze(1), sampled], 1)
        return F.cross_entropy(logits, torch.zeros_like(targets), reduction="sum")

    def _expected(self, words: Tensor) -> Tensor:
        """Log of the expected counts of words in a sample."""
        number = words.to(self.weight.dtype)
        share = torch.log1p(1 / (number + 1)) / math.log(len(self.weight) + 1)
        return (self.samples * share).log()


class AdaptiveSoftmax(nn.AdaptiveLogSoftmaxWithLoss):
    """Score frequent words by full states, rarer clusters by projected ones (Grave et al. 2017).

    It is `torch.nn.AdaptiveLogSoftmaxWithLoss` (arXiv 1609.04309) with a bias in the head; word
    indices must be in order of frequency. Rare words have smaller vectors, so this is another
    model, with fewer parameters. ``cutoffs`` are the first indices of the rarer clusters.
    """

    def __init__(self, features: int, words: int, cutoffs: list[int]) -> None:
        super().__init__(features, words, cutoffs, head_bias=True)

    def loss(self, states: Tensor, targets: Tensor) -> Tensor:
        return self.nll(states, targets).sum()

    def nll(self, states: Tensor, targets: Tensor) -> Tensor:
        return -self(states, targets).output


WordSoftmax = FullSoftmax | AdaptiveSoftmax


def word_softmax(
    name: SoftmaxName, features: int, words: int, samples: int, cutoffs: list[int]
) -> WordSoftmax:
    """The softmax of a name; ValueError for cutoffs that do not increase within the vocabulary."""
    if name == "full":
        return FullSoftmax(features, words)
    if name == "sampled":
        return SampledSoftmax(features, words, samples)
    if (
        not cutoffs
        or sorted(set(cutoffs)) != list(cutoffs)
        or not 0 < cutoffs[0] < words > cutoffs[-1]
    ):
        raise ValueError(
            f"softmax_cutoffs must increase between 1 and {words - 1}, the last of the {words:,} "
            f"word indices, got {cutoffs}"
        )
    return AdaptiveSoftmax(features, words, cutoffs)
