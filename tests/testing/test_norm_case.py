"""A check that cannot fail proves nothing: each of `NormCase` meets a norm it must refuse."""

import dataclasses
import importlib
import os
import re
import sys
from dataclasses import dataclass
from textwrap import dedent
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import ln_zoo.testing
from ln_zoo.norms import BatchNorm, Norm
from ln_zoo.ops.norm_records import RowNorm
from ln_zoo.testing import LAYERS, NormCase

pytest_plugins = ["pytester"]

FAILURE = (AssertionError, pytest.fail.Exception)


@dataclass(frozen=True)
class Good(Norm):
    """RMS norm without a fault; the norms below add one each."""

    eps: float = 1e-5
    invariances: ClassVar[frozenset[str] | None] = frozenset(
        {"weight_matrix_rescaling", "dataset_rescaling", "example_rescaling"}
    )

    def init_params(self, site):
        site.add_affine(gain=1.0)

    def normalize(self, site, a, step=None):
        return site.affine(a * torch.rsqrt(site.mean(a.square()) + self.eps))


@dataclass
class NotFrozen(Norm):
    eps: float = 1e-5


class NoDataclass(Norm):
    pass


class Outer:
    @dataclass(frozen=True)
    class Nested(Good):
        pass


def broken(name, fields=(), after=None, **own):
    """A norm with more fields, with other methods, or with something done to right outputs.

    ``after``: a function of site, output, input and time step.
    """
    if after is not None:
        right = Good.normalize
        own["normalize"] = lambda norm, site, a, t=None: after(site, right(norm, site, a), a, t)
    namespace = {"__module__": __name__, **own}
    return dataclasses.make_dataclass(name, fields, bases=(Good,), namespace=namespace, frozen=True)


def field(make, **options):
    return dataclasses.field(default_factory=make, **options)


def starts(also):
    """Initialises a site, and adds something to it."""

    def init_params(self, site):
        Good.init_params(self, site)
        also(site)

    return init_params


class _ForgetsInPickle(nn.Module):
    def __init__(self, value=1.0):
        super().__init__()
        self.value = value

    def __deepcopy__(self, memo):
        return _ForgetsInPickle(self.value)

    def __reduce__(self):
        return _ForgetsInPickle, ()


class _Shared(Tensor):
    def __deepcopy__(self, memo):
        return self


def centred_over_examples(self, site, a, step=None):
    dims = site.example_dims(a) if site.training or self.batch_dependent else ()
    return a - a.mean(dims, keepdim=True) if dims else a


def scaled_in_training(self, site, a, step=None):
    """Mixes no examples, and is invariant to the scale of one in training only."""
    if not site.training:
        return site.affine(a / site.scale)
    site.scale.copy_(a.detach().square().mean().sqrt())
    return good(self, site, a)


def half_buffer(site):
    site.average = nn.Module()
    site.average.register_buffer("value", torch.zeros(3))


def coarse_in_half(site, y, a, step):
    rounded = y.round() if site.gain.dtype != torch.float32 else y
    return y + (rounded - y).detach()


def counted(site, y, a, step):
    site.calls += 1
    return y


def rms_detached(site, y, a, step):
    return site.affine(a * torch.rsqrt(site.mean(a.square()) + 1e-5).detach())


def described(groups=None, eps=1e-5, detach=False):
    def to_spec(self, site):
        gain = site.gain.detach() if detach else site.gain
        return RowNorm(groups(site) if groups else site.groups, True, False, eps, gain, site.shift)

    return to_spec


good, claimed = Good.normalize, Good.invariances
mixing = {"normalize": centred_over_examples, "invariances": BatchNorm.invariances}
BROKEN = {
    "ListField": {"fields": [("sizes", list, field(lambda: [1, 2]))]},
    "TensorField": {"fields": [("start", Tensor, field(lambda: torch.ones(2)))]},
    "IdentityField": {"fields": [("marker", object, field(object))]},
    "TupleField": {"fields": [("sizes", tuple, (1, 2))]},
    "HiddenField": {"fields": [("power", float, field(lambda: 2.0, repr=False))]},
    "DropsAFeature": {"after": lambda site, y, a, t: a[..., :1]},
    "AddsAnAxis": {"after": lambda site, y, a, t: y.unsqueeze(0)},
    "WrongWithoutBatch": {"after": lambda site, y, a, t: y * a.dim()},
    "DetachesStatistics": {"after": rms_detached},
    "NoEps": {"after": lambda site, y, a, t: site.affine(a / site.mean(a.square()).sqrt())},
    "StateOutsideStateDict": {
        "init_params": starts(lambda site: setattr(site, "start", torch.rand(()))),
        "after": lambda site, y, a, t: y + site.start,
    },
    "LosesStateInPickle": {
        "init_params": starts(lambda site: setattr(site, "part", _ForgetsInPickle(3.0))),
        "after": lambda site, y, a, t: site.part.value * y,
    },
    "SharesAcrossCopies": {
        "init_params": starts(
            lambda s: s.register_buffer("table", torch.ones(()).as_subclass(_Shared))
        )
    },
    "TracksInEvaluation": {
        "init_params": starts(lambda site: site.add_buffer("calls", (), 0, dtype=torch.int64)),
        "after": counted,
    },
    "MixesInSecret": {**mixing},
    "MixesInEvaluation": {"batch_dependent": True, **mixing},
    "SaysItMixes": {"batch_dependent": True},
    "ReadsStepInSecret": {"after": lambda site, y, a, t: y * (1 + (t or 0))},
    "SaysItReadsStep": {"per_timestep": True},
    "ClaimsTooMuch": {"invariances": claimed | {"weight_matrix_recentering"}},
    "ClaimsTooLittle": {"invariances": claimed - {"example_rescaling"}},
    "ForgetsCasesInEvaluation": {
        "init_params": starts(lambda site: site.add_buffer("scale", (), 1.0)),
        "normalize": scaled_in_training,
    },
    "MisspeltInvariance": {"invariances": claimed | {"case_scaling"}},
    "DescribesRight": {"to_spec": described()},
    "DescribesOtherEps": {"to_spec": described(eps=0.1)},
    "DescribesOneGroup": {"to_spec": described(lambda site: (site.features,))},
    "DescribesDetachedGain": {"to_spec": described(detach=True)},
    "DescribesIdentity": {"to_spec": lambda norm, site: RowNorm(site.groups)},
    # Counts the rows that it sees: all steps of all examples at an input site.
    "MixesRows": {"after": lambda site, y, a, t: y * len(a)},
    "ReturnsFloat32": {"after": lambda site, y, a, t: y.float()},
    "HalfBuffer": {"init_params": starts(half_buffer)},
    "Float32Parameter": {
        "init_params": lambda norm, site: site.add_parameter("gain", torch.ones(site.features))
    },
    "CoarseInHalf": {"after": coarse_in_half},
    "CoarseUnderAutocast": {
        "after": lambda site, y, a, t: y * (1 + torch.is_autocast_enabled("cpu"))
    },
    "OtherWhenCompiled": {"after": lambda site, y, a, t: y * (1 + torch.compiler.is_compiling())},
    "OtherWhenGenerated": {
        "after": lambda site, y, a, t: y * (1 + (os.environ.get("LN_ZOO_KERNELS") == "generated"))
    },
}
# Found by name where they are unpickled.
globals().update({name: broken(name, **options) for name, options in BROKEN.items()})


REFUSED = [
    ("is_a_frozen_value", NotFrozen(), (), "make NotFrozen a frozen dataclass"),
    ("is_a_frozen_value", NoDataclass(), (), "make NoDataclass a frozen dataclass"),
    ("is_a_frozen_value", "ListField", (), "cannot be hashed"),
    ("is_a_frozen_value", "IdentityField", (), "must be plain values"),
    ("config_round_trip", NoDataclass(), (), "make it a frozen dataclass"),
    ("config_round_trip", "TensorField", (), "must be made of plain values to be stored"),
    ("config_round_trip", "TupleField", (), "came back as"),
    ("config_round_trip", Outer.Nested(), (), "cannot be read back"),
    ("prints_itself", "HiddenField", (), "does not show power"),
    ("keeps_shapes", "AddsAnAxis", ("Linear", (5, 4)), r"gave \(1, 4\), not \(4,\)"),
    ("unbatched_equals_a_batch_of_one", "WrongWithoutBatch", ("Linear",), "unbatched input"),
    ("gradients_are_those_of_finite_differences", "DetachesStatistics", ("GRU", "training"),
     "the gradient of .* is not that of finite differences"),
    ("gradients_stay_finite_where_statistics_degenerate", "NoEps", ("LSTM", "training"),
     "gradient of .* is not finite; add an eps"),
    ("state_dict_round_trip", "StateOutsideStateDict", ("Linear",), "after load_state_dict"),
    ("deepcopy_and_pickle", "LosesStateInPickle", ("Linear",), "of a pickled copy differ"),
    ("deepcopy_and_pickle", "SharesAcrossCopies", ("GRU",), "shares tensors"),
    ("evaluation_changes_nothing", "TracksInEvaluation", ("RNN",), "evaluation changed .*calls"),
    ("batch_dependence_as_declared", "MixesInSecret", (), "declares batch_dependent = False, but"),
    ("batch_dependence_as_declared", "SaysItMixes", (), "declares batch_dependent = True, but"),
    ("evaluation_is_not_batch_dependent", "MixesInEvaluation", ("Conv2d",), "running statistics"),
    ("reads_step_as_declared", "ReadsStepInSecret", (), "declare per_timestep = True"),
    ("reads_step_as_declared", "SaysItReadsStep", (), "declares per_timestep = True, but"),
    ("invariances_are_known_names", "MisspeltInvariance", (), r"\['case_scaling'\] are not among"),
    ("invariance_as_declared", "ClaimsTooMuch", ("weight_matrix_recentering",),
     "declares weight_matrix_recentering, but it moves"),
    ("invariance_as_declared", "ClaimsTooLittle", ("example_rescaling",),
     "add 'example_rescaling' to invariances"),
    ("invariance_as_declared", "ForgetsCasesInEvaluation", ("example_rescaling",),
     "declares example_rescaling, but it moves"),
    ("describe_agrees_with_sums", "DescribesOtherEps", ("training",), "at 'input'.* differs from"),
    ("describe_agrees_with_sums", "DescribesOneGroup", ("training",), "at 'recurrent'.* differs"),
    ("describe_agrees_with_sums", "DescribesDetachedGain", ("training",), "other gradients"),
    ("packed_examples_equal_examples_alone", "MixesRows", ("LSTM", "training"),
     "example . of a packed"),
    ("layers_equal_their_cells_step_by_step", "MixesRows", ("GRU", "training"), "against its cell"),
    ("fast_path_equals_the_generic_scan", "DescribesIdentity", ("GRU", "training"), "fast path"),
    ("sums_keep_shape_and_precision", "ReturnsFloat32", (torch.float64,), "in torch.float32"),
    ("sums_keep_shape_and_precision", "DropsAFeature", (torch.float32,), r"came back as \(4, 1\)"),
    ("float64_stays_float64", "Float32Parameter", ("Linear",), "gain is torch.float32 in a"),
    ("half_precision", "HalfBuffer", ("Linear", torch.float16), "buffer .* became torch.float16"),
    ("half_precision", "CoarseInHalf", ("Linear", torch.bfloat16), "against float32: differs"),
    ("autocast", "CoarseUnderAutocast", ("Linear",), "under autocast against float32: differs"),
    ("device_and_dtype_reach_the_norm", "Float32Parameter", ("Linear",), "gain is on cpu"),
    ("compiled_equals_eager", "OtherWhenCompiled", (), "torch.compile against eager: differs"),
    ("generated_kernel_equals_the_generic_scan", "OtherWhenGenerated", ("LSTM",),
     "the generated kernel against float64: output 0 differs"),
]  # fmt: skip


def run_check(norm, check, args, monkeypatch):
    norm = globals()[norm]() if isinstance(norm, str) else norm
    case = type("Case", (NormCase,), {"norm": norm})()
    torch.manual_seed(0)
    if check.endswith("equals_the_generic_scan"):
        args = (*args, monkeypatch)
    getattr(case, f"test_{check}")(*args)


@pytest.mark.parametrize(
    ("check", "norm", "args", "message"),
    REFUSED,
    ids=[f"{check}-{n if isinstance(n, str) else type(n).__name__}" for check, n, *_ in REFUSED],
)
def test_a_broken_norm_fails(check, norm, args, message, monkeypatch):
    right = "DescribesRight" if check == "describe_agrees_with_sums" else Good()
    run_check(right, check, args, monkeypatch)
    with pytest.raises(FAILURE, match=message):
        run_check(norm, check, args, monkeypatch)


def test_every_check_has_a_norm_that_it_refuses():
    checks = {name for name in dir(NormCase) if name.startswith("test_")}
    assert {f"test_{check}" for check, *_ in REFUSED} == checks


EXAMPLE = ln_zoo.testing.__doc__.split("\n\n", 1)[1].rsplit("\n\n", 1)[0]


def test_the_example_of_the_documentation_passes(pytester):
    """In some layers; every layer meets a user's norm in tests/norms/test_norm_cases.py."""
    pytester.makepyfile(test_mine=dedent(EXAMPLE))
    some = "not RNN and not LSTM and not Conv2d"
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-rs", "-k", some)
    outcomes = result.parseoutcomes()
    assert set(outcomes) == {"passed", "skipped", "deselected"}, outcomes
    assert outcomes["passed"] > 60
    result.stdout.fnmatch_lines("*to_spec() is None at every site*")


def test_a_fault_shows_by_name_in_a_run_of_pytest(pytester):
    example = dedent(EXAMPLE).replace("eps: float", "batch_dependent = True\n    eps: float")
    pytester.makepyfile(test_mine=example)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "batch_dependence_as")
    assert result.parseoutcomes()["failed"] == 1
    result.stdout.fnmatch_lines("*MyNorm(eps=1e-05) declares batch_dependent = True, but*")


def test_a_case_that_lacks_a_norm_or_misspells_a_layer_says_so(pytester):
    pytester.makepyfile(
        test_mine="""
        from ln_zoo.norms import LayerNorm
        from ln_zoo.testing import NormCase

        class TestNothing(NormCase):
            pass

        class TestClass(NormCase):
            norm = LayerNorm

        class TestMisspelt(NormCase):
            norm = LayerNorm()
            layers = ("Conv2D",)
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "prints_itself")
    assert result.parseoutcomes()["errors"] == 3
    nothing = "*TestNothing: set the class attribute norm to the norm*"
    misspelt = "*TestMisspelt: layers has 'Conv2D'; known are Linear, Conv2d,*"
    result.stdout.fnmatch_lines_random([nothing, misspelt])


def test_checks_run_in_the_layers_that_are_named_unless_set_to_none(pytester):
    pytester.makepyfile(
        test_mine="""
        import pytest
        from ln_zoo.norms import LayerNorm
        from ln_zoo.testing import NormCase

        class TestImages(NormCase):
            norm = LayerNorm(convolution="unit")
            layers = ("Conv2d",)

            @pytest.mark.parametrize("layer", ["mine"])
            def test_mine(self, layer):
                assert layer == "mine"

        class TestSequences(NormCase):
            norm = LayerNorm(per_gate=True)
            layers = ("GRU", "GRUCell")
            test_prints_itself = None
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--collect-only", "-q")
    found = [name.partition("::")[2] for name in result.outlines if "[" in name]
    words = {
        case: set(re.findall(r"\w+", " ".join(n.partition("[")[2] for n in found if case in n)))
        for case in ("TestImages", "TestSequences")
    }
    assert words["TestImages"] & {*LAYERS, "mine"} == {"Conv2d", "mine"}
    assert words["TestSequences"] & set(LAYERS) == {"GRU", "GRUCell"}
    check = "TestSequences::test_fast_path_equals_the_generic_scan"
    fast = {name for name in found if "fast_path" in name and "Sequences" in name}
    assert fast == {f"{check}[GRU-{mode}]" for mode in ("training", "evaluation")}
    names = result.stdout.str()
    assert names.count("::test_prints_itself") == 1
    assert names.count("::test_is_a_frozen_value") == 2


def test_the_random_numbers_of_other_tests_are_left_alone(pytester):
    before = "\ndef test_before():\n    torch.manual_seed(5)\n"
    after = "\ndef test_after():\n    assert torch.initial_seed() == 5\n"
    pytester.makepyfile(test_mine=dedent(EXAMPLE) + before + after)
    path = "test_mine.py::"
    tests = ["test_before", "TestMyNorm::test_batch_dependence_as_declared", "test_after"]
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *(path + t for t in tests))
    result.assert_outcomes(passed=3)


def test_without_pytest_the_import_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytest", None)
    monkeypatch.delitem(sys.modules, "ln_zoo.testing")
    with pytest.raises(ImportError, match=r"needs pytest: pip install 'ln-zoo\[test\]'"):
        importlib.import_module("ln_zoo.testing")
