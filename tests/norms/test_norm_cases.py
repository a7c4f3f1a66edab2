"""Every shipped norm, and one as a user would write it, inherits the checks that we ship.

Layer norm and batch norm meet every layer; the others meet some, recurrent ones with their cells.
"""

from dataclasses import dataclass
from typing import ClassVar

import ln_zoo.norms
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, WeightNorm
from ln_zoo.testing import NormCase


class TestLayerNorm(NormCase):
    norm = LayerNorm()


class TestLayerNormByUnit(NormCase):
    norm = LayerNorm(convolution="unit")
    layers = ("Conv2d",)


class TestLayerNormByPosition(NormCase):
    norm = LayerNorm(convolution="position")
    layers = ("Conv2d",)


class TestLayerNormPerGate(NormCase):
    norm = LayerNorm(per_gate=True)
    layers = ("LSTM", "GRU", "LSTMCell", "GRUCell")


class TestRMSNorm(NormCase):
    norm = RMSNorm()
    layers = ("Linear", "Conv2d", "LSTM", "LSTMCell")


class TestBatchNorm(NormCase):
    norm = BatchNorm(max_steps=5)


class TestUnbiasedBatchNorm(NormCase):
    norm = BatchNorm(unbiased=True, gain=0.5, max_steps=2, momentum=0.3)
    layers = ("Linear", "Conv2d", "LSTM", "LSTMCell")


class TestWeightNorm(NormCase):
    norm = WeightNorm()
    layers = ("Linear", "Conv2d", "GRU", "GRUCell")


class TestIdentity(NormCase):
    norm = Identity()
    layers = ("Linear", "Conv2d", "RNN", "RNNCell")


@dataclass(frozen=True)
class MeanOnly(Norm):
    """A user's own: each example is centred, its spread left alone; only `normalize` knows."""

    strength: float = 1.0

    invariances: ClassVar[frozenset[str] | None] = frozenset({"weight_matrix_recentering"})

    def init_params(self, site):
        site.add_affine(gain=1.0)

    def normalize(self, site, a, step=None):
        return site.affine(a - self.strength * site.mean(a))


class TestUserNorm(NormCase):
    norm = MeanOnly()
    layers = ("Linear", "Conv2d", "GRU", "GRUCell")


def test_every_shipped_norm_has_its_case():
    exported = [getattr(ln_zoo.norms, name) for name in ln_zoo.norms.__all__]
    shipped = {c for c in exported if isinstance(c, type) and issubclass(c, Norm)} - {Norm}
    assert shipped <= {type(case.norm) for case in NormCase.__subclasses__()}
