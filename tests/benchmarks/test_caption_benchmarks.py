"""The control of captions and images finds what is there; the penalty's contestants agree."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import caption_cca
from benchmarks.caption_cca import Moments, cca
from ln_zoo.data import SyntheticScenes


def test_cca_is_that_of_its_definition() -> None:
    """Without ridges: both sides white, correlations on the diagonal between them (here times
    themselves, as directions are weighted by them), the first the largest that can be had."""
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((400, 2))
    x = np.hstack([hidden, rng.standard_normal((400, 3))]) @ rng.standard_normal((5, 5))
    y = np.repeat(hidden, 2, 0) @ rng.standard_normal((2, 4)) + 0.5 * rng.standard_normal((800, 4))
    moments = Moments.of(x, y)
    maps = cca(moments, 0.0, 0.0)
    of_x, of_y = (x - x.mean(0)) @ maps.x, (y - y.mean(0)) @ maps.y
    weights = np.sqrt(np.diag(of_x.T @ of_x) / len(x))
    np.testing.assert_allclose(of_x.T @ of_x / len(x), np.diag(weights**2), atol=1e-10)
    np.testing.assert_allclose(of_y.T @ of_y / len(y), np.diag(weights**2), atol=1e-10)
    pairs = np.repeat(of_x, 2, 0).T @ of_y / len(y)
    np.testing.assert_allclose(pairs, np.diag(weights**3), atol=1e-10)
    assert sorted(weights, reverse=True) == weights.tolist()
    for _ in range(50):
        a, b = rng.standard_normal(5), rng.standard_normal(4)
        one, two = np.repeat((x - x.mean(0)) @ a, 2), (y - y.mean(0)) @ b
        assert abs(np.corrcoef(one, two)[0, 1]) <= weights[0] + 1e-12


def test_the_control_beats_guessing_on_scenes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caption_cca, "RIDGES", (0.3, 1.0))
    monkeypatch.setattr(caption_cca, "DIRECTIONS", (20, 40))
    data = SyntheticScenes(train_size=300, val_size=60, test_size=60)
    data.setup()
    chosen, tested = caption_cca.control(data)
    assert chosen["directions"] in (20, 40)
    assert tested["image_r1"] > 15
    assert tested["image_mean_rank"] < 12
