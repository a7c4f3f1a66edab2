"""Skip-thought vectors (Kiros et al. 2015; paper, section 6.3)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn import init
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_sequence

from ln_zoo.layers import GRU, orthogonal_
from ln_zoo.models.arguments import check_vocabulary
from ln_zoo.models.base import ZooModule
from ln_zoo.models.legacy_adam import AdamBiasCorrection, adam
from ln_zoo.models.ratios import add_ratios, log_ratios
from ln_zoo.models.word_softmax import SoftmaxName, word_softmax
from ln_zoo.models.word_vectors import Expansion, expand
from ln_zoo.norms import LayerNorm, Norm, batch_dependent, from_config
from ln_zoo.norms.modes import evaluation_mode
from ln_zoo.utils.checks import check_at_least, check_choice, check_positive
from ln_zoo.utils.files import UserFile
from ln_zoo.utils.vocabulary import EOS, UNK, Vocabulary

Encoder = Literal["uni", "bi"]
Conditioning = Literal["init", "every_step"]
Reduction = Literal["sum", "token_mean"]

#: Bound of initial input weights and embeddings, as in the released code.
_SCALE = 0.1
_METRICS = ("token_nll", "next_nll", "previous_nll")


class _DecoderTargets(NamedTuple):
    """States and targets of a decoder for M tokens, and the sentence of each; int64."""

    states: Tensor  # (M, D)
    targets: Tensor  # (M,)
    sentences: Tensor  # (M,)


class SkipThought(ZooModule):
    """Encode a sentence as a vector that predicts the previous and the next sentence.

    The final state of a GRU over the words is the sentence's vector. Two decoders, GRUs that start
    from that state, predict the next and the previous sentence word by word (Kiros et al. 2015,
    arXiv 1506.06726, section 2). Layer normalisation acts in all three (paper's supplement, eq.
    26-28), not on embeddings, states and logits.

    A batch is a tuple of the sources, the next and the previous sentences, each a pair: word
    indices, int64 (B, T), padded with `ln_zoo.utils.vocabulary.EOS` after the sentence; and lengths
    (B,), including one `EOS`, which the encoder reads and the decoders predict. A decoder's first
    input is a zero vector. Padding is skipped. Losses are logged in nats per token: ``token_nll``
    over both neighbours, ``next_nll`` and ``previous_nll`` of each.

    Differences from the released code behind the paper's runs: biases are added after normalisation
    only, as in eq. 26-28, where the code has others inside it too (``prenorm_bias``); the candidate
    has a bias on its recurrent term without normalisation too, as in torch; log p has no 1e-8
    added. The code clips the gradient norm to 5: ``gradient_clip_val: 5.0``.

    Args:
        vocabulary: the words, without the two special tokens, or a file with one per line. Default
            on the command line: the vocabulary of the data.
        hidden_size: size D of a sentence's vector, and of each decoder's state.
        embedding_features: size E of a word's vector, shared by encoder and decoders.
        norm: the normalisation, or its ``class_path``/``init_args`` dict; default `LayerNorm`.
        encoder: ``"uni"``, or ``"bi"``: half of the vector comes from a GRU that reads the sentence
            backwards.
        conditioning: input of the vector to decoders: as their initial state (``"init"``, the
            released code and the paper), or also at ``"every_step"``, concatenated with the
            previous word (Kiros et al., eq. 5-7; normalised together with it).
        prenorm_bias: add a bias inside the norm of each GRU's input, LN(W x + b), as the released
            code. It is the last column of the input weights, which reads a constant 1, and starts
            at 0.
        softmax: ``"full"``; ``"adaptive"`` (`ln_zoo.models.word_softmax.AdaptiveSoftmax`) or
            ``"sampled"`` (`ln_zoo.models.word_softmax.SampledSoftmax`) for large vocabularies.
        softmax_samples: words sampled per batch by the sampled softmax.
        softmax_cutoffs: starts of the clusters of the adaptive softmax; default: a tenth and a half
            of the vocabulary.
        loss_reduction: nats summed over all tokens of a batch (``"sum"``, the released code), or
            their mean (``"token_mean"``). With Adam they differ only in clipping, which affects
            every update of the sum and few of the mean.
        lr: learning rate of Adam.
        adam_bias_correction: ``"standard"``, or ``"legacy"`` as in the released code; see
            `ln_zoo.models.legacy_adam.LegacyAdam`.

    Raises:
        ValueError: for a missing or invalid `Vocabulary`, an odd ``hidden_size`` with
            ``encoder="bi"``, or cutoffs that do not increase within the vocabulary.

    Example:
        >>> model = SkipThought(["the", "cat", "sat"], hidden_size=8, embedding_features=4)
        >>> model.encode(["the cat sat", "the dog"]).shape
        (2, 8)
        >>> sentence = (torch.tensor([[2, 3, 4, 0]]), torch.tensor([4]))
        >>> model.loss((sentence, sentence, sentence)).shape
        torch.Size([])
    """

    input_kinds = ("sentence triples", "sentences")
    pipeline_tag = "feature-extraction"
    #: Words outside the vocabulary with vectors; see `expand_vocabulary`.
    expansion: Expansion | None = None
    _warned = False  # of sentences without a known word

    @classmethod
    def card_example(cls, preprocessing: Mapping[str, Any]) -> str:
        return (
            'sentences = ["it rained all day .", "the dog barked ."]\n'
            "vectors = torch.from_numpy(model.encode(sentences))\n"
            "print(vectors @ vectors.T)  # cosine similarity of each pair\n"
        )

    def __init__(
        self,
        vocabulary: list[str] | UserFile | None = None,
        hidden_size: int = 2400,
        embedding_features: int = 620,
        norm: Norm | None = None,
        encoder: Encoder = "uni",
        conditioning: Conditioning = "init",
        prenorm_bias: bool = False,
        softmax: SoftmaxName = "full",
        softmax_samples: int = 1000,
        softmax_cutoffs: list[int] | None = None,
        loss_reduction: Reduction = "sum",
        lr: float = 2e-4,
        adam_bias_correction: AdamBiasCorrection = "standard",
    ) -> None:
        super().__init__()
        norm = LayerNorm() if norm is None else from_config(norm)
        check_choice("encoder", encoder, get_args(Encoder))
        check_choice("softmax", softmax, get_args(SoftmaxName))
        check_at_least(1, hidden_size=hidden_size, embedding_features=embedding_features)
        check_at_least(1, softmax_samples=softmax_samples)
        self.vocabulary = words = _read_vocabulary(vocabulary)
        self.hidden_size, self.conditioning = hidden_size, conditioning
        self.prenorm_bias, self.loss_reduction = prenorm_bias, loss_reduction
        self.lr, self.adam_bias_correction = lr, adam_bias_correction
        self._check_arguments()
        if softmax_cutoffs is None:
            softmax_cutoffs = [words.size // 10, words.size // 2] if softmax == "adaptive" else []
        self.save_hyperparameters()
        self.resolve_hyperparameters(norm, vocabulary=list(words), softmax_cutoffs=softmax_cutoffs)
        directions = 2 if encoder == "bi" else 1
        if hidden_size % directions:
            raise ValueError(f'encoder="bi" needs an even hidden_size, got {hidden_size}')
        self.embedding = nn.Embedding(words.size, embedding_features)
        read = embedding_features + prenorm_bias
        self.encoder = GRU(
            read, hidden_size // directions, batch_first=True, bidirectional=encoder == "bi",
            norm=norm,
        )  # fmt: skip
        read += hidden_size if conditioning == "every_step" else 0
        self.next_decoder = GRU(read, hidden_size, norm=norm)
        self.previous_decoder = GRU(read, hidden_size, norm=norm)
        sizes = hidden_size, words.size
        self.softmax = word_softmax(softmax, *sizes, softmax_samples, softmax_cutoffs)
        self.reset_parameters()
        for stage in ("val", "test"):
            add_ratios(self, stage, _METRICS)

    def _check_arguments(self) -> None:
        check_choice("conditioning", self.conditioning, get_args(Conditioning))
        check_choice("loss_reduction", self.loss_reduction, get_args(Reduction))
        check_choice(
            "adam_bias_correction", self.adam_bias_correction, get_args(AdamBiasCorrection)
        )
        check_positive(lr=self.lr)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Re-initialise weights, as the released code does, and the norm.

        Embeddings, input and softmax weights are uniform between -0.1 and 0.1; the recurrent
        weights of each gate, and square input weights, are an orthogonal matrix; biases are 0.
        """
        init.uniform_(self.embedding.weight, -_SCALE, _SCALE)
        self.softmax.reset_parameters()
        for layer in (self.encoder, self.next_decoder, self.previous_decoder):
            layer.reset_parameters()
            for name, parameter in layer.named_parameters():
                drawn = parameter.data
                if name.startswith("weight_ih") and self.prenorm_bias:
                    init.zeros_(drawn[:, -1])
                    drawn = drawn[:, :-1]
                square = name.startswith("weight") and drawn.shape[1] == layer.hidden_size
                if name.startswith("weight_hh") or square:
                    for block in drawn.chunk(3):
                        orthogonal_(block)
                elif name.startswith("weight_ih"):
                    init.uniform_(drawn, -_SCALE, _SCALE)
                elif name.startswith("bias"):
                    init.zeros_(drawn)
            layer.reset_norm()

    # The network

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Sentence vectors (B, D) of word indices (B, T) and lengths (B,), before scaling."""
        return self._read(self.embedding(tokens), lengths)

    def _read(self, vectors: Tensor, lengths: Tensor) -> Tensor:
        longest = int(lengths.max())
        vectors = self._inputs(vectors)
        if int(lengths.min()) == longest:
            _, h = self.encoder(vectors[:, :longest])
        else:
            packed = pack_padded_sequence(vectors, lengths.cpu(), True, enforce_sorted=False)
            _, h = self.encoder(packed)
        last: Tensor = h.transpose(0, 1).flatten(1)
        return last

    def _decode(
        self, decoder: GRU, vectors: Tensor, tokens: Tensor, lengths: Tensor
    ) -> _DecoderTargets:
        """The decoder's states before each target token, in packed order."""
        lengths = lengths.cpu()
        targets, sizes, order, _ = pack_padded_sequence(tokens, lengths, True, enforce_sorted=False)
        assert order is not None
        sentences = torch.cat([order[:size] for size in sizes.tolist()])
        # There is no word before the first.
        before = self.embedding(tokens[:, : int(lengths.max()) - 1])
        inputs = F.pad(before, (0, 0, 1, 0))
        if self.conditioning == "every_step":
            given = vectors.unsqueeze(1).expand(-1, inputs.shape[1], -1)
            inputs = torch.cat([inputs, given.to(inputs.dtype)], -1)
        inputs = self._inputs(inputs)
        told: Tensor | PackedSequence = inputs.transpose(0, 1)
        if not self._decodes_padding(decoder, vectors):
            told = pack_padded_sequence(inputs, lengths, True, enforce_sorted=False)
        states, _ = decoder(told, vectors.unsqueeze(0))
        if not isinstance(states, PackedSequence):
            states = pack_padded_sequence(states, lengths, enforce_sorted=False)
        return _DecoderTargets(states.data, targets, sentences)

    @staticmethod
    def _decodes_padding(decoder: GRU, vectors: Tensor) -> bool:
        """Whether a decoder also runs over padding: on a GPU, equal steps are one launch."""
        return vectors.is_cuda and not batch_dependent(decoder)

    def _inputs(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 1), value=1.0) if self.prenorm_bias else x

    def _decode_both(self, batch: Any) -> tuple[_DecoderTargets, _DecoderTargets]:
        source, following, preceding = batch
        vectors = self(*source)
        return (
            self._decode(self.next_decoder, vectors, *following),
            self._decode(self.previous_decoder, vectors, *preceding),
        )

    # Losses

    def loss(self, batch: Any) -> Tensor:
        """The loss of a batch, a scalar."""
        total, count = self._loss(batch)
        return total if self.loss_reduction == "sum" else total / count

    def per_example(self, batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """Nats and tokens of each triple for each metric, float64 (B,)."""
        examples = len(batch[0][1])
        parts = []
        for told in self._decode_both(batch):
            nll = self.softmax.nll(told.states, told.targets).double()
            sums = nll.new_zeros(examples).index_add_(0, told.sentences, nll)
            parts.append((sums, torch.bincount(told.sentences, minlength=examples).double()))
        (following, steps), (preceding, steps_before) = parts
        both = following + preceding, steps + steps_before
        return dict(zip(_METRICS, (both, *parts), strict=True))

    def _loss(self, batch: Any) -> tuple[Tensor, int]:
        told = self._decode_both(batch)
        # One product for both decoders.
        states = torch.cat([part.states for part in told])
        targets = torch.cat([part.targets for part in told])
        return self.softmax.loss(states, targets), len(targets)

    # Training

    def setup(self, stage: str) -> None:
        check_vocabulary(self.vocabulary, self.trainer)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        total, count = self._loss(batch)
        examples = len(batch[0][1])
        self.log("train_token_nll", total.detach() / count, prog_bar=True, batch_size=examples)
        if self.loss_reduction == "token_mean":
            return total / count
        # Several processes average their gradients.
        return total * self.trainer.world_size

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        if isinstance(batch[0], list):
            sentences, eos = batch
            return {"vector": torch.from_numpy(self.encode(sentences, len(sentences), eos))}
        scores = self.per_example(batch)
        found = {}
        for name in ("next", "previous"):
            found[f"{name}_nats"], found[f"{name}_tokens"] = scores[f"{name}_nll"]
        return found

    def _evaluate(self, stage: str, batch: Any) -> None:
        log_ratios(self, stage, self.per_example(batch), len(batch[0][1]))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return adam(self, self.lr, self.adam_bias_correction)

    # Sentences

    @torch.no_grad()
    def encode(
        self,
        sentences: Sequence[str],
        batch_size: int = 128,
        eos: bool = True,
        normalize: bool = True,
        progress: bool = False,
    ) -> np.ndarray:
        """Vectors of sentences, float32 (n, D), in evaluation mode.

        Sentences of similar length are encoded together, without truncation. Words outside the
        vocabulary and its expansion are read as `ln_zoo.utils.vocabulary.UNK`.

        Args:
            sentences: words separated by white space, in the form of the training text.
            batch_size: sentences per batch; changes vectors by rounding only.
            eos: read the end of the sentence, as in training. The released code omits it for MR,
                CR, SUBJ and MPQA, and reads it for SICK.
            normalize: scale vectors to unit norm, as the released code does.
            progress: show a progress bar.

        Raises:
            TypeError: for a single string.
            ValueError: for a sentence without a word.

        Warns:
            UserWarning: once, if all words of a sentence are unknown.

        Example:
            >>> model = SkipThought(["rain"], hidden_size=8, embedding_features=4)
            >>> model.encode(["rain rain", "rain"]).shape
            (2, 8)
        """
        if isinstance(sentences, str):
            raise TypeError(f"sentences must be several strings, got the one string {sentences!r}")
        numbers = [self._numbers(sentence.split()) for sentence in sentences]
        unknown = 0
        for i, found in enumerate(numbers):
            if not found:
                raise ValueError(f"sentence {i} of {len(numbers)} has no words: leave it out")
            unknown += set(found) == {UNK}
            if eos:
                found.append(EOS)
        if unknown and not self._warned:
            self._warned = True
            warnings.warn(
                f"{unknown} of {len(numbers)} sentences have no word in the vocabulary: their "
                "vectors encode only their lengths",
                stacklevel=2,
            )
        vectors = np.zeros((len(numbers), self.hidden_size), np.float32)
        order = sorted(range(len(numbers)), key=lambda i: len(numbers[i]))
        steps = range(0, len(order), batch_size)
        with evaluation_mode(self):
            for begin in track(steps, "encoding", disable=not progress):
                rows = order[begin : begin + batch_size]
                tokens = [torch.tensor(numbers[i]) for i in rows]
                lengths = torch.tensor([len(row) for row in tokens])
                read = self._vectors(pad_sequence(tokens, True, EOS).to(self.device))
                states = self._read(read, lengths).float()
                vectors[rows] = (F.normalize(states) if normalize else states).cpu().numpy()
        return vectors

    def expand_vocabulary(self, path: str | os.PathLike[str]) -> int:
        """Extend the vocabulary of `encode` by external word vectors; returns how many are new.

        Vectors are mapped into the space of the model's own by least squares with an intercept,
        fitted on common words (Kiros et al. 2015, section 2.2, and the released code). Words of the
        vocabulary keep their own vectors. Training and checkpoints are not affected.

        ``path`` is a file for `ln_zoo.utils.vocabulary.read_word_vectors`.

        Raises:
            OSError: if the file cannot be read.
            ValueError: as `ln_zoo.models.word_vectors.expand`.
        """
        self.expansion = expand(self.vocabulary, self.embedding.weight, path)
        return len(self.expansion.rows)

    def _numbers(self, words: Sequence[str]) -> list[int]:
        """Word indices; from V on for words of the expansion."""
        numbers = self.vocabulary.numbers(words)
        if self.expansion is None:
            return numbers
        rows, size = self.expansion.rows, self.vocabulary.size
        return [
            size + rows[word] if number == UNK and word in rows else number
            for word, number in zip(words, numbers, strict=True)
        ]

    def _vectors(self, tokens: Tensor) -> Tensor:
        if self.expansion is None:
            return self.embedding(tokens)
        beyond = tokens >= self.vocabulary.size
        vectors: Tensor = self.embedding(tokens.masked_fill(beyond, UNK))
        rows = (tokens[beyond] - self.vocabulary.size).cpu()
        vectors[beyond] = self.expansion.vectors[rows].to(vectors)
        return vectors


def _read_vocabulary(given: list[str] | str | None) -> Vocabulary:
    if given is None:
        raise ValueError(
            "SkipThought needs a vocabulary: give a list of words or a text file with one word per "
            "line; on the command line, text data bring their own"
        )
    return Vocabulary.of(given)


class CombinedSkipThoughts:
    """Concatenated vectors of several models: combine-skip (Kiros et al. 2015, section 3).

    Each model's part has unit norm. The source combines a unidirectional and a bidirectional model,
    trained separately.

    Raises:
        ValueError: for fewer than two models.

    Example:
        >>> one = SkipThought(["rain"], hidden_size=8, embedding_features=4)
        >>> two = SkipThought(["rain"], hidden_size=6, embedding_features=4, encoder="bi")
        >>> CombinedSkipThoughts(one, two).encode(["rain"]).shape
        (1, 14)
    """

    def __init__(self, *models: SkipThought) -> None:
        if len(models) < 2:
            raise ValueError(f"give at least two models to combine, got {len(models)}")
        self.models = models
        self.vocabulary = models[0].vocabulary

    def encode(
        self,
        sentences: Sequence[str],
        batch_size: int = 128,
        eos: bool = True,
        progress: bool = False,
    ) -> np.ndarray:
        """As `SkipThought.encode`, (n, sum of all D)."""
        return np.hstack(
            [model.encode(sentences, batch_size, eos, progress=progress) for model in self.models]
        )
