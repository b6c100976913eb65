"""The bytes of a part of a tensor, read out of the whole, and the bytes of a whole, read out of its parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptio.files import page_buffer
from ckptio.partitioning import Cut
from ckptio.writer import Bytes

# Short pieces of rows are cut out of a block that is read whole: one read for many of them.
BLOCK_BYTES = 1024 * 1024
_LONG_PIECE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class CutBytes:
    """A range of every row of `whole`, one after the other; `block` is room to work in, of any size."""

    whole: Bytes
    cut: Cut
    block: memoryview

    def read_into(self, target: memoryview, offset_bytes: int) -> None:
        cut = self.cut
        done = 0
        while done < len(target):
            row, skipped = divmod(offset_bytes + done, cut.length_bytes)
            rows = (len(target) - done) // cut.length_bytes
            if skipped == 0 and rows > 1 and cut.length_bytes < _LONG_PIECE_BYTES:
                rows = min(rows, len(self.block) // cut.row_bytes)
                if rows > 1:
                    self._read_rows(target[done : done + rows * cut.length_bytes], row, rows)
                    done += rows * cut.length_bytes
                    continue
            count = min(cut.length_bytes - skipped, len(target) - done)
            place = row * cut.row_bytes + cut.start_bytes + skipped
            self.whole.read_into(target[done : done + count], place)
            done += count

    def _read_rows(self, target: memoryview, row: int, rows: int) -> None:
        cut = self.cut
        block = self.block[: rows * cut.row_bytes]
        self.whole.read_into(block, row * cut.row_bytes)
        for number in range(rows):
            start = number * cut.row_bytes + cut.start_bytes
            piece = block[start : start + cut.length_bytes]
            target[number * cut.length_bytes : (number + 1) * cut.length_bytes] = piece


def join(
    parts: Sequence[Bytes], piece_bytes: Sequence[int], rows: int, size_max: int
) -> Iterator[memoryview]:
    """The bytes of a whole of `rows` rows, each made of `piece_bytes[k]` from part k, in pieces of a buffer.

    A piece is at most `size_max` bytes long and valid until the next one is asked for.
    """
    row_bytes = sum(piece_bytes)
    if row_bytes == 0 or rows == 0:
        return
    step = min(size_max // row_bytes, rows)
    buffer = page_buffer(min(size_max, row_bytes * rows))
    if step == 0:
        yield from _join_long_rows(parts, piece_bytes, rows, buffer)
        return
    block = page_buffer(step * max(piece_bytes))
    for row in range(0, rows, step):
        count = min(step, rows - row)
        start = 0
        for part, size in zip(parts, piece_bytes, strict=True):
            piece = block[: count * size]
            part.read_into(piece, row * size)
            for number in range(count):
                place = number * row_bytes + start
                buffer[place : place + size] = piece[number * size : (number + 1) * size]
            start += size
        yield buffer[: count * row_bytes]


def _join_long_rows(
    parts: Sequence[Bytes], piece_bytes: Sequence[int], rows: int, buffer: memoryview
) -> Iterator[memoryview]:
    for row in range(rows):
        for part, size in zip(parts, piece_bytes, strict=True):
            for offset in range(0, size, len(buffer)):
                piece = buffer[: min(len(buffer), size - offset)]
                part.read_into(piece, row * size + offset)
                yield piece
