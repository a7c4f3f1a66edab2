"""Datasets as Lightning data modules, and their loaders.

Invalid options raise ValueError, missing files FileNotFoundError. A damaged file, or one of another
format, raises ValueError with its name.
"""

from ln_zoo.data.base import ZooDataModule
from ln_zoo.data.base_captions import CaptionBatch, CaptionedData, CaptionedSet, CaptionSet
from ln_zoo.data.base_cloze import ClozeData, ClozeInputs, ClozeSet
from ln_zoo.data.binarized import BinarizedImageData, ImageSet
from ln_zoo.data.binarized_digits import BinarizedDigits
from ln_zoo.data.binarized_mnist import BinarizedMNIST
from ln_zoo.data.books import Books
from ln_zoo.data.captioned_folder import CaptionedImages
from ln_zoo.data.cloze_folder import ClozeQA
from ln_zoo.data.corpus import Book, Corpus
from ln_zoo.data.digits import Digits
from ln_zoo.data.handwriting import HandwritingBatch, HandwritingData, LineSet
from ln_zoo.data.iam_ondb import IAMOnDB
from ln_zoo.data.images import ImageClassificationData
from ln_zoo.data.loading import BatchLoader, DistributedBatches, ResumableLoader, Tensors
from ln_zoo.data.mnist import MNIST
from ln_zoo.data.pen_lines import PenLines
from ln_zoo.data.sentence_file import SentenceFile
from ln_zoo.data.sentence_triples import BookData, Sentences, SentenceTriples, TripleSet
from ln_zoo.data.synthetic_books import SyntheticBooks
from ln_zoo.data.synthetic_cloze import SyntheticClozeQA
from ln_zoo.data.synthetic_handwriting import SyntheticHandwriting
from ln_zoo.data.synthetic_scenes import SyntheticScenes

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
