"""Products of a step in functions of torch."""

from __future__ import annotations

from torch import Tensor

from ln_zoo.kernels.generated.trace import Product


def by_blocks(product: Product, a: Tensor) -> Tensor:
    """Rows as (gates, blocks, rows, units); one gate for a left operand."""
    units = product.inner // product.blocks
    return a.view(len(a), -1, product.blocks, units).permute(1, 2, 0, 3)


def rows_of(product: Product, weight: Tensor) -> Tensor:
    """Rows of the weight of a product; in blocks (gates, blocks, units, units)."""
    if product.blocks == 1:
        return weight[product.first : product.first + product.width]
    units = product.inner // product.blocks
    by_gates = weight.view(product.blocks, -1, units, units).transpose(0, 1)
    return by_gates[slice(*product.gates)]


def add_weight_gradient(product: Product, weight: Tensor, d: Tensor, left: Tensor) -> None:
    """Add to the gradient of a weight, from that of a product and its left operands."""
    to = rows_of(product, weight)
    if product.blocks == 1:
        to.addmm_(d.t(), left)
        return
    of_left = by_blocks(product, left)[0]
    for gate, own in zip(to, by_blocks(product, d), strict=True):
        gate.baddbmm_(own.mT, of_left)
