"""Split English prose as the released skip-thoughts code; needs nltk.

Punkt for sentences and the Penn Treebank tokeniser for words (``do n't``, ``it 's``, quotation
marks as two backquotes and two apostrophes).
"""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any

# A fixed list for prose: Punkt would learn abbreviations from the text or download them.
_TITLES = "mr mrs ms dr st messrs mme mlle prof rev hon capt col gen lieut lt maj sergt sgt gov"
_ENDS_IN_TITLE = re.compile(rf"\b(?:{_TITLES.replace(' ', '|')})\.$", re.IGNORECASE)
_OTHERS = "esq jr sr vs viz i.e e.g cf a.m p.m b.c a.d u.s u.k jan feb aug sept oct nov"


def split_sentences(text: str) -> list[str]:
    """Split a paragraph into sentences.

    Boundaries are Punkt's (Kiss and Strunk, Computational Linguistics 32, 2006), with a fixed list
    of abbreviations. A part that begins in lower case continues the sentence, as after direct
    speech.
    """
    found: list[str] = []
    for piece in _splitter().tokenize(text):
        # Punkt splits after the title in 'Mr. Brown!" she said'.
        if found and (piece[:1].islower() or _ENDS_IN_TITLE.search(found[-1])):
            found[-1] += f" {piece}"
        else:
            found.append(piece)
    return found


def split_words(sentence: str) -> list[str]:
    """Split a sentence into words and punctuation, as in the Penn Treebank."""
    return _tokenizer().tokenize(sentence)


def version() -> str:
    """Version of nltk, which determines the words of a text."""
    return str(_nltk("nltk").__version__)


@functools.cache
def _splitter() -> Any:
    punkt = _nltk("nltk.tokenize.punkt")
    parameters = punkt.PunktParameters()
    parameters.abbrev_types = set(f"{_TITLES} {_OTHERS}".split())
    return punkt.PunktSentenceTokenizer(parameters)


@functools.cache
def _tokenizer() -> Any:
    return _nltk("nltk.tokenize").NLTKWordTokenizer()


def _nltk(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "nltk":
            raise
        raise ModuleNotFoundError(
            "dividing text into sentences and words needs nltk: install it (pip install nltk, or "
            "'ln-zoo[text]'), or give text with one tokenised sentence per line",
            name="nltk",
        ) from None
