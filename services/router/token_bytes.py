"""Owns the bytes of single tokens: what each adds to a text, also when that is only a part of a character."""

from __future__ import annotations

import re

from tokenizers import Tokenizer

# A piece before the one that is looked at: decoders treat the beginning of a text as something special.
_ANCHOR = "a"
# How vocabularies with a byte fallback write a byte.
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """Of one tokenizer. May be called from any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.decoder
        self._added = {token: str(added.content) for token, added in tokenizer.get_added_tokens_decoder().items()}
        # A decoder of bytes shows in what it makes of the sign for a space.
        self._is_byte_level = self._decoder is not None and self._decoder.decode([_ANCHOR, "Ġ"]) == f"{_ANCHOR} "

    def of(self, token: int) -> bytes:
        """Empty for an id that the vocabulary only pads to."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None or self._decoder is None:
            return (piece or "").encode()
        if self._is_byte_level:
            return b"".join(_BYTES.get(letter) or letter.encode() for letter in piece)
        text = self._decoder.decode([_ANCHOR, piece]).removeprefix(_ANCHOR)
        byte = _BYTE_PIECE.fullmatch(piece)
        return text.encode() if byte is None or text == piece else bytes.fromhex(byte[1])


def _byte_letters() -> dict[str, bytes]:
    """How GPT-2 and its descendants write bytes: those that print as themselves, the others from U+0100 on."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printing]
    letters = {chr(byte): bytes([byte]) for byte in printing}
    return letters | {chr(0x100 + place): bytes([byte]) for place, byte in enumerate(others)}


_BYTES = _byte_letters()
