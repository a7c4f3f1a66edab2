"""What normalisation does to a network, measured: gradient flow through time."""

from ln_zoo.analysis.gradient_flow import (
    GradientFlow,
    draw_gradient_flow,
    expected_tanh_derivative,
    gradient_flow,
    gradient_flow_table,
    gradient_norms,
    random_sequences,
    write_gradient_flow,
)

__all__ = [
    "GradientFlow",
    "draw_gradient_flow",
    "expected_tanh_derivative",
    "gradient_flow",
    "gradient_flow_table",
    "gradient_norms",
    "random_sequences",
    "write_gradient_flow",
]
