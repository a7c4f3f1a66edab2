"""The attentive reader, which answers questions about a passage (paper, section 6.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn import init
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ln_zoo.layers import LSTM, Linear, orthogonal_
from ln_zoo.models.arguments import check_vocabulary
from ln_zoo.models.classifier import Classifier
from ln_zoo.norms import LayerNorm, Norm, from_config
from ln_zoo.norms.modes import evaluation_mode
from ln_zoo.utils.checks import check_at_least, check_choice, check_probability
from ln_zoo.utils.files import UserFile
from ln_zoo.utils.vocabulary import Vocabulary

Statistics = Literal["masked", "all"]
InitialState = Literal["zeros", "learned"]

_ORTHOGONAL_SCALE = 0.05
_TIED_SEED = 0


class Inputs(NamedTuple):
    """N passages with a query each."""

    passage: Tensor  #: word indices, (N, T), padded with any index
    passage_lengths: Tensor  #: (N,), at least 1
    query: Tensor  #: word indices, (N, S)
    query_lengths: Tensor  #: (N,), at least 1


class AttentiveReader(Classifier):
    r"""Predict the entity that is missing in a query about a passage.

    The attentive reader of Hermann et al. (2015, arXiv 1506.03340), unidirectional, as in the code
    of recurrent batch normalisation (Cooijmans et al. 2017, arXiv 1603.09025, section 5.4), which
    the paper used. Two LSTMs share word embeddings and read passage and query. With h_t the states
    of the passage, u the final state of the query, and d the size of all:

    .. math:: \begin{aligned}
        p_t &= \tanh(W_a h_t + b_a + W_u u + (M h_t) \cdot (M u)) \\
        a &= \operatorname{softmax}_t(v \cdot p_t) \\
        r &= \sum_t a_t h_t \\
        g &= \tanh(W_r r + W_g u + b_g + W_m \operatorname{mean}_t h_t) \\
        \text{answer} &= \operatorname{softmax}(W_o g + b_o)
        \end{aligned}

    The similarity of p is added to each unit, and answers are over the whole vocabulary.

    The norm acts in both LSTMs (layer norm: the paper's eq. 20-22); with ``everywhere`` also on
    W_a h_t, W_u u, W_r r, W_g u and W_m mean ("BN-everywhere"; gains start at the norm's ``gain``,
    0.1 in the source).

    Initial values are the source's: square matrices of LSTM gates, M and W_a 0.05 times an
    orthogonal matrix; others uniform within sqrt(6 / (inputs + outputs + 1)), v within 1 / sqrt(d);
    all biases 0. The source clips the gradient norm to 10: ``gradient_clip_val: 10.0``.
    Differences: LSTMs have torch's two biases, where the layer norm code adds the same one twice;
    initial states are zeros by default; matrices are independent unless ``tied_init``.

    A batch is ``(inputs, answers)``: `Inputs` and word indices (N,). Metrics: ``nll`` and ``error``
    over the whole vocabulary, as in the source; ``entity_error`` among all entities,
    ``passage_error`` among the passage's.

    Args:
        vocabulary: the words, or a text file with one word per line; entities are ``@entity0``,
            ``@entity1``, ... Default: ``@placeholder`` and a hundred entities.
        hidden_size: size d of embeddings, states, attention and joint layer.
        dropout: dropout probability of embeddings and g.
        norm: the normalisation, or its ``class_path``/``init_args`` dict; default `LayerNorm`.
        everywhere: apply the norm outside the LSTMs as well.
        statistics: positions for statistics of batch-dependent norms: ``"masked"``, real tokens, or
            ``"all"`` of the padded batch, as in the source. Then outputs depend on the padding.
        initial_state: of the LSTMs: ``"zeros"``, or ``"learned"`` h, initially zero, as in the
            source. Under layer norm, initial gradients of this h are about 1 / sqrt(eps) times
            larger than others; clipping then shrinks all others.
        tied_init: draw every matrix from the same seed, as the source does: gates, inputs and
            states, passage and query start with equal matrices.
        lr: learning rate of Adam.

    Example:
        >>> model = AttentiveReader(["@entity0", "@entity1", "@placeholder", "sings"], 8)
        >>> passage, query = torch.tensor([[3, 5, 2, 5]]), torch.tensor([[4, 5]])
        >>> inputs = Inputs(passage, torch.tensor([4]), query, torch.tensor([2]))
        >>> model(inputs).shape, model.attention(inputs).shape
        (torch.Size([1, 6]), torch.Size([1, 4]))
    """

    input_kinds = ("cloze questions",)
    pipeline_tag = "question-answering"
    metrics = ("nll", "error", "entity_error", "passage_error")
    entities: Tensor

    @classmethod
    def card_example(cls, preprocessing: Mapping[str, Any]) -> str:
        return (
            'passage = "@entity1 met @entity0 in rome . @entity2 was late ."\n'
            'print(model.answer(passage, "@placeholder met @entity0"))  # one of the entities\n'
        )

    def __init__(
        self,
        vocabulary: list[str] | UserFile | None = None,
        hidden_size: int = 240,
        dropout: float = 0.5,
        norm: Norm | None = None,
        everywhere: bool = False,
        statistics: Statistics = "masked",
        initial_state: InitialState = "zeros",
        tied_init: bool = False,
        lr: float = 8e-5,
    ) -> None:
        super().__init__(lr, "adam")
        norm = LayerNorm() if norm is None else from_config(norm)
        check_at_least(1, hidden_size=hidden_size)
        check_probability(dropout=dropout)
        check_choice("statistics", statistics, get_args(Statistics))
        check_choice("initial_state", initial_state, get_args(InitialState))
        if vocabulary is None:
            vocabulary = ["@placeholder", *(f"@entity{i}" for i in range(100))]
        self.vocabulary = Vocabulary.of(vocabulary)
        self.save_hyperparameters()
        self.resolve_hyperparameters(norm, vocabulary=list(self.vocabulary))
        self._skips_padding = statistics == "masked" and norm.batch_dependent
        self.tied_init = tied_init
        d, size = hidden_size, self.vocabulary.size
        self.embedding = nn.Embedding(size, d)
        self.dropout = nn.Dropout(dropout)
        self.passage_reader = LSTM(d, d, batch_first=True, norm=norm)
        self.query_reader = LSTM(d, d, batch_first=True, norm=norm)
        self.initial_states: nn.Parameter | None = None
        if initial_state == "learned":
            self.initial_states = nn.Parameter(torch.empty(2, d))
        outside = norm if everywhere else None
        self.similarity = Linear(d, d, bias=False)
        self.attend_states = Linear(d, d, norm=outside)
        self.attend_query = Linear(d, d, bias=False, norm=outside)
        self.attend_score = Linear(d, 1, bias=False)
        self.join_reading = Linear(d, d, norm=outside)
        self.join_query = Linear(d, d, bias=False, norm=outside)
        self.join_mean = Linear(d, d, bias=False, norm=outside)
        self.output = Linear(d, size)
        is_entity = [word.startswith("@entity") for word in self.vocabulary.words(range(size))]
        if not any(is_entity):
            raise ValueError(
                "the vocabulary has no entity (@entity0, @entity1, ...) to answer with"
            )
        # Not in checkpoints: derived from the vocabulary.
        self.register_buffer("entities", torch.tensor(is_entity), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Re-initialise weights, as the source does, and the norm."""
        for reader in (self.passage_reader, self.query_reader):
            reader.reset_parameters()
            for kind in ("ih", "hh"):
                for gate in reader.get_parameter(f"weight_{kind}_l0").chunk(4):
                    self._init_orthogonal(gate)
                init.zeros_(reader.get_parameter(f"bias_{kind}_l0"))
            reader.reset_norm()
        if self.initial_states is not None:
            init.zeros_(self.initial_states)
        self._init_uniform(self.embedding.weight)
        layers = [module for module in self.children() if isinstance(module, Linear)]
        for layer in layers:
            layer.reset_parameters()
            if layer in (self.similarity, self.attend_states):
                self._init_orthogonal(layer.weight)
            elif layer is self.attend_score:
                bound = 1 / math.sqrt(layer.in_features)
                init.uniform_(layer.weight, -bound, bound, generator=self._generator())
            else:
                self._init_uniform(layer.weight)
            if layer.bias is not None:
                init.zeros_(layer.bias)
            layer.reset_norm()

    def _generator(self) -> torch.Generator | None:
        if not self.tied_init:
            return None
        return torch.Generator(self.embedding.weight.device).manual_seed(_TIED_SEED)

    def _init_orthogonal(self, weight: Tensor) -> None:
        orthogonal_(weight, generator=self._generator()).mul_(_ORTHOGONAL_SCALE)

    def _init_uniform(self, weight: Tensor) -> None:
        bound = math.sqrt(6 / (sum(weight.shape) + 1))
        init.uniform_(weight, -bound, bound, generator=self._generator())

    # The network

    def forward(self, inputs: Inputs) -> Tensor:
        """Logits (N, V) of the answer."""
        logits: Tensor = self.output(self.forward_features(inputs))
        return logits

    def forward_features(self, inputs: Inputs) -> Tensor:
        """The joint layer g (N, d) of passages and queries, after dropout in training."""
        features, _ = self._read(inputs)
        return features

    def attention(self, inputs: Inputs) -> Tensor:
        """Attention to each token of the passage, (N, T); 0 for padding."""
        _, attention = self._read(inputs)
        return attention

    @torch.no_grad()
    def answer(self, passage: str, query: str) -> str:
        """The predicted entity that is missing in the query, in evaluation mode.

        Args:
            passage: lower-case words separated by white space; entities are ``@entity0``,
                ``@entity1``, ...
            query: likewise, with ``@placeholder`` in place of an entity.

        Raises:
            ValueError: if the passage has no entity of the vocabulary, or the query no word.

        Example:
            >>> AttentiveReader(hidden_size=4).answer("@entity3 sings .", "@placeholder sings")
            '@entity3'
        """
        words = self.vocabulary.numbers(passage.split())
        asked = self.vocabulary.numbers(query.split())
        if not self.entities[words].any() or not asked:
            raise ValueError(
                "the passage must have an entity of the vocabulary (@entity0, ...) and the query a "
                f"word, got {passage[:60]!r} and {query[:60]!r}"
            )
        tokens, length, query_tokens, query_length = (
            torch.tensor([a], device=self.entities.device)
            for a in (words, len(words), asked, len(asked))
        )
        inputs = Inputs(tokens, length, query_tokens, query_length)
        with evaluation_mode(self):
            logits = self(inputs).masked_fill(~self._candidates(inputs), -math.inf)
        (found,) = self.vocabulary.words(logits.argmax(-1).tolist())
        return found

    def _read(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        passage, passage_lengths, query, query_lengths = inputs
        h, _ = self._states(self.passage_reader, 0, passage, passage_lengths)
        _, u = self._states(self.query_reader, 1, query, query_lengths)
        lengths = passage_lengths.unsqueeze(1).to(h.device)
        mask = torch.arange(h.shape[1], device=h.device) < lengths
        # (M h) . (M u) = h . (M^T M u): one product per passage instead of per token.
        probe = self.similarity(u) @ self.similarity.weight
        similarity = h @ probe.unsqueeze(2)
        states = self._of_tokens(self.attend_states, h, mask)
        p = torch.tanh(states + self.attend_query(u).unsqueeze(1) + similarity)
        scores = self.attend_score(p).squeeze(2)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        attention = scores.masked_fill(~mask, -math.inf).softmax(1)
        weights = torch.stack([attention, mask.to(attention.dtype) / lengths], 1)
        reading, mean = (weights.to(h.dtype) @ h).unbind(1)
        joint = self.join_reading(reading) + self.join_query(u) + self.join_mean(mean)
        return self.dropout(torch.tanh(joint)), attention

    def _states(
        self, reader: LSTM, which: int, tokens: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """States (N, T, d) of a reader, and the final state of each example (N, d)."""
        x = self.dropout(self.embedding(tokens))
        start = None
        if self.initial_states is not None:
            h = self.initial_states[which].expand(1, tokens.shape[0], -1).contiguous()
            start = (h, torch.zeros_like(h))
        if not self._skips_padding:
            # Padding does not affect earlier states, and torch's padded LSTM is three times as fast
            # as packed.
            states, _ = reader(x, start)
            rows = torch.arange(tokens.shape[0], device=states.device)
            return states, states[rows, lengths.to(states.device) - 1]
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, (last, _) = reader(packed, start)
        padded, _ = pad_packed_sequence(states, batch_first=True, total_length=tokens.shape[1])
        return padded, last[0]

    def _of_tokens(self, layer: Linear, h: Tensor, mask: Tensor) -> Tensor:
        """Apply a layer to each state, with statistics over real tokens if padding is skipped."""
        if not self._skips_padding:
            return layer(h)
        rows = mask.flatten().nonzero().squeeze(1)
        found = layer(h.flatten(0, 1).index_select(0, rows))
        out = found.new_zeros(mask.numel(), found.shape[1]).index_copy(0, rows, found)
        return out.view_as(h)

    # Training

    def setup(self, stage: str) -> None:
        super().setup(stage)
        check_vocabulary(self.vocabulary, self.trainer)

    def per_example(self, batch: tuple[Inputs, Tensor]) -> dict[str, Tensor]:
        inputs, answers = batch
        logits = self(inputs).double()
        candidates = self._candidates(inputs)
        among = torch.where(self.entities, logits, -math.inf)
        in_passage = torch.where(candidates, logits, -math.inf)
        # A passage without an entity has no correct answer.
        found = in_passage.argmax(-1).masked_fill(~candidates.any(-1), -1)
        return {
            "nll": F.cross_entropy(logits, answers, reduction="none"),
            "error": (logits.argmax(-1) != answers).double(),
            "entity_error": (among.argmax(-1) != answers).double(),
            "passage_error": (found != answers).double(),
        }

    def predict_step(self, batch: tuple[Inputs, Tensor], batch_idx: int) -> dict[str, Any]:
        inputs, answers = batch
        probability, prediction = self(inputs).double().softmax(-1).max(-1)
        words = self.vocabulary.words
        return {
            "answer": words(answers.tolist()),
            "prediction": words(prediction.tolist()),
            "probability": probability,
        }

    def _candidates(self, inputs: Inputs) -> Tensor:
        steps = torch.arange(inputs.passage.shape[1], device=inputs.passage.device)
        real = steps < inputs.passage_lengths.unsqueeze(1)
        # Padding counts as EOS, which is not an entity.
        tokens = inputs.passage.masked_fill(~real, 0)
        present = torch.zeros(len(tokens), self.vocabulary.size, dtype=torch.bool).to(tokens.device)
        return present.scatter_(1, tokens, True) & self.entities
