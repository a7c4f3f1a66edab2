"""Define your own norm: a frozen dataclass with two methods, for every layer and model.

    python examples/own_norm.py
    ln-zoo fit --config configs/quickstart.yaml --model.norm own_norm.PNorm   # in this folder

It divides by the p-th root of the mean of |a|^p, with a gain: RMSNorm for p = 2, and more robust to
a few large units for p = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ln_zoo import LSTM
from ln_zoo.data import Digits
from ln_zoo.models import MLPClassifier
from ln_zoo.norms import Norm, Site


@dataclass(frozen=True)
class PNorm(Norm):
    """Division by ``mean(|a|^p)^(1/p)``.

    Args:
        p: the power, at least 1.
        gain: initial gain.
        eps: added to the mean.

    Raises:
        ValueError: for a power below 1.
    """

    p: float = 1.0
    gain: float = 1.0
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if not self.p >= 1:
            raise ValueError(f"p must be at least 1, got {self.p}")

    def init_params(self, site: Site) -> None:
        site.add_affine(gain=self.gain)

    def normalize(self, site: Site, a: Tensor, step: int | None = None) -> Tensor:
        size = (site.mean(a.abs() ** self.p) + self.eps) ** (1 / self.p)
        return site.affine(a / size)


def main(updates: int = 120) -> dict[str, float]:
    """Train a classifier, and return its error."""
    torch.manual_seed(0)
    data = Digits(batch_size=64)
    data.setup()
    model = MLPClassifier(64, [64, 64], norm=PNorm())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    done = 0
    while done < updates:
        for images, labels in data.train_dataloader():
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
    model.eval()
    tests = [(model(images).argmax(-1) != labels) for images, labels in data.test_dataloader()]
    error = torch.cat(tests).double().mean().item()
    print(f"{model.hparams['norm']}: {100 * error:.1f} % of {len(torch.cat(tests))} images wrong")
    output, _ = LSTM(3, 5, norm=PNorm(p=1.5))(torch.randn(7, 2, 3))
    print(f"in an LSTM: {tuple(output.shape)}")
    return {"error": error}


if __name__ == "__main__":
    main()
