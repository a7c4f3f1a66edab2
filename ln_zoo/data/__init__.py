"""Datasets as Lightning data modules, and their loaders.

Invalid options raise ValueError, missing files FileNotFoundError. A damaged file, or one of another
format, raises ValueError with its name.
"""

from ln_zoo.data.base import ZooDataModule
from ln_zoo.data.books.batches import Sentences, SentenceTriples, TripleSet
from ln_zoo.data.books.dataset import BookData, Books, SentenceFile
from ln_zoo.data.books.files import Book, Corpus
from ln_zoo.data.books.synthetic import SyntheticBooks
from ln_zoo.data.captions.batches import CaptionBatch, CaptionSet
from ln_zoo.data.captions.dataset import CaptionedData, CaptionedImages
from ln_zoo.data.captions.files import CaptionedSet
from ln_zoo.data.captions.synthetic import SyntheticScenes
from ln_zoo.data.cloze.batches import ClozeInputs, ClozeSet
from ln_zoo.data.cloze.dataset import ClozeData, ClozeQA
from ln_zoo.data.cloze.synthetic import SyntheticClozeQA
from ln_zoo.data.images.batches import ImageSet
from ln_zoo.data.images.binarized import BinarizedDigits, BinarizedImageData, BinarizedMNIST
from ln_zoo.data.images.dataset import MNIST, Digits, ImageClassificationData
from ln_zoo.data.loading import BatchLoader, DistributedBatches, ResumableLoader, Tensors
from ln_zoo.data.pen.batches import HandwritingBatch, LineSet
from ln_zoo.data.pen.dataset import HandwritingData, IAMOnDB
from ln_zoo.data.pen.files import PenLines
from ln_zoo.data.pen.synthetic import SyntheticHandwriting

__all__ = [
    "MNIST",
    "BatchLoader",
    "BinarizedDigits",
    "BinarizedImageData",
    "BinarizedMNIST",
    "Book",
    "BookData",
    "Books",
    "CaptionBatch",
    "CaptionSet",
    "CaptionedData",
    "CaptionedImages",
    "CaptionedSet",
    "ClozeData",
    "ClozeInputs",
    "ClozeQA",
    "ClozeSet",
    "Corpus",
    "Digits",
    "DistributedBatches",
    "HandwritingBatch",
    "HandwritingData",
    "IAMOnDB",
    "ImageClassificationData",
    "ImageSet",
    "LineSet",
    "PenLines",
    "ResumableLoader",
    "SentenceFile",
    "SentenceTriples",
    "Sentences",
    "SyntheticBooks",
    "SyntheticClozeQA",
    "SyntheticHandwriting",
    "SyntheticScenes",
    "Tensors",
    "TripleSet",
    "ZooDataModule",
]
