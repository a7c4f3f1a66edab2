"""Pictures of runs, measurements and outputs of models.

Functions return a `matplotlib.figure.Figure`, or write the file ``picture``. Invalid input raises
ValueError.
"""

from ln_zoo.plots.activity import plot_activities, plot_activity
from ln_zoo.plots.analyses import plot_dynamics, plot_eps_effect, plot_gradient_flow
from ln_zoo.plots.attention import Attended, plot_attention
from ln_zoo.plots.curves import plot_curves
from ln_zoo.plots.draw import (
    Windows,
    plot_divergence,
    plot_filmstrip,
    plot_grid,
    plot_nearest,
    plot_pairs,
    save_animation,
)
from ln_zoo.plots.pen import page, sheet
from ln_zoo.plots.pen_maps import plot_density, plot_window
from ln_zoo.plots.retrieval import Found, plot_retrieval
from ln_zoo.plots.weight_geometry import plot_weight_geometry

__all__ = [
    "Attended",
    "Found",
    "Windows",
    "page",
    "plot_activities",
    "plot_activity",
    "plot_attention",
    "plot_curves",
    "plot_density",
    "plot_divergence",
    "plot_dynamics",
    "plot_eps_effect",
    "plot_filmstrip",
    "plot_gradient_flow",
    "plot_grid",
    "plot_nearest",
    "plot_pairs",
    "plot_retrieval",
    "plot_weight_geometry",
    "plot_window",
    "save_animation",
    "sheet",
]
