"""Training and evaluation shared by all classifiers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F

from ln_zoo.models.base import ZooModule, fused_on_cpu
from ln_zoo.models.ratios import add_ratios
from ln_zoo.norms import batch_dependent, batch_statistics
from ln_zoo.utils.checks import check_choice, check_positive

Batch = tuple[Any, Tensor]

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    # 0.9, not torch's 0.99, is the decay that publications mean by RMSProp.
    "rmsprop": partial(torch.optim.RMSprop, alpha=0.9),
}


class Classifier(ZooModule):
    r"""Softmax cross-entropy, and the metrics in `metrics`; ``nll`` is in nats per example.

    A subclass defines ``forward``: inputs (N, \*), or a tuple of such, to logits (N, K).
    Classifiers of the zoo also have ``forward_features``, ``backbone`` and ``head``: the features
    (N, F) that the last layer reads, the layers below it, and that layer. `ln_zoo.load` with
    ``num_classes`` draws a new head, and Lightning's ``BackboneFinetuning`` freezes the backbone.
    The optimizer omits parameters that are frozen when training starts.

    Evaluation losses come from float64 logits, since training losses reach the resolution of
    float32 (1e-7 in Figure 6). Under batch norm, validation also logs ``val_batch_nll`` etc.,
    measured with batch statistics in place of running averages and without batches of one example;
    if all batches have one (``eval_batch_size`` 1), a warning is issued instead.

    Args:
        lr: learning rate.
        optimizer: ``"adam"``, ``"sgd"`` (momentum 0.9) or ``"rmsprop"`` (squared gradients decay by
            0.9); other settings are torch's defaults.
    """

    input_kinds = ("labelled images",)
    pipeline_tag = "image-classification"
    #: Metrics of each example: ``nll`` in nats, and ``error`` or ``accuracy``, 0 or 1.
    metrics: ClassVar[tuple[str, ...]] = ("nll", "error")

    @classmethod
    def card_example(cls, preprocessing: Mapping[str, Any]) -> str:
        shape = ", ".join(map(str, preprocessing.get("image_shape", ())))
        return (
            f"images = torch.rand(2, {shape})  # yours go here: uint8, PIL, or floats from 0 to 1\n"
            "with torch.no_grad():\n"
            "    probabilities = model(model.card.preprocess(images)).softmax(-1)\n"
            "print(probabilities.argmax(-1))  # a class for each image\n"
        )

    def __init__(self, lr: float, optimizer: str = "adam") -> None:
        super().__init__()
        check_positive(lr=lr)
        check_choice("optimizer", optimizer, _OPTIMIZERS)
        self.lr = lr
        self.optimizer = optimizer
        for stage in ("val", "test"):
            add_ratios(self, stage, self.metrics)
        self._batch_dependent = False

    @abstractmethod
    def forward(self, inputs: Any) -> Tensor:
        r"""Logits (N, K) of inputs, tensors (N, \*) or a tuple of them.

        Images are floats from 0 to 1; ``model.card.preprocess`` of a published model converts PIL
        images, uint8 arrays and others.
        """

    def setup(self, stage: str) -> None:
        # In `__init__` the layers do not exist yet.
        if batch_dependent(self) and not self._batch_dependent:
            add_ratios(self, "val_batch", self.metrics)
            self._batch_dependent = True

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs, labels = batch
        loss = F.cross_entropy(self(inputs), labels)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(labels))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch)
        if self._batch_dependent and len(batch[1]) > 1:
            with batch_statistics(self):
                self._update("val_batch", batch)

    def on_validation_epoch_end(self) -> None:
        if not self._batch_dependent:
            return
        metrics = {f"val_batch_{name}": getattr(self, f"val_batch_{name}") for name in self.metrics}
        measured = any(metric.update_called for metric in metrics.values())
        # A process with only small batches must take part in the exchange.
        found = torch.tensor(int(measured), device=self.device)
        if self.trainer.strategy.reduce(found, reduce_op="max"):
            self.log_dict(metrics)
        else:
            rank_zero_warn(
                "no validation batch has 2 examples, so there are no batch statistics and "
                "val_batch_* are not measured: raise eval_batch_size (--data.eval_batch_size)"
            )

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        inputs, labels = batch
        probability, prediction = self(inputs).double().softmax(-1).max(-1)
        return {"label": labels, "prediction": prediction, "probability": probability}

    def per_example(self, batch: Batch) -> dict[str, Tensor]:
        """The `metrics` of each example, float64 (N,)."""
        inputs, labels = batch
        logits = self(inputs).double()
        right = (logits.argmax(-1) == labels).double()
        nll = F.cross_entropy(logits, labels, reduction="none")
        values = {"nll": nll, "error": 1 - right, "accuracy": right}
        return {name: values[name] for name in self.metrics}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        # RMSprop has no fused form.
        options = {} if self.optimizer == "rmsprop" else fused_on_cpu(self)
        # Frozen parameters may join later, in their own group.
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return _OPTIMIZERS[self.optimizer](trained, lr=self.lr, **options)

    def _evaluate(self, stage: str, batch: Batch) -> None:
        self._update(stage, batch)
        for name in self.metrics:
            metric = getattr(self, f"{stage}_{name}")
            self.log(f"{stage}_{name}", metric, prog_bar=stage == "val", batch_size=len(batch[1]))

    def _update(self, stage: str, batch: Batch) -> None:
        for name, values in self.per_example(batch).items():
            getattr(self, f"{stage}_{name}").update(values, torch.ones_like(values))


class SequentialClassifier(Classifier):
    """A classifier whose ``network`` is an `nn.Sequential`; its last layer is the head."""

    network: nn.Sequential

    @property
    def head(self) -> nn.Module:
        return self.network[-1]

    @property
    def backbone(self) -> nn.Module:
        return self.network[:-1]

    @abstractmethod
    def check(self, inputs: Tensor) -> Tensor:
        """The inputs as the network reads them; ValueError if they have another size."""

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.network(self.check(inputs))
        return logits

    def forward_features(self, inputs: Tensor) -> Tensor:
        r"""Activations (N, F) of the last hidden layer for inputs (N, \*).

        Example:
            >>> from ln_zoo.models import MLPClassifier
            >>> model, images = MLPClassifier(64, [32]), torch.rand(5, 1, 8, 8)
            >>> features = model.forward_features(images)
            >>> features.shape, torch.equal(model.head(features), model(images))
            (torch.Size([5, 32]), True)
        """
        features: Tensor = self.backbone(self.check(inputs))
        return features
