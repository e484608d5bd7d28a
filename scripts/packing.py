"""Packed documents: rows of one length, with the integers per token that a model with a ring needs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
    """Integers per token, each (B, T) int32.

    Attributes:
      tokens: bytes; 0 in padding.
      labels: the next byte of the same document; -1 where there is none.
      segment_ids: number of the document within its row; -1 in padding.
      positions: index of the token within its document, for rotary embeddings.
    """

    tokens: np.ndarray
    labels: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray


def pack_documents(documents: list[bytes], length: int) -> Batch:
    """Rows of `length` tokens, in natural order. A document that does not fit is cut; the rest opens the next row as a new one.

    A piece shorter than length / 16 is not worth cutting off: the row is padded instead.
    """
    rows: list[Batch] = []
    room = 0
    for document in documents:
        while document:
            if not room or (room < length // 16 and len(document) > room):
                rows.append(Batch(*(np.full(length, fill, np.int32) for fill in (0, -1, -1, 0))))
                room = length
            row, start = rows[-1], length - room
            piece, document = np.frombuffer(document[:room], np.uint8), document[room:]
            here = slice(start, start + len(piece))
            row.tokens[here] = piece
            # Labels are shifted here, in natural order: once tokens are stored in another order, the token stored next is not
            # the next token. The last token of a document has no label, so that no document predicts another one.
            row.labels[here][:-1] = piece[1:]
            row.segment_ids[here] = row.segment_ids.max() + 1
            row.positions[here] = np.arange(len(piece))
            room -= len(piece)
    return Batch(*(np.stack(arrays) for arrays in zip(*rows, strict=True)))
