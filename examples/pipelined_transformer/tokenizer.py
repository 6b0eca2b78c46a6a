"""Byte-pair encoding: text to small whole numbers and back, learnt from the text itself."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterable

import numpy as np

_WORD = re.compile(rb" ?[A-Za-z]+|[ \t]+|[\r\n]+|[0-9]| ?[^A-Za-z0-9\s]+|[^\S\n]+")
_BYTES = 256
_WORDS = 10_000

Pair = tuple[int, int]


class Tokenizer:
    """The 256 bytes, and one token for each pair of tokens that was joined.

    Attributes:
        merges: the pairs, in the order in which they were learnt; pair `n` is token `256 + n`.
    """

    def __init__(self, merges: Iterable[Pair] = ()) -> None:
        self.merges = tuple(merges)
        self._ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        self._pieces = [bytes([value]) for value in range(_BYTES)]
        for left, right in self.merges:
            self._pieces.append(self._pieces[left] + self._pieces[right])
        self._words: dict[bytes, list[int]] = {}

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self._pieces)

    def encode(self, text: bytes) -> np.ndarray:
        """The tokens of a text: `i32[n]`."""
        found: list[int] = []
        for word in _WORD.findall(text):
            tokens = self._words.get(word)
            if tokens is None:
                tokens = self._words[word] = self._join(list(word))
            found += tokens
        return np.array(found, np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of some tokens; bytes that are not UTF-8 become the replacement sign."""
        return b"".join(self._pieces[token] for token in tokens).decode("utf-8", "replace")

    def _join(self, tokens: list[int]) -> list[int]:
        """Joins pairs, the first learnt first, until none is left to join."""
        while len(tokens) > 1:
            rank, pair = min((self._ranks.get(p, len(self._ranks)), p) for p in itertools.pairwise(tokens))
            if rank == len(self._ranks):
                break
            tokens = _merged(tokens, pair, _BYTES + rank)
        return tokens


def learn(text: bytes, vocab_size: int) -> Tokenizer:
    """A tokenizer of at most `vocab_size` tokens, whose pairs are the most frequent ones within
    the text's most frequent words.

    Cost: O(merges x distinct words that hold the pair).  Source: Sennrich, Haddow and Birch,
    "Neural machine translation of rare words with subword units" (2016), here on bytes.
    """
    counted = collections.Counter(_WORD.findall(text)).most_common(_WORDS)
    words = [list(word) for word, _ in counted]
    counts = [count for _, count in counted]
    pairs: collections.Counter[Pair] = collections.Counter()
    holders: dict[Pair, set[int]] = collections.defaultdict(set)
    for index, word in enumerate(words):
        for pair in itertools.pairwise(word):
            pairs[pair] += counts[index]
            holders[pair].add(index)
    merges: list[Pair] = []
    while pairs and _BYTES + len(merges) < vocab_size:
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        if pairs[best] < 2:
            break
        for index in sorted(holders.pop(best)):
            word = words[index]
            for pair in itertools.pairwise(word):
                pairs[pair] -= counts[index]
            words[index] = word = _merged(word, best, _BYTES + len(merges))
            for pair in itertools.pairwise(word):
                pairs[pair] += counts[index]
                holders[pair].add(index)
        del pairs[best]
        merges.append(best)
    return Tokenizer(merges)


def _merged(tokens: list[int], pair: Pair, token: int) -> list[int]:
    """The tokens with each occurrence of a pair replaced by one token, from the left."""
    found = []
    index = 0
    while index < len(tokens):
        if tuple(tokens[index : index + 2]) == pair:
            found.append(token)
            index += 2
        else:
            found.append(tokens[index])
            index += 1
    return found
