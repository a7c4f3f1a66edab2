"""Configurations and tables are found by name, in any folder; a user's file goes before ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from ln_zoo.utils.package_data import config_names, find_config, root_with

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["mlp/paper", "mlp/paper.yaml", "configs/mlp/paper.yaml"])
def test_our_configurations_by_name(in_tmp: Path, name: str) -> None:
    found = find_config(name)
    assert found is not None
    assert found.samefile(ROOT / "configs/mlp/paper.yaml")
    mine = in_tmp / "configs" / "mlp" / "paper.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("model: {}\n")
    assert find_config(name).samefile(mine)


@pytest.mark.parametrize(
    "text", ["none", "mlp", "../ln_zoo/configs/quickstart", "{a: 1}", "a" * 5000, "a\0b", ""]
)
def test_what_is_no_configuration(in_tmp: Path, text: str) -> None:
    assert find_config(text) is None


def test_tables_of_results(in_tmp: Path) -> None:
    assert root_with("docs/figures") == ROOT
    Path("docs/figures").mkdir(parents=True)
    assert root_with("docs/figures") == in_tmp


def test_names_for_suggestions() -> None:
    assert {"quickstart", "mlp/paper", "norms/layer"} <= set(config_names())
