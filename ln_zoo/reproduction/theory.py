"""The paper's statements of theory, computed exactly: one case a row of ``theory.csv``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch

from ln_zoo.analysis import (
    closed_form_fisher,
    exact_fisher,
    invariance_table,
    random_glm,
    random_inputs,
)
from ln_zoo.layers import Linear
from ln_zoo.norms import INVARIANCES, BatchNorm, LayerNorm, Norm, WeightNorm
from ln_zoo.reproduction.fisher_claims import study_fisher
from ln_zoo.utils.tables import write_csv

#: Claim, case, the paper's value, ours, and whether they agree.
Case = tuple[str, str, str, str, bool]
_COLUMNS = ("claim", "case", "claimed", "measured", "agrees")
_EXACT = 1e-12
_NORMS: tuple[Norm, ...] = (BatchNorm(), WeightNorm(), LayerNorm())
#: Table 1 of the paper, in the order of `INVARIANCES`.
_TABLE_1 = {
    "BatchNorm": (True, False, True, True, True, False),
    "WeightNorm": (True, False, True, False, False, False),
    "LayerNorm": (True, True, False, True, False, True),
}


def cases() -> list[dict[str, str]]:
    """Compute all cases, in seconds, as rows of the table."""
    found = [*_invariance(), *_reparameterisation(), *_metric(), *_study()]
    rows = ([*words, "yes" if agrees else "no"] for *words, agrees in found)
    return [dict(zip(_COLUMNS, row, strict=True)) for row in rows]


def write_theory(path: Path) -> None:
    """Compute all cases and write them as CSV."""
    write_csv(path, _COLUMNS, [list(row.values()) for row in cases()])


def _invariance() -> Iterator[Case]:
    for row in invariance_table(_NORMS, eps=0.0).rows:
        if row.frozen:
            continue
        for name, claimed in zip(INVARIANCES, _TABLE_1[row.norm], strict=True):
            cell = row.cells[name]
            agrees = cell.verdict == ("yes" if claimed else "no")
            words = "invariant" if claimed else "not invariant"
            yield "invariance", f"{row.norm}, {name}", words, f"{cell.exact:.2g}", agrees
            if row.norm == "LayerNorm" and name in ("example_rescaling", "dataset_recentering"):
                case = "scaling" if name == "example_rescaling" else "shifting"
                yield "feature-shift", case, "invariant", f"{cell.exact:.2g}", cell.verdict == "yes"


def _reparameterisation() -> Iterator[Case]:
    """Relative distance of a layer's outputs from those of the best plain layer."""
    for norm, affine in zip(_NORMS, (True, True, False), strict=True):
        torch.manual_seed(0)
        layer, inputs = Linear(8, 6, norm=norm, dtype=torch.float64), random_inputs()
        layer(inputs)
        outputs = layer.eval()(inputs).detach()
        extended = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], 1)
        fitted = extended @ torch.linalg.lstsq(extended, outputs).solution
        missed = float((outputs - fitted).abs().max() / (outputs - outputs.mean(0)).abs().max())
        claimed = "a plain layer" if affine else "no plain layer"
        agrees = missed < _EXACT if affine else missed > 0.1
        yield "reparameterisation", type(norm).__name__, claimed, f"{missed:.2g}", agrees


def _metric() -> Iterator[Case]:
    """Relative error of eq. 13 as printed; Bernoulli outputs, 4 units, 5 inputs, 200 examples."""
    for norm in ("bn", "wn", "ln"):
        model = random_glm("bernoulli", norm, 4, 5, 200, 0)
        exact = exact_fisher(model)
        error = float((closed_form_fisher(model, paper_form=True) - exact).norm() / exact.norm())
        yield "printed-metric", norm.upper(), "F", f"{error:.2g} off", error < _EXACT


def _study() -> Iterator[Case]:
    measured = {check.claim: check.measured for check in study_fisher().checks}

    def by_norm(claim: str) -> list[tuple[str, float]]:
        found = re.findall(r"([A-Z]+) ([\d.e+-]+)", measured[claim])
        return [(norm, float(value)) for norm, value in found]

    for norm, value in by_norm("SGD step, W doubled: tangent of its turn"):
        yield "weight-growth", norm, "below 1", f"{value:g}", value < 1
    for claim, case in (
        ("W doubled: curvature F_ww (the paper: 1/2)", "all weights doubled"),
        ("w_i doubled: F_wiwj, w_j as it was", "one of two vectors doubled"),
    ):
        for norm, value in by_norm(claim):
            yield "curvature-half", f"{norm}, {case}", "0.5", f"{value:g}", abs(value - 0.5) < 1e-9
    for family in ("bernoulli", "categorical"):
        claim = f"BN as printed: relative error of the gain block, {family}, 16 models"
        yield "gain-error", f"{family} outputs", "eq. 32", f"{measured[claim]} off", False
    error = measured["the same for independent Gaussian outputs"]
    yield "gain-error", "gaussian outputs", "eq. 32", f"{error} off", float(error) < _EXACT
    grown = {
        norm: float(measured[f"{norm}: gain block, inputs times 3"])
        for norm in ("BN", "LN", "none")
    }
    for norm in ("BN", "LN"):
        claimed = f"less than {grown['none']:g}"
        yield "gain-scale", norm, claimed, f"{grown[norm]:g}", grown[norm] < grown["none"]
