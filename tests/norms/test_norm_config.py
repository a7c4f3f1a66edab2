"""Norms as plain data, and what a norm is: a frozen value that can be shared."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from refusals import refuses

import ln_zoo.norms
from ln_zoo.norms import BatchNorm, LayerNorm, Norm, RMSNorm, from_config, to_config

EXPORTED = [getattr(ln_zoo.norms, name) for name in ln_zoo.norms.__all__]
SHIPPED = [
    *(c() for c in EXPORTED if isinstance(c, type) and issubclass(c, Norm) and c is not Norm),
    LayerNorm(gain=0.3, eps=1e-3, convolution="unit", per_gate=True),
    RMSNorm(eps=0.0),
    BatchNorm(unbiased=True, max_steps=3, momentum=1.0, recurrent_gain=0.2),
]


@dataclass(frozen=True)
class UserNorm(Norm):
    power: float = 2.0


class NoDataclass(Norm):
    pass


@pytest.mark.parametrize("norm", SHIPPED, ids=repr)
def test_shipped_norms_go_by_their_public_path_and_every_argument(norm):
    config = to_config(norm)
    assert config["class_path"] == f"ln_zoo.norms.{type(norm).__name__}"
    assert list(config["init_args"]) == [f.name for f in dataclasses.fields(norm)]


def test_arguments_left_out_take_their_defaults():
    # As written before ``sync`` existed.
    stored = {"class_path": "ln_zoo.norms.BatchNorm", "init_args": {"gain": 1.0, "max_steps": 9}}
    assert from_config(stored) == BatchNorm(max_steps=9, sync=False)
    assert from_config({"class_path": "ln_zoo.norms.LayerNorm", "init_args": {}}) == LayerNorm()


def test_the_base_is_no_dataclass():
    """jsonargparse takes subclasses by name of a plain class only."""
    assert not dataclasses.is_dataclass(Norm)


def test_a_norm_without_known_arguments_cannot_be_stored():
    refuses("NoDataclass", to_config, NoDataclass(), error=TypeError)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"class_path": "ln_zoo.norms.LayerNrom"}, "'ln_zoo.norms.LayerNrom'"),
        ({"class_path": "no_such_package.MyNorm"}, "no_such_package"),
        ({"class_path": "LayerNorm"}, "'LayerNorm'"),
        ({"class_path": ""}, "cannot be imported"),
        ({"class_path": "torch.nn.LayerNorm"}, "'torch.nn.LayerNorm' .*Norm"),
        ({"class_path": "ln_zoo.norms.to_config"}, r"to_config.*ln_zoo\.norms\.Norm"),
        ({"class_path": "ln_zoo.norms.LayerNorm", "init_args": {"epsilon": 1}}, "epsilon"),
        ({"class_path": "ln_zoo.norms.LayerNorm", "init_args": {"eps": "big"}}, "eps|LayerNorm"),
        ({"class_path": "ln_zoo.norms.LayerNorm", "init_args": {"eps": -1.0}}, "eps"),
        ({"class_path": "ln_zoo.norms.LayerNorm", "init_args": [1]}, "LayerNorm"),
        *((config, "class_path") for config in ({"class_path": 3}, {"init_args": {}}, {})),
        ("LayerNorm", "'LayerNorm'"),
        (None, "None"),
    ],
    ids=str,
)
def test_wrong_configurations(config, named):
    refuses(named, from_config, config)


def test_a_norm_of_a_user_goes_by_the_module_that_defines_it():
    config = to_config(UserNorm())
    assert config == {"class_path": f"{__name__}.UserNorm", "init_args": {"power": 2.0}}


def test_a_norm_made_inside_a_function_says_that_it_cannot_be_stored():
    @dataclass(frozen=True)
    class Local(Norm):
        pass

    refuses("cannot be imported", from_config, to_config(Local()))


@pytest.mark.parametrize("norm", SHIPPED, ids=repr)
def test_a_checkpoint_with_a_norm_is_loaded_safely(tmp_path: Path, norm: Norm) -> None:
    """Lightning's `save_hyperparameters` stores a user's ``norm=LayerNorm()`` as it is."""
    torch.save({"hyper_parameters": {"norm": norm}}, tmp_path / "a.ckpt")
    stored = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert stored["hyper_parameters"]["norm"] == norm
