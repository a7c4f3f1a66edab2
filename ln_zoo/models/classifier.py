"""Training and evaluation of classifiers, whatever their network."""

from __future__ import annotations

from abc import abstractmethod

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MeanMetric

from ln_zoo.models.base import ZooModule

Batch = tuple[Tensor, Tensor]


class Classifier(ZooModule):
    """Softmax cross-entropy, Adam, metrics ``nll`` (nats per case) and ``error`` (fraction).

    A subclass defines ``forward``: inputs (N, \\*) to logits (N, K). Evaluation losses come from
    logits cast to float64, as training losses fall to the resolution of float32 (Figure 6 reaches
    1e-7). In evaluation ``{stage}_nll`` and ``{stage}_error`` are logged as metric objects, so that
    several processes give the numbers of one.

    Args:
        lr: learning rate of Adam; the other settings are torch's defaults.
    """

    def __init__(self, lr: float) -> None:
        super().__init__()
        if not lr > 0:
            raise ValueError(f"lr must be positive, got {lr!r}")
        self.lr = lr
        for stage in ("val", "test"):
            setattr(self, f"{stage}_nll", MeanMetric().set_dtype(torch.float64))
            setattr(self, f"{stage}_error", MeanMetric().set_dtype(torch.float64))

    @abstractmethod
    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (N, K) of inputs (N, \\*)."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs, labels = batch
        loss = F.cross_entropy(self(inputs), labels)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(labels))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        inputs, labels = batch
        probability, prediction = self(inputs).double().softmax(-1).max(-1)
        return {"label": labels, "prediction": prediction, "probability": probability}

    def per_case(self, batch: Batch) -> dict[str, Tensor]:
        """NLL in nats and error (0 or 1) of each case, float64 (N,)."""
        inputs, labels = batch
        logits = self(inputs).double()
        nll = F.cross_entropy(logits, labels, reduction="none")
        return {"nll": nll, "error": (logits.argmax(-1) != labels).double()}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        # On a CPU the fused form takes half the time; on a GPU it would refuse gradient clipping
        # under 16-mixed, and the default is as fast.
        fused = True if self.device.type == "cpu" else None
        return torch.optim.Adam(self.parameters(), lr=self.lr, fused=fused)

    def _evaluate(self, stage: str, batch: Batch) -> None:
        for name, values in self.per_case(batch).items():
            metric = getattr(self, f"{stage}_{name}")
            metric.update(values)
            self.log(f"{stage}_{name}", metric, prog_bar=stage == "val", batch_size=len(values))
