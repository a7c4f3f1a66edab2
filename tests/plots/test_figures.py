"""Scales of axes."""

import pytest
from matplotlib.figure import Figure

from ln_zoo.plots.figures import set_log_scale


def labels(values: list[float]) -> list[str]:
    figure = Figure()
    axis = figure.subplots()
    axis.plot(values)
    set_log_scale(axis)
    figure.draw_without_rendering()
    return [t.get_text() for t in axis.get_yticklabels(which="both") if t.get_text()]


@pytest.mark.parametrize("values", [[3.9, 9.1], [0.021, 0.18]])
def test_less_than_a_power_of_ten_is_labelled_with_plain_numbers(values):
    assert len([float(each) for each in labels(values)]) >= 5


def test_many_powers_of_ten_stay_powers():
    assert all("10" in each for each in labels([1e-8, 1.0]))
