"""Datasets as Lightning data modules, and their loaders.

Invalid options raise ValueError, missing files FileNotFoundError. A damaged file, or one of another
format, raises ValueError with its name.
"""

from ln_zoo.data.base import ZooDataModule
from ln_zoo.data.books.books import Books
from ln_zoo.data.books.dataset import BookData, Sentences, SentenceTriples, TripleSet
from ln_zoo.data.books.files import Book, Corpus
from ln_zoo.data.books.sentence_file import SentenceFile
from ln_zoo.data.books.synthetic import SyntheticBooks
from ln_zoo.data.captions.captioned_folder import CaptionedImages
from ln_zoo.data.captions.dataset import CaptionBatch, CaptionedData, CaptionedSet, CaptionSet
from ln_zoo.data.captions.synthetic import SyntheticScenes
from ln_zoo.data.cloze.cloze_folder import ClozeQA
from ln_zoo.data.cloze.dataset import ClozeData, ClozeInputs, ClozeSet
from ln_zoo.data.cloze.synthetic import SyntheticClozeQA
from ln_zoo.data.images.batches import BinarizedImageData, ImageSet
from ln_zoo.data.images.binarized import BinarizedMNIST
from ln_zoo.data.images.binarized_digits import BinarizedDigits
from ln_zoo.data.images.dataset import ImageClassificationData
from ln_zoo.data.images.digits import Digits
from ln_zoo.data.images.mnist import MNIST
from ln_zoo.data.loading import BatchLoader, DistributedBatches, ResumableLoader, Tensors
from ln_zoo.data.pen.dataset import HandwritingBatch, HandwritingData, LineSet
from ln_zoo.data.pen.files import PenLines
from ln_zoo.data.pen.iam_ondb import IAMOnDB
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
