"""The attentive reader (Cooijmans et al. 2017, section 5.4; paper, section 6.2)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_results import assert_close, randomised
from reference import layer_norm, read, run
from refusals import refuses
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from training import quiet_trainer

from ln_zoo.data import SyntheticClozeQA
from ln_zoo.models import AttentiveReader
from ln_zoo.models.attentive_reader import Inputs
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, WeightNorm
from ln_zoo.utils.vocabulary import Vocabulary

NORMS = [LayerNorm(), RMSNorm(), WeightNorm(), Identity(), BatchNorm()]
WORDS = ["said", "@entity3", "@placeholder", "@entity0", "the", "@entity4", ".", "@entity1",
         "cat", "@entity2", "sings"]  # fmt: skip
#: Answers of the batch below, as words.
ANSWERS = ("@entity1", "@entity4", "@entity0", "@entity2")
EPS = 1e-5


def small(**arguments: Any) -> AttentiveReader:
    torch.manual_seed(0)
    sizes = {"vocabulary": WORDS, "hidden_size": 6, "dropout": 0.0}
    return randomised(AttentiveReader(**sizes | arguments)).double()


def make_batch() -> tuple[Inputs, Tensor]:
    """Two passages of the greatest length; behind the ends there is anything but zeros."""
    torch.manual_seed(1)
    numbers = len(WORDS) + 2
    inputs = Inputs(
        torch.randint(2, numbers, (4, 9)),
        torch.tensor([9, 4, 9, 6]),
        torch.randint(2, numbers, (4, 5)),
        torch.tensor([3, 5, 2, 5]),
    )
    return inputs, torch.tensor(Vocabulary(WORDS).numbers(ANSWERS))


def widened(inputs: Inputs) -> Inputs:
    """With four words more behind the ends."""
    more = torch.full((4, 4), 3)
    passage, query = (torch.cat([tokens, more], 1) for tokens in (inputs.passage, inputs.query))
    return inputs._replace(passage=passage, query=query)


def lstm(model: AttentiveReader, name: str, x: Tensor, lengths: Tensor, masked: bool) -> Tensor:
    """The states (N, T, d); zeros behind the ends where statistics are masked."""
    c = torch.zeros(len(x), x.shape[2], dtype=torch.float64)
    h = c
    if model.initial_states is not None:
        h = h + model.initial_states[int(name == "query_reader")]
    sequences = [row[:n] if masked else row for row, n in zip(x, lengths.tolist(), strict=True)]
    outputs, *_ = run(read("LSTM", getattr(model, name), "l0"), sequences, h, c)
    found = pad_sequence(outputs, batch_first=True)
    return nn.functional.pad(found, (0, 0, 0, x.shape[1] - found.shape[1]))


def by_the_equations(
    model: AttentiveReader, inputs: Inputs, norm: str, masked: bool, everywhere: bool
) -> tuple[Tensor, Tensor]:
    """Logits and attention, of plain numbers; batch norm by the statistics of the batch."""
    p = {key: value.detach() for key, value in model.state_dict().items()}
    embedding = p["embedding.weight"]
    h = lstm(model, "passage_reader", embedding[inputs.passage], inputs.passage_lengths, masked)
    queries = lstm(model, "query_reader", embedding[inputs.query], inputs.query_lengths, masked)
    u = torch.stack([row[n - 1] for row, n in zip(queries, inputs.query_lengths, strict=True)])
    lengths = inputs.passage_lengths.tolist()

    def outside(name: str, a: Tensor, bias: bool = False) -> Tensor:
        a = a @ p[f"{name}.weight"].T
        if everywhere:
            normal = layer_norm(a.T, EPS).T if norm == "batch" else layer_norm(a, EPS)
            a = normal * p[f"{name}.site.gain"]
        return a + p[f"{name}.bias"] if bias else a

    # The states of all passages one after another: batch norm pools over all of them.
    counted = lengths if masked else [h.shape[1]] * len(lengths)
    together = torch.cat([states[:count] for states, count in zip(h, counted, strict=True)])
    w_h = outside("attend_states", together, bias=True).split(counted)
    w_u = outside("attend_query", u)
    m = p["similarity.weight"]
    attention = torch.zeros(inputs.passage.shape, dtype=torch.float64)
    readings, means = [], []
    for n, length in enumerate(lengths):
        states = h[n, :length]
        s = (states @ m.T) @ (m @ u[n])
        scores = (w_h[n][:length] + w_u[n] + s.unsqueeze(1)).tanh() @ p["attend_score.weight"][0]
        attention[n, :length] = scores.softmax(0)
        readings.append(attention[n, :length] @ states)
        means.append(states.mean(0))
    g = outside("join_reading", torch.stack(readings), bias=True) + outside("join_query", u)
    g = (g + outside("join_mean", torch.stack(means))).tanh()
    return g @ p["output.weight"].T + p["output.bias"], attention


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "all"])
@pytest.mark.parametrize(
    ("norm", "kind", "everywhere", "start"),
    [
        (Identity(), "none", False, "learned"),
        (LayerNorm(), "layer", True, "zeros"),
        (LayerNorm(), "layer", False, "learned"),
        (BatchNorm(), "batch", True, "learned"),
        (BatchNorm(), "batch", False, "zeros"),
    ],
    ids=str,
)
def test_outputs_are_those_of_the_equations(
    norm: Norm, kind: str, start: Any, everywhere: bool, masked: bool
) -> None:
    options = {"initial_state": start, "statistics": "masked" if masked else "all"}
    model = small(norm=norm, everywhere=everywhere, **options)
    inputs, _ = make_batch()
    everywhere = everywhere and kind != "none"
    logits, attention = by_the_equations(model, inputs, kind, masked, everywhere)
    assert torch.allclose(model(inputs), logits, rtol=1e-10, atol=1e-10)
    assert torch.allclose(model.attention(inputs), attention, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("everywhere", [True, False], ids=["everywhere", "lstm"])
@pytest.mark.parametrize("norm", NORMS, ids=repr)
def test_padding_changes_nothing(norm: Norm, everywhere: bool) -> None:
    inputs, _ = make_batch()
    for training in (True, False):
        model = small(norm=norm, everywhere=everywhere).train(training)
        assert_close(model(inputs), model(widened(inputs)), 1e-12)


def test_padding_changes_what_statistics_of_all_positions_are() -> None:
    inputs, _ = make_batch()
    model = small(norm=BatchNorm(), everywhere=True, statistics="all").train()
    assert (model(inputs) - model(widened(inputs))).abs().max() > 1e-3
    # Not the running averages, nor those of one position.
    for same in (model.eval(), small(norm=LayerNorm(), everywhere=True, statistics="all")):
        assert_close(same(inputs), same(widened(inputs)), 1e-12)


def test_scores() -> None:
    model = small(norm=Identity())
    with torch.no_grad():
        model.output.weight.zero_()
    numbers = dict(zip(WORDS, Vocabulary(WORDS).numbers(WORDS), strict=True))
    passage = [["@entity1", "sings", "@entity0"], ["the", "@entity0", "said"], ["the", "cat"]]
    tokens = torch.zeros(3, 4, dtype=torch.int64)
    for row, words in zip(tokens, passage, strict=True):
        row[: len(words)] = torch.tensor([numbers[word] for word in words])
    tokens[2, 3] = numbers["@entity4"]  # behind the end
    query = torch.full((3, 1), numbers["@placeholder"])
    inputs = Inputs(tokens, torch.tensor([3, 3, 2]), query, torch.ones(3, dtype=torch.int64))
    answers = torch.tensor([numbers["@entity1"]] * 3)
    for scores, wrong in (
        ({"@entity1": 2.0}, [(0, 0, 0), (0, 0, 1), (0, 0, 1)]),
        ({"@entity1": 2.0, "cat": 3.0}, [(1, 0, 0), (1, 0, 1), (1, 0, 1)]),
        ({"@entity1": 2.0, "@entity4": 3.0}, [(1, 1, 0), (1, 1, 1), (1, 1, 1)]),
        ({"@entity1": 2.0, "@entity0": 3.0}, [(1, 1, 1), (1, 1, 1), (1, 1, 1)]),
    ):
        with torch.no_grad():
            model.output.bias.zero_()
            for word, score in scores.items():
                model.output.bias[numbers[word]] = score
        found = model.per_example((inputs, answers))
        names = ("error", "entity_error", "passage_error")
        for row, expected in enumerate(wrong):
            assert tuple(int(found[name][row]) for name in names) == expected, scores
        probability = torch.tensor([*scores.values(), *[0.0] * (13 - len(scores))]).softmax(0)[0]
        assert torch.allclose(found["nll"], -probability.double().log().expand(3), atol=1e-6)


def squares(model: AttentiveReader) -> list[Tensor]:
    """All square blocks of weights."""
    blocks = [model.similarity.weight, model.attend_states.weight]
    for reader in (model.passage_reader, model.query_reader):
        blocks += [*reader.weight_ih_l0.chunk(4), *reader.weight_hh_l0.chunk(4)]
    return blocks


@pytest.mark.parametrize("norm", NORMS, ids=repr)
def test_initial_weights(norm: Norm) -> None:
    torch.manual_seed(0)
    model = AttentiveReader(WORDS, 20, norm=norm, everywhere=True, initial_state="learned")
    assert (model.initial_states == 0).all()
    blocks = squares(model)
    for reader in (model.passage_reader, model.query_reader):
        assert not any(bias.any() for bias in (reader.bias_ih_l0, reader.bias_hh_l0))
    assert len(blocks) == 18
    for i, block in enumerate(blocks):
        assert torch.allclose(block @ block.T, 0.05**2 * torch.eye(20), atol=1e-6)
        assert not any(torch.allclose(block, other) for other in blocks[:i])
    for layer in (model.attend_query, model.join_reading, model.join_query, model.join_mean):
        bound = (6 / 41) ** 0.5
        assert 0.9 * bound < layer.weight.abs().max() <= bound
    bound = (6 / (len(WORDS) + 2 + 20 + 1)) ** 0.5
    for weight in (model.embedding.weight, model.output.weight):
        assert 0.9 * bound < weight.abs().max() <= bound
    assert 0.5 * 20**-0.5 < model.attend_score.weight.abs().max() <= 20**-0.5
    for layer in (model.attend_states, model.join_reading, model.output):
        assert (layer.bias == 0).all()


def test_tied_weights_as_in_the_sources_code() -> None:
    torch.manual_seed(0)
    model = AttentiveReader(WORDS, 6, tied_init=True)
    blocks = squares(model)
    assert all(block.equal(blocks[0]) for block in blocks)
    assert model.join_reading.weight.equal(model.join_mean.weight)
    torch.manual_seed(1)
    assert AttentiveReader(WORDS, 6, tied_init=True).output.weight.equal(model.output.weight)
    assert not AttentiveReader(WORDS, 6).output.weight.equal(model.output.weight)


def test_dropout_is_for_training() -> None:
    model, (inputs, _) = small(dropout=0.5), make_batch()
    assert not torch.allclose(model.train()(inputs), model(inputs))
    assert torch.allclose(model.eval()(inputs), model(inputs))
    # Half of the numbers of embeddings, at each position by itself, the others doubled.
    seen: list[Tensor] = []
    model.train().passage_reader.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(inputs._replace(passage=torch.full_like(inputs.passage, 3)))
    data = seen[0].data / model.embedding.weight[3]
    assert set(data.detach().round(decimals=6).unique().tolist()) == {0.0, 2.0}
    assert not data[0].equal(data[1])


def test_it_learns_a_small_corpus() -> None:
    torch.manual_seed(0)
    sizes = {"batch_size": 8, "train_size": 24, "val_size": 10, "test_size": 10}
    questions = SyntheticClozeQA(**sizes, passage_sentences=2, num_entities=4, entities="file")
    model = AttentiveReader(questions.vocabulary, 16, dropout=0.0, lr=0.02)
    run = quiet_trainer(max_epochs=40, check_val_every_n_epoch=40)
    run.fit(model, datamodule=questions)
    names = {"nll", "error", "entity_error", "passage_error"}
    logged = {name for name in run.callback_metrics if name.startswith("val_")}
    assert logged == {f"val_{name}" for name in names}
    batches = questions.train_eval_dataloader()
    scores = [model.train().per_example(batch)["error"] for batch in batches]
    assert torch.cat(scores).mean() < 0.1


def test_an_answer_is_an_entity_of_the_passage() -> None:
    model = small()
    assert model.answer("@entity3 sings .", "@placeholder sings") == "@entity3"
    passage, query = "@entity1 said @entity4 sings .", "@placeholder sings"
    numbers = model.vocabulary.numbers
    inputs = Inputs(
        torch.tensor([numbers(passage.split())]), torch.tensor([5]),
        torch.tensor([numbers(query.split())]), torch.tensor([2]),
    )  # fmt: skip
    scores = model(inputs)[0]
    first, second = (float(scores[numbers([e])[0]]) for e in ("@entity1", "@entity4"))
    assert model.answer(passage, query) == ("@entity1" if first > second else "@entity4")
    for passage, query in (("sings .", "@placeholder"), ("@entity9 sings", "@placeholder"),
                           ("@entity1", " ")):  # fmt: skip
        refuses("@entity0", model.answer, passage, query)
    # In training too it is that of evaluation.
    model = small(dropout=0.5).train()
    model.query_reader.eval()
    given = "@entity1 said @entity3 sings .", "@placeholder sings"
    answers = {model.answer(*given) for _ in range(40)}
    assert (model.training, model.query_reader.training) == (True, False)
    assert answers == {model.eval().answer(*given)}


def test_default_vocabulary_and_predicted_words() -> None:
    defaults = AttentiveReader(hidden_size=4)
    assert defaults.hparams["vocabulary"][:2] == ["@placeholder", "@entity0"]
    assert int(defaults.entities.sum()) == 100
    model, (inputs, answers) = small(), make_batch()
    found = model.predict_step((inputs, answers), 0)
    assert found["answer"] == list(ANSWERS)
    probability, number = model(inputs).softmax(-1).max(-1)
    assert found["prediction"] == model.vocabulary.words(number.tolist())
    assert torch.allclose(found["probability"], probability)
