"""Fisher information of normalised generalised linear models (Ba et al. 2016, section 5.2).

For a layer of H units with outputs y from an exponential family: exact, in closed forms (corrected
and as printed), from sampled outputs, and from the KL divergence. Expectations over the data are
means over examples. Equation numbers: arXiv 1607.06450; from 13 on, its supplement.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Literal, get_args

import torch
from torch import Tensor, distributions
from torch.nn import functional as F

from ln_zoo.utils.checks import check_at_least, check_choice

Family = Literal["gaussian", "bernoulli", "categorical"]
Normalization = Literal["none", "bn", "wn", "ln"]

#: Numbers of sampled outputs in memory at a time.
_CHUNK = 1_000_000


@dataclasses.dataclass(frozen=True, eq=False)
class GLM:
    """A generalised linear model of H units, normalised or not, with its data.

    Summed inputs a = W x are normalised to z = (a - mu) / sigma and give the natural parameters
    s = g * z + b of the outputs, log P(y | x) = (s y - eta(s)) / phi + c(y, phi) (eq. 10), with

    * ``"none"``: z = a, and no gain;
    * ``"bn"``: mu and sigma mean and standard deviation of each a_i over all examples;
    * ``"wn"``: mu = 0, sigma_i = |w_i|;
    * ``"ln"``: mu and sigma mean and standard deviation of a over the units of each example.

    Args:
        inputs: x of all examples, (N, D). All tensors have one dtype, ideally float64.
        weight: W with rows w_i, (H, D).
        bias: b, (H,).
        gain: g, (H,); ``None`` for ``norm="none"`` only.
        family: ``"gaussian"``: H independent outputs of variance phi; ``"bernoulli"``: H
            independent outputs 0 or 1; ``"categorical"``: a softmax over H classes, one-hot.
        norm: the normalisation.
        dispersion: phi, positive; 1 for families other than ``"gaussian"``.
        eps: added to the variances of ``"bn"`` and ``"ln"``. The closed forms hold for any eps,
            invariance to the scale of weights and data only for 0.

    Raises:
        RuntimeError: of torch, unless sizes fit and tensors have one dtype.
        ValueError: for a sigma of 0.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.0, 1.0]])
        >>> model = GLM(x, torch.eye(2), torch.zeros(2), torch.ones(2), norm="ln")
        >>> model.natural_parameters()
        tensor([[-1.,  1.],
                [ 1., -1.],
                [-1.,  1.]])
    """

    inputs: Tensor
    weight: Tensor
    bias: Tensor
    gain: Tensor | None = None
    family: Family = "gaussian"
    norm: Normalization = "none"
    dispersion: float = 1.0
    eps: float = 0.0

    def __post_init__(self) -> None:
        check_choice("family", self.family, get_args(Family))
        check_choice("norm", self.norm, get_args(Normalization))
        if (self.gain is None) != (self.norm == "none"):
            given = "none" if self.gain is None else "one"
            wanted = "none" if self.norm == "none" else "a gain (H,)"
            raise ValueError(f"norm={self.norm!r} takes {wanted}, got {given}")
        check_dispersion(self.family, self.dispersion)
        takes_eps = self.norm in ("bn", "ln")
        if not 0 <= self.eps < math.inf or (self.eps and not takes_eps):
            wanted = "0 or more, and finite" if takes_eps else f"0 for norm={self.norm!r}"
            raise ValueError(f"eps must be {wanted}, got {self.eps}")
        with torch.no_grad():
            self.natural_parameters()  # raises if sizes or dtypes do not fit
        self._check_sigma()

    def _check_sigma(self) -> None:
        if self.norm == "none" or self.eps:
            return
        with torch.no_grad():
            a, sigma = self.sums().abs(), self.statistics()[1]
            rounding = 8 * torch.finfo(a.dtype).eps
            if self.norm == "wn":
                zero, what = sigma[0] == 0, "weight vectors of 0, of unit(s)"
            elif self.norm == "bn":
                zero = sigma[0] <= rounding * a.amax(0)
                what = "one summed input for all examples, in unit(s)"
            else:
                zero = sigma[:, 0] <= rounding * a.amax(1)
                what = "one summed input for all units, in example(s)"
            places = [str(place) for place in zero.nonzero().flatten().tolist()]
        if places:
            shown = ", ".join(places[:8]) + (", ..." if len(places) > 8 else "")
            eps = "" if self.norm == "wn" else ", or an eps above 0"
            raise ValueError(
                f"norm={self.norm!r} divides by sigma, which must not be 0, got {what} {shown}: "
                f"give other weights or inputs{eps}"
            )

    @property
    def units(self) -> int:
        return self.weight.shape[0]

    @property
    def features(self) -> int:
        return self.weight.shape[1]

    # Parameters

    def parameters(self) -> Tensor:
        """All parameters, (P,): [w_i, b_i, g_i] stacked over units, P = H (D + 2).

        Without normalisation there are no gains: [w_i, b_i], P = H (D + 1).
        """
        parts = [self.weight, self.bias[:, None]]
        if self.gain is not None:
            parts.append(self.gain[:, None])
        return torch.cat(parts, dim=1).flatten()

    def with_parameters(self, theta: Tensor) -> GLM:
        """The model with other parameters (P,), in the order of `parameters`."""
        expected = self.units * (self.features + (1 if self.gain is None else 2))
        _check_vector(self, theta, expected, "parameters")
        rows = theta.view(self.units, -1)
        gain = None if self.gain is None else rows[:, self.features + 1]
        weight, bias = rows[:, : self.features], rows[:, self.features]
        # Without __post_init__, whose checks fail inside torch.func transforms.
        moved = copy.copy(self)
        for name, value in (("weight", weight), ("bias", bias), ("gain", gain)):
            object.__setattr__(moved, name, value)
        return moved

    # From inputs to outputs

    def sums(self) -> Tensor:
        """Summed inputs a, (N, H)."""
        return self.inputs @ self.weight.T

    def statistics(self) -> tuple[Tensor, Tensor]:
        """mu and sigma of each summed input, (N, H) both (expanded)."""
        a = self.sums()
        mu, sigma = torch.zeros_like(a), torch.ones_like(a)
        if self.norm == "wn":
            sigma = torch.linalg.vector_norm(self.weight, dim=1).expand_as(a)
        elif self.norm in ("bn", "ln"):
            axis = 0 if self.norm == "bn" else 1
            mu = a.mean(axis, keepdim=True).expand_as(a)
            variance = (a - mu).square().mean(axis, keepdim=True)
            sigma = (variance + self.eps).sqrt().expand_as(a)
        return mu, sigma

    def normalized(self) -> Tensor:
        """z, (N, H)."""
        mu, sigma = self.statistics()
        return (self.sums() - mu) / sigma

    def natural_parameters(self) -> Tensor:
        """s, (N, H)."""
        z = self.normalized()
        return (z if self.gain is None else self.gain * z) + self.bias

    def _natural(self, theta: Tensor) -> Tensor:
        return self.with_parameters(theta).natural_parameters()

    def distribution(self) -> distributions.Distribution:
        """P(y | x) of all examples: N distributions of outputs (H,)."""
        return _distribution(self, self.natural_parameters())

    def sample(self, draws: int = 1, seed: int = 0) -> Tensor:
        """Samples of P(y | x), (draws, N, H)."""
        return _sample(self, self.natural_parameters(), draws, _generator(self, seed))

    def covariance(self) -> Tensor:
        """C = Cov[y | x] of each example (eq. 11), (N, H, H)."""
        s = self.natural_parameters()
        if self.family == "gaussian":
            return torch.diag_embed(torch.full_like(s, self.dispersion))
        if self.family == "bernoulli":
            p = s.sigmoid()
            return torch.diag_embed(p * (1 - p))
        p = s.softmax(dim=1)
        return torch.diag_embed(p) - p[:, :, None] * p[:, None, :]


def check_dispersion(family: Family, dispersion: float) -> None:
    """Raise ValueError unless phi is positive and finite, and 1 if not ``"gaussian"``."""
    if not 0 < dispersion < math.inf or (family != "gaussian" and dispersion != 1):
        wanted = "positive, and finite" if family == "gaussian" else f"1 for {family}"
        raise ValueError(f"dispersion must be {wanted}, got {dispersion}")


def _sizes(*tensors: Tensor) -> str:
    return " and ".join(str(tuple(tensor.shape)) for tensor in tensors)


def _check_vector(model: GLM, vector: Tensor, size: int, what: str) -> None:
    if vector.shape != (size,):
        raise ValueError(f"{what} must be ({size},), got {_sizes(vector)}")
    if vector.dtype != model.weight.dtype:
        raise TypeError(f"{what} must be {model.weight.dtype}, got {vector.dtype}")


def _distribution(model: GLM, s: Tensor, validate: bool = False) -> distributions.Distribution:
    # Validation fails inside torch.func transforms.
    if model.family == "categorical":
        return distributions.OneHotCategorical(logits=s, validate_args=validate)
    each: distributions.Distribution
    if model.family == "gaussian":
        each = distributions.Normal(s, model.dispersion**0.5, validate_args=validate)
    else:
        each = distributions.Bernoulli(logits=s, validate_args=validate)
    return distributions.Independent(each, 1, validate_args=validate)


def _generator(model: GLM, seed: int) -> torch.Generator:
    # Another stream than the data of the same seed, whose numbers would correlate with outputs.
    return torch.Generator(model.weight.device).manual_seed(seed ^ 0x5DEECE66)


def _sample(model: GLM, s: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    # `torch.distributions` takes no generator.
    if model.family == "categorical":
        classes = s.softmax(1).multinomial(draws, replacement=True, generator=generator)
        return F.one_hot(classes.T, model.units).to(s)
    s = s.expand(draws, *s.shape)
    if model.family == "bernoulli":
        return torch.bernoulli(s.sigmoid(), generator=generator)
    noise = torch.randn(s.shape, generator=generator, dtype=s.dtype, device=s.device)
    return s + model.dispersion**0.5 * noise


def random_glm(
    family: Family = "gaussian",
    norm: Normalization = "none",
    units: int = 4,
    features: int = 5,
    examples: int = 200,
    seed: int = 0,
    dispersion: float = 1.0,
) -> GLM:
    """A model with random parameters and data, float64; other arguments as in `GLM`.

    Inputs are normal with variance 1 and a random mean (normal, variance 1/4), weights normal with
    variance 1 / D, biases with variance 1/4, gains uniform in [1/2, 3/2]. Models with the same seed
    and sizes (H ``units``, D ``features``, N ``examples``) have equal inputs, weights and biases.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    inputs = normal(examples, features) + 0.5 * normal(features)
    weight, bias = normal(units, features) / features**0.5, 0.5 * normal(units)
    gain = 0.5 + torch.rand(units, generator=generator, dtype=torch.float64)
    return GLM(inputs, weight, bias, None if norm == "none" else gain, family, norm, dispersion)


# The Fisher information matrix


def exact_fisher(model: GLM) -> Tensor:
    """F = E_x[J^T C J] / phi^2, (P, P), with the Jacobian J of s by all parameters (eq. 9).

    Automatic differentiation, batch norm's statistics included; the Jacobian has N H P elements.

    Example:
        >>> exact_fisher(random_glm("categorical", "bn")).shape
        torch.Size([28, 28])
    """
    return _pulled_back(model, model.covariance() / model.dispersion**2)


def monte_carlo_fisher(model: GLM, draws: int, seed: int = 0) -> Tensor:
    """Mean of score score^T over ``draws`` outputs of the model for each example (eq. 9), (P, P).

    It tends to F with an error of order 1 / sqrt(N draws).
    """
    check_at_least(1, draws=draws)
    s = model.natural_parameters()
    moments = torch.zeros(*s.shape, model.units, dtype=s.dtype, device=s.device)
    generator = _generator(model, seed)
    chunk = max(1, _CHUNK // s.numel())
    for first in range(0, draws, chunk):
        scores = _scores(model, s, _sample(model, s, min(chunk, draws - first), generator))
        moments += torch.einsum("mni,mnj->nij", scores, scores)
    return _pulled_back(model, moments / draws)


def empirical_fisher(model: GLM, targets: Tensor) -> Tensor:
    """Mean of score score^T over given labels, (P, P).

    This is not the Fisher information, an expectation over the model's own outputs: they agree only
    for labels distributed as the model predicts, in the limit of many examples.

    ``targets`` are outputs, (N, H): 0 or 1 for ``"bernoulli"``; one-hot, or class indices (N,) from
    0 to H - 1, for ``"categorical"``.

    Raises:
        RuntimeError: of torch, for class indices that are not integers from 0 to H - 1.
        ValueError: of torch, if values do not fit the family.
    """
    s = model.natural_parameters()
    if model.family == "categorical" and targets.dim() == 1:
        classes = targets.to(torch.promote_types(targets.dtype, torch.int64))
        targets = F.one_hot(classes, model.units)
    targets = targets.to(s)
    _distribution(model, s, validate=True).log_prob(targets)  # raises for other values
    scores = _scores(model, s, targets)
    return _pulled_back(model, scores[:, :, None] * scores[:, None, :])


def _scores(model: GLM, s: Tensor, y: Tensor) -> Tensor:
    """Gradients of log P(y | s) by s, for outputs y (\\*, N, H)."""
    s = s.detach().expand_as(y).requires_grad_()
    with torch.enable_grad():
        likelihood = _distribution(model, s).log_prob(y).sum()
    return torch.autograd.grad(likelihood, s)[0]


def _pulled_back(model: GLM, moments: Tensor) -> Tensor:
    """E_x[J^T M J] for second moments M (N, H, H) of the score by s."""
    jacobian = torch.func.jacfwd(model._natural)(model.parameters().detach())
    product = (moments @ jacobian).flatten(0, 1)
    return jacobian.flatten(0, 1).T @ product / len(model.inputs)


def closed_form_fisher(model: GLM, paper_form: bool = False) -> Tensor:
    """F by the formulas of the paper (eq. 12 to 14), without automatic differentiation, (P, P).

    F_ij = E_x[C_ij / phi^2 r_i r_j^T], r_i = [g_i / sigma_i chi_i, 1, z_i], with

    * no norm: r_i = [x, 1];
    * weight norm: chi_i = x - (u_i x) u_i, u_i = w_i / |w_i|;
    * batch norm: chi_i = x - m - z_i S w_i / sigma_i, with mean m and covariance S of the inputs;
    * layer norm, as printed: chi_i = (1 - 1/H - z_i^2 / H) x. This is only the term of the unit
      itself: mu and sigma are shared, so s_k depends on every w_i, ds_k / dw_i = g_k / sigma Q_ki x
      with Q = I - (1 1^T + z z^T) / H. Correct is, with G = diag(g), F_wiwj = E[(Q G C G Q)_ij /
      (phi sigma)^2 x x^T], F_wibj = E[(Q G C)_ij / (phi^2 sigma) x] and F_wigj = E[(Q G C)_ij z_j /
      (phi^2 sigma) x].

    ``paper_form`` uses eq. 13 and 14 as printed for layer norm.
    """
    covariance = model.covariance() / model.dispersion**2
    examples, size = len(model.inputs), model.parameters().numel()
    if model.norm == "ln" and not paper_form:
        blocks = _layer_norm_blocks(model, covariance)
    else:
        rows = _own_rows(model)
        blocks = torch.einsum("nij,nip,njq->ipjq", covariance, rows, rows)
    return blocks.reshape(size, size) / examples


def _own_rows(model: GLM) -> Tensor:
    """r_i = ds_i / d[w_i, b_i, g_i] of eq. 13 and 14, (N, H, D + 2) or (N, H, D + 1)."""
    x = model.inputs
    (_, sigma), z = model.statistics(), model.normalized()
    one = torch.ones_like(z)[:, :, None]
    chi = x[:, None, :].expand(-1, model.units, -1)
    if model.gain is None:
        return torch.cat([chi, one], dim=2)
    if model.norm == "wn":
        direction = model.weight / torch.linalg.vector_norm(model.weight, dim=1, keepdim=True)
        chi = chi - (x @ direction.T)[:, :, None] * direction
    elif model.norm == "bn":
        centred = x - x.mean(0)
        slope = model.weight @ (centred.T @ centred) / len(x)
        chi = centred[:, None, :] - (z / sigma)[:, :, None] * slope
    else:
        chi = (1 - (1 + z.square()) / model.units)[:, :, None] * chi
    return torch.cat([(model.gain / sigma)[:, :, None] * chi, one, z[:, :, None]], dim=2)


def _layer_norm_blocks(model: GLM, covariance: Tensor) -> Tensor:
    """Sums over examples, (H, D + 2, H, D + 2)."""
    assert model.gain is not None
    x, z = model.inputs, model.normalized()
    sigma = model.statistics()[1][:, :1, None]
    outer = z[:, :, None] * z[:, None, :]
    eye = torch.eye(model.units, dtype=z.dtype, device=z.device)
    q = eye - (1 + outer) / model.units
    qgc = (q * model.gain) @ covariance / sigma
    qgcgq = (qgc * model.gain) @ q / sigma
    units, features = model.units, model.features
    blocks = z.new_empty(units, features + 2, units, features + 2)
    w, b, g = slice(features), features, features + 1
    blocks[:, w, :, w] = torch.einsum("nij,nc,nd->icjd", qgcgq, x, x)
    blocks[:, w, :, b] = torch.einsum("nij,nc->icj", qgc, x)
    blocks[:, w, :, g] = torch.einsum("nij,nj,nc->icj", qgc, z, x)
    blocks[:, b, :, b] = covariance.sum(0)
    blocks[:, b, :, g] = (covariance * z[:, None, :]).sum(0)
    blocks[:, g, :, g] = (covariance * outer).sum(0)
    blocks[:, b, :, w] = blocks[:, w, :, b].permute(2, 0, 1)
    blocks[:, g, :, w] = blocks[:, w, :, g].permute(2, 0, 1)
    blocks[:, g, :, b] = blocks[:, b, :, g].T
    return blocks


# The direction of the gains


def gain_block(model: GLM, paper_form: bool = False) -> Tensor:
    """The metric of a step of the gains, (H, H): ds^2 = 1/2 dg^T (gain block) dg (eq. 32 to 35).

    The block of the gains in F, E_x[C * z z^T] / phi^2, elementwise. Without normalisation, the
    step changes the norms of the weight vectors, dw_i = dg_i w_i / |w_i| (see `gain_step`), and
    z_i = a_i / |w_i| as with weight norm.

    ``paper_form`` uses eq. 32 (batch norm) as printed: E_x[C] / phi^2, without z z^T. Eq. 33 (layer
    norm) and 34 (weight norm) are correct as printed, and so is each term (i, j) of eq. 35, which
    lacks the sum over i and j.
    """
    covariance = model.covariance() / model.dispersion**2
    z = model.normalized()
    if model.gain is None:
        z = z / torch.linalg.vector_norm(model.weight, dim=1)
    if paper_form and model.norm == "bn":
        return covariance.mean(0)
    return torch.einsum("nij,ni,nj->ij", covariance, z, z) / len(z)


def gain_step(model: GLM, step: Tensor) -> Tensor:
    """Embed a step of the gains (H,) in a step of all parameters (P,).

    Without normalisation: dw_i = dg_i w_i / |w_i| (eq. 35).
    """
    _check_vector(model, step, model.units, "a step of the gains")
    rows = torch.zeros_like(model.parameters()).view(model.units, -1)
    if model.gain is None:
        norms = torch.linalg.vector_norm(model.weight, dim=1)
        rows[:, : model.features] = (step / norms)[:, None] * model.weight
    else:
        rows[:, -1] = step
    return rows.flatten()


# Null directions


def invariant_directions(model: GLM) -> Tensor:
    """Orthonormal directions of the parameters that normalisation cancels, (P, K), as columns.

    Batch and weight norm: each w_i along itself, K = H. Layer norm: W along itself, and a vector
    added to all rows, K = D + 1. Without normalisation K = 0. With eps = 0, outputs are constant
    along them, so the gradient of any loss is orthogonal to them.
    """
    weight, units, features = model.weight, model.units, model.features
    steps: list[Tensor] = []
    if model.norm in ("bn", "wn"):
        unit = torch.eye(units, dtype=weight.dtype, device=weight.device)
        steps = [unit[i, :, None] * weight for i in range(units)]
    elif model.norm == "ln":
        axes = torch.eye(features, dtype=weight.dtype, device=weight.device)
        steps = [weight, *(axis.expand_as(weight) for axis in axes)]
    rows = weight.new_zeros(len(steps), units, model.parameters().numel() // units)
    for row, step in zip(rows, steps, strict=True):
        row[:, :features] = step
    return torch.linalg.qr(rows.flatten(1).T).Q


def null_space_basis(fisher: Tensor, rtol: float = 1e-12) -> Tensor:
    """Orthonormal basis of the null space of a Fisher information matrix, (P, K).

    Besides `invariant_directions`, it contains directions of the family (a softmax is invariant to
    a constant added to all logits) and of the data (fewer examples than parameters). ``fisher``
    (P, P) is positive semidefinite; eigenvalues up to ``rtol`` times the largest count as 0.
    """
    values, vectors = torch.linalg.eigh(fisher)
    return vectors[:, values <= rtol * values[-1]]


# Distances between distributions


def kl_divergence(model: GLM, step: Tensor) -> Tensor:
    """KL[P_theta || P_theta+step], mean over examples (eq. 8), in nats; a scalar.

    ``step`` is a step of all parameters, (P,), from theta.
    """
    theta = model.parameters()
    _check_vector(model, step, len(theta), "a step of all parameters")
    moved = model.with_parameters(theta + step)
    return distributions.kl_divergence(model.distribution(), moved.distribution()).mean()


def squared_distance(model: GLM, step: Tensor) -> Tensor:
    """ds^2 = 1/2 step^T F step, second order of `kl_divergence` (eq. 8), in nats; a scalar.

    Uses the derivative of s along the step, not F, so it suits large models.
    """
    theta = model.parameters()
    _check_vector(model, step, len(theta), "a step of all parameters")
    change = torch.func.jvp(model._natural, (theta,), (step,))[1]
    squares = torch.einsum("ni,nij,nj->n", change, model.covariance(), change)
    return squares.mean() / (2 * model.dispersion**2)
