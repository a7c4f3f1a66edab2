"""Exported files compute what layers and models compute, and wrong requests are refused."""

from __future__ import annotations

import copy
import functools
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import ln_zoo
from ln_zoo.export import (
    _FORMATS,
    ExportError,
    check,
    export,
    export_parts,
    files,
    map_path,
    parts_of,
    path_of,
    paths,
    read_facts,
)
from ln_zoo.export.check import compare
from ln_zoo.export.loops import Loop, exportable
from ln_zoo.layers import GRU, LSTM, RNN, GRUCell, Linear, LSTMCell, RecurrentLayer
from ln_zoo.models import Handwriting, MLPClassifier, SequenceClassifier, ZooModule
from ln_zoo.norms import BatchNorm, LayerNorm, Norm, RMSNorm, WeightNorm
from ln_zoo.ops.cells import Cell, Place, linear
from ln_zoo.zoo.catalog import card_folders, read_card

slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def needed(format: str) -> None:
    for package in _FORMATS[format].packages:
        pytest.importorskip(package, reason=f"the format {format} needs {package}")


def with_statistics(module: nn.Module) -> nn.Module:
    """Batch norm that has seen a few batches: every row of statistics is its own."""
    for name, buffer in module.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.uniform_(0.5, 1.5)
        elif name.endswith("num_batches_tracked"):
            buffer.fill_(3)
    return module.eval()


def leaky_step(wx, states, weights, sites, t):
    """Moves by a share of its own, by unit, towards what the products say."""
    (h,) = states
    (share,) = weights.own[0].sigmoid()
    new = (wx + sites["recurrent"](linear(h, weights.hh), t) + weights.bias).tanh()
    return (h + share * (new - h),)


LEAKY = Cell(
    "leaky",
    leaky_step,
    (Place("input", (1,), weight="ih"), Place("recurrent", (1,), weight="hh")),
    weights=(("share", 1),),
)
LAYERS = {
    "LSTM": lambda: LSTM(3, 5, num_layers=2, norm=LayerNorm()),
    "GRU": lambda: GRU(3, 5, batch_first=True, bias=False, norm=RMSNorm()),
    "RNN": lambda: RNN(3, 5, nonlinearity="relu", norm=LayerNorm()),
    # Rows of statistics beyond the fourth step are the fourth's.
    "recurrent batch norm": lambda: LSTM(3, 5, norm=BatchNorm(max_steps=4)),
    "peepholes": lambda: LSTM(3, 5, peephole=True, derivative_bound=1.0, norm=LayerNorm()),
    "projection": lambda: LSTM(3, 5, proj_size=2),
    "weight norm": lambda: GRU(3, 5, norm=WeightNorm()),
    "blocks": lambda: GRU(3, 6, blocks=3, norm=RMSNorm(per_block=True)),
    "a cell of one's own": lambda: RecurrentLayer(3, 5, norm=LayerNorm(), cell=LEAKY),
}


@pytest.mark.parametrize("format", ["pt2", "pte"])
@pytest.mark.parametrize("layer", ["LSTM", "recurrent batch norm"])
def test_step_form_of_layers(layer, format, tmp_path):
    needed(format)
    module = with_statistics(LAYERS[layer]())
    done = export(module, tmp_path / f"a.{format}", format=format, form="step")
    assert done.comparison.ratio <= 1
    assert {"N": 4, "T": 12, "S": 7, "U": 9} in done.comparison.sizes


def test_an_executorch_file_says_what_it_holds(tmp_path):
    needed("pte")
    file = tmp_path / "a.pte"
    export(LSTM(3, 5, norm=LayerNorm()).eval(), file, format="pte", form="step")
    facts = read_facts(file)
    assert facts["inputs"] == {"input": ["N", 3], "h": [1, "N", 5], "c": [1, "N", 5]}
    assert facts["largest"] == {"N": 64}
    # It takes no loop.
    with pytest.raises(ExportError, match=r"ExecuTorch.*step"):
        export(LSTM(3, 5).eval(), tmp_path / "b.pte", format="pte", form="sequence")
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("layer", ["RNN", slow("LSTM"), slow("GRU")])
def test_sequence_form_of_layers(layer, tmp_path):
    module = with_statistics(LAYERS[layer]())
    file = tmp_path / "a.pt2"
    export(module, file, format="pt2", form="sequence")
    # Any length and batch, where ln_zoo need not be known.
    program = torch.export.load(file).module()
    x = torch.randn(3, 23, 3) if layer == "GRU" else torch.randn(23, 3, 3)
    states = [torch.zeros(module.num_layers, 3, 5) for _ in range(2 if layer == "LSTM" else 1)]
    torch.testing.assert_close(program(x, *states)[0], module(x)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "form"),
    [("pt2", "step"), ("pt2", "sequence"), ("onnx", "step"), ("onnx", "sequence"), ("pte", "step")],
)
@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_in_every_format(layer, form, format, tmp_path):
    needed(format)
    module = with_statistics(LAYERS[layer]())
    assert export(module, tmp_path / "a", format=format, form=form).comparison.ratio <= 1


def test_copies_have_shared_layers_and_shorter_states_of_projections():
    module = nn.Module()
    module.first = module.second = LSTM(3, 5, norm=LayerNorm())
    module.inner = nn.ModuleList([module.first, nn.Linear(5, 5)])
    module.none = None
    twin = exportable(module.eval())
    assert isinstance(twin.first, Loop)
    assert twin.first is twin.second is twin.inner[0]
    layer, x = LSTM(3, 5, proj_size=2, norm=LayerNorm()).eval(), torch.randn(2, 2, 3)
    torch.testing.assert_close(exportable(layer)(x), layer(x))


def operators(file: Path) -> list[str]:
    onnx = pytest.importorskip("onnx")
    return [node.op_type for node in onnx.load(file).graph.node]


@pytest.mark.parametrize(
    ("module", "operator"),
    [
        (lambda: LSTM(3, 5, num_layers=2, bidirectional=True), "LSTM"),
        slow(lambda: GRU(3, 5, batch_first=True, norm=WeightNorm()), "GRU"),
        slow(lambda: RNN(3, 5, nonlinearity="relu"), "RNN"),
        slow(lambda: LSTM(3, 5, peephole=True), "LSTM"),
        slow(lambda: GRU(3, 5, bias=False), "GRU"),
        slow(lambda: GRU(3, 6, blocks=2), "GRU"),
    ],
)
def test_layers_without_normalised_pre_activations_are_operators(module, operator, tmp_path):
    pytest.importorskip("onnxruntime")
    layer = module().eval()
    export(layer, tmp_path / "a.onnx", form="sequence")
    found = operators(tmp_path / "a.onnx")
    assert found.count(operator) == layer.num_layers
    # Nothing of the layer is computed around it: neither products nor a loop.
    assert not {"MatMul", "Gemm", "Scan", "Loop", "Sigmoid", "Tanh"} & set(found)


def test_layer_norm_step_in_onnx(tmp_path):
    pytest.importorskip("onnxruntime")
    layer = LSTM(3, 5, norm=LayerNorm()).eval()
    done = export(layer, tmp_path / "a.onnx", name="mine", opset=19)
    assert done.comparison.ratio <= 1
    assert operators(tmp_path / "a.onnx").count("LayerNormalization") == 3
    facts = read_facts(tmp_path / "a.onnx")
    assert facts == done.facts
    assert facts["model"] == "mine"
    assert facts["states"] == {"h": "next_h", "c": "next_c"}


class Tagger(ZooModule):
    def __init__(self, words: int = 11, norm: Norm | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.resolve_hyperparameters(norm)
        self.embedding = nn.Embedding(words, 3)
        self.hidden = Linear(3, 4, norm=norm)
        self.head = nn.Linear(4, 2)

    def forward(self, words):
        return self.head(self.hidden(self.embedding(words)))

    def training_step(self, batch, batch_idx):
        return self(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ExportedTagger(Tagger):
    def export_parts(self):
        return {"tags": self._export_tags}

    def _export_tags(self, copy, form):
        inputs = {"words": paths.numbers(self.embedding.num_embeddings, "T", "N")}
        return map_path(self, copy, form, inputs, "tags", Tagger.forward)


def test_parts_of_a_model_of_ones_own_and_of_every_model(tmp_path):
    file = tmp_path / "a.pt2"
    with pytest.raises(ExportError, match=r"Tagger.*export_parts"):
        export(Tagger(norm=LayerNorm()).eval(), file, format="pt2")
    model = ExportedTagger(norm=LayerNorm()).eval()
    assert parts_of(model) == ("tags",)
    export(model, file, format="pt2", form="sequence")
    words = torch.randint(11, (9, 5))
    torch.testing.assert_close(torch.export.load(file).module()(words)[0], model(words))
    models = {read_card(folder).model for folder in card_folders().values()}
    classes = {name: getattr(ln_zoo.models, name) for name in ln_zoo.models.__all__}
    ours = {n for n, c in classes.items() if isinstance(c, type) and issubclass(c, ZooModule)}
    assert models <= ours
    undeclared = export_parts.dispatch(ZooModule)
    found = {name for name in ours if export_parts.dispatch(classes[name]) is undeclared}
    assert found == {"ZooModule"}


WORDS = ["a", "b", "@entity0", "@entity1", "@placeholder"]
TEXT = {"vocabulary": WORDS, "hidden_size": 8, "embedding_features": 4}
PEN = {"hidden_size": 8, "num_layers": 2, "mixture_components": 2}
PIXELS = {"hidden_size": 6, "step_features": 2}
MODELS = {
    "pixels": lambda: SequenceClassifier(24, **PIXELS, permuted=True),
    "pixels, batch norm": lambda: SequenceClassifier(24, **PIXELS, norm=BatchNorm(max_steps=12)),
    "handwriting": lambda: Handwriting(**PEN, window_components=3),
    "handwriting without text": lambda: Handwriting(**PEN, text=False, output_from="top"),
    "draw": lambda: ln_zoo.models.DRAW((6, 5), 3, hidden_size=8, latent_size=2, norm=LayerNorm()),
    "skip-thought": lambda: ln_zoo.models.SkipThought(**TEXT, prenorm_bias=True),
    "two-way skip-thought": lambda: ln_zoo.models.SkipThought(**TEXT, encoder="bi"),
    "captions": lambda: ln_zoo.models.OrderEmbedding(**TEXT, image_features=6, prenorm_bias=True),
    "reader": lambda: ln_zoo.models.AttentiveReader(
        WORDS, 8, norm=BatchNorm(max_steps=4), everywhere=True, initial_state="learned"
    ),
}
#: Step forms take a second, loops over sequences many.
QUICK = [("pixels, batch norm", "step"), ("captions", "step")]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        (name, form) if (name, form) in QUICK else slow(name, form)
        for name in MODELS
        for form in ("step", "sequence")
    ],
)
def test_small_models(name, form, tmp_path):
    model = with_statistics(MODELS[name]())
    for part in parts_of(model):
        if form == "step" and (name in ("reader", "two-way skip-thought") or part == "images"):
            with pytest.raises(ExportError, match="has no step form: "):
                export(model, tmp_path / "b.pt2", format="pt2", form=form, part=part)
            continue
        done = export(model, tmp_path / "a.pt2", format="pt2", form=form, part=part, overwrite=True)
        assert done.comparison.ratio <= 1
        assert done.comparison.scale > 0


def test_states_that_are_learned_are_in_the_file(tmp_path):
    model = SequenceClassifier(8, hidden_size=3).eval()
    export(model, tmp_path / "a.pt2", format="pt2")
    initial = read_facts(tmp_path / "a.pt2")["initial"]
    for name, state in zip(("h", "c"), model.initial_states, strict=True):
        torch.testing.assert_close(torch.tensor(initial[name]), state.detach())


PUBLISHED = ln_zoo.list_models()
CHEAP = ("mlp.layernorm-digits",)


@pytest.mark.parametrize("name", [name if name in CHEAP else slow(name) for name in PUBLISHED])
@pytest.mark.parametrize("format", _FORMATS)
def test_published_models(format, name, tmp_path):
    needed(format)
    model = ln_zoo.load(name)
    for part in parts_of(model):
        for form in ("step", "sequence"):
            file = tmp_path / f"{part}.{form}.{format}"
            try:
                done = export(model, file, format=format, form=form, part=part)
            except ExportError as error:
                missing = "has no step form: " if form == "step" else "give the step form"
                assert missing in str(error)  # noqa: PT017
                assert form == "step" or format == "pte"
            else:
                assert done.comparison.ratio <= 1


@dataclass(frozen=True)
class Clocked(Norm):
    """Does something else at each step, and only its code knows what."""

    per_timestep = True

    def normalize(self, site, a, step=None):
        return a * (step + 1)


def test_files_that_exist(tmp_path):
    file = tmp_path / "a.pt2"
    file.write_text("mine")
    for path, message in ((file, r"a\.pt2 exists"), (tmp_path / "no/a.pt2", "no folder .*no")):
        with pytest.raises(ExportError, match=message):
            export(LSTMCell(3, 5).eval(), path, format="pt2")
    assert file.read_text() == "mine"
    # A file that another program exported is refused.
    torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.randn(1, 2),)), file)
    with pytest.raises(ExportError, match=r"a\.pt2.*ln-zoo export"):
        read_facts(file)
    assert len(set(files._SIZES.values())) == len(files._SIZES)


def lstm() -> nn.Module:
    return LSTM(3, 5).eval()


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (lstm, {"format": "tflite"}, "format.*pt2, onnx, pte.*'tflite'"),
        (lstm, {"form": "whole", "format": "onnx"}, "form.*step, sequence.*'whole'"),
        (lstm, {"opset": 12, "format": "onnx"}, "opset.*18 to 23.*12"),
        (lstm, {"opset": 99, "format": "onnx"}, "opset.*99"),
        (lstm, {"opset": 20}, "opset.*pt2"),
        (lstm, {"part": "images"}, "LSTM.*'images'.*layer"),
        (lambda: LSTM(3, 5, norm=BatchNorm()), {}, "LSTM is in training mode"),
        (lambda: GRU(3, 5, bidirectional=True).eval(), {}, "GRU has no step form"),
        (lambda: GRUCell(3, 5).eval(), {"form": "sequence"}, "GRUCell.*step"),
        (lambda: LSTM(3, 5, norm=Clocked()).eval(), {}, "Clocked.*to_spec"),
        (lambda: GRU(3, 5).double().eval(), {}, "float32"),
        (lambda: nn.Linear(3, 5).eval(), {}, "Linear.*export_parts"),
        (lambda: MLPClassifier(6, [3]).eval(), {}, "MLPClassifier has no step form"),
    ],
)
def test_what_cannot_be_exported(module, arguments, message, tmp_path):
    with pytest.raises(ExportError, match=message):
        export(module(), tmp_path / "a", **{"format": "pt2", "form": "step"} | arguments)
    assert not list(tmp_path.iterdir())


def test_a_wrong_file_is_refused(tmp_path):
    layer = LSTM(3, 5, norm=LayerNorm()).eval()
    path, other = path_of(layer, "step"), copy.deepcopy(layer)
    with torch.no_grad():
        other.weight_hh_l0[0, 0] += 1e-3
    wrong = path_of(other, "step").module

    def run(inputs):
        first, *_ = wrong(*inputs.values())
        return dict(zip(path.outputs, (first, *path.module(*inputs.values())[1:]), strict=True))

    with pytest.raises(ExportError, match="rounding"):
        compare(layer, path, run)


class OneNumber:
    """A path whose model is exact at one example, and off by 1e-6 at others, in float32."""

    outputs, inputs, states, is_step = ("y",), {}, {}, False

    def reference(self, model, given):
        single = model.weight.dtype == torch.float32 and len(given["x"]) > 1
        return {"y": torch.tensor([1 + 1e-6 * single], dtype=model.weight.dtype)}


@pytest.mark.parametrize("error", [5e-6, 5e-5])
def test_a_model_that_is_exact_by_chance_does_not_decide(monkeypatch, error):
    """Each output is judged by the model's largest error over all sizes."""
    monkeypatch.setattr(check, "_given", lambda path, sizes, seed: {"x": torch.ones(sizes["N"])})

    def run(given):
        return {"y": torch.tensor([1 + error * (len(given["x"]) == 1)])}

    if error < 1e-5:
        assert 0.4 < compare(nn.Linear(1, 1), OneNumber(), run).ratio < 0.6
    else:
        with pytest.raises(ExportError, match="rounding"):
            compare(nn.Linear(1, 1), OneNumber(), run)


def test_to_onnx_is_the_checked_export(tmp_path: Path) -> None:
    """Lightning's method by the same name would trace ``forward`` and keep what it gets."""
    needed("onnx")
    model = SequenceClassifier(hidden_size=6).eval()
    file = tmp_path / "model.onnx"
    assert model.to_onnx(file).comparison.ratio <= 1
    assert read_facts(file)["form"] == "sequence"
    with pytest.raises(ExportError, match="exists"):
        model.to_onnx(file)


@pytest.mark.parametrize("sample", [None, torch.zeros(1, 64)])
def test_to_onnx_refuses(sample: torch.Tensor | None, tmp_path: Path, monkeypatch) -> None:
    if sample is None:
        needed("onnx")
    with pytest.raises(ExportError, match="MLPClassifier"):
        MLPClassifier(64, [8]).to_onnx(tmp_path / "model.onnx", sample)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ExportError, match=r"onnx.*ln-zoo\[export\]"):
        export(LSTM(3, 5).eval(), tmp_path / "a.onnx")
    assert not [*tmp_path.iterdir()]
