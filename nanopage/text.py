"""How do tokens become text?

A leaf: paging knows nothing of text. The tokens of a completion come one by one, and its text is to
be shown, and searched for stop strings, as it grows.

Invariants: text only grows, until it is cut at a stop string; no character is shown in halves; the
cost is linear in the number of tokens.

Next: sequence.py, which owns the tokens.
"""

from typing import Any


class Detokenizer:
    """The text of one completion, which grows as its tokens come and ends before a stop string.

    A token has no text of its own: its leading space depends on the tokens before it, and a
    character may be spread over several. So the latest tokens, `pending`, are decoded together
    behind those before them, until nothing is open. At most three bytes can be the beginning of a
    character, and each shows as at most one U+FFFD: no more than that is held back.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self.text = ""
        self.num_read = 0  # tokens
        self.context: list[int] = []
        self.pending: list[int] = []
        self.num_taken = 0  # characters of what is pending that are in `text`

    def decode(self, token_ids: list[int]) -> str:
        if self.tokenizer is None:
            return ""
        return self.tokenizer.backend_tokenizer.decode(
            token_ids, skip_special_tokens=self.skip_special_tokens)

    def _decode_pending(self, pending: list[int]) -> tuple[str, int]:
        """The text behind the context, and how many of its last characters are still open."""
        before, whole = self.decode(self.context), self.decode(self.context + pending)
        # While a character is open, some tokenizers read all bytes in front of it as invalid.
        piece = whole[len(before):] if whole.startswith(before) else self.decode(pending)
        return piece, min(3, len(piece) - len(piece.rstrip("\ufffd")))

    def peek(self, token_id: int) -> str:
        """What this token would add to the text; the name of one that text leaves out."""
        piece, num_open = self._decode_pending(self.pending + [token_id])
        is_named = self.tokenizer is not None and not self.decode([token_id])
        return (self.tokenizer.decode([token_id]) if is_named
                else piece[self.num_taken:len(piece) - num_open])

    def read(self, token_ids: list[int]) -> None:
        """Take what is new in `token_ids`, all tokens of the completion so far."""
        for token_id in token_ids[self.num_read:]:
            self.pending.append(token_id)
            piece, num_open = self._decode_pending(self.pending)
            self.text += piece[self.num_taken:len(piece) - num_open]
            self.num_taken = max(self.num_taken, len(piece) - num_open)
            if not num_open and (piece or self.context):
                self.context = self.pending if piece else self.context
                self.pending, self.num_taken = [], 0
            elif len(self.pending) > 16:  # bytes that never become a character
                latest = self.decode(self.pending[8:])
                if len(latest) > num_open and piece.endswith(latest):
                    self.context, self.pending = [], self.pending[8:]
                    self.num_taken -= len(piece) - len(latest)
        self.num_read = len(token_ids)

    def finish(self, token_ids: list[int]) -> None:
        """After the last token nothing is open any more: the text is the tokenizer's decoding."""
        whole = self.decode(token_ids)
        if whole.startswith(self.text):
            self.text = whole
        else:  # an invalid byte has changed how those before it read, but they have been shown
            self.read(token_ids)
            self.text += self._decode_pending(self.pending)[0][self.num_taken:]

    def cut(self, stops: list[str], num_searched: int, include_stop: bool) -> str | None:
        """Cut the text at the first of `stops` that ends behind `num_searched` characters."""
        places = [(self.text.find(stop, max(0, num_searched - len(stop) + 1)), stop)
                  for stop in stops]
        position, stop = min((place for place in places if place[0] >= 0), default=(0, None))
        if stop is not None:
            self.text = self.text[:position + (len(stop) if include_stop else 0)]
        return stop
