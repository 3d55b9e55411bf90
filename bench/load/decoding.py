"""Decoding: from what was read to rows of chunks, many reads at once where they look alike.

Between its first and its last token nearly every read of a stream is one HTTP chunk with one event in it, of which only
the token count matters. Those are checked and read together, by array operations over the joined bytes (1.6 µs a read
where a JSON parser and a loop took 8.1); everything else goes through :meth:`bench.load.stream.Stream.decode`.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bench.load.stream import COUNT, Stream

Read = tuple[Stream, bytes, bytes, int]
"""A stream, bytes of its response's body, the kernel's stamp (a timespec, or nothing), and the time of handling."""

_TIMESPEC = struct.Struct("@ll")
_FEW = 16  # below, a loop is as fast
_NOT_FINISHED = b'"finish_reason":null'
_START = np.frombuffer(b"data: {", np.uint8)
_END = np.frombuffer(b"}\n\n\r\n", np.uint8)
_DIGITS = 8
_LINE_ENDS = 4  # of such a read: after the chunk's size, two after the event, after the chunk
_PLACES = 10 ** np.arange(_DIGITS, dtype=np.int64)

Integers = npt.NDArray[np.int64]


class Decoder:
    """Decodes reads in the order in which they came.

    Args:
        chunks: takes the rows of :data:`bench.load.stream.COLUMNS`.
    """

    def __init__(self, chunks: array[int]) -> None:
        self._chunks = chunks
        # What is known of a stream that is read by its counts alone, by slot: index, tokens, last arrival, chunks.
        self._state = np.zeros((4, 64), np.int64)
        self._free = list(range(64))
        self._plain: dict[int, Stream] = {}

    def take(self, reads: Sequence[Read]) -> list[Stream]:
        """Decode reads, each stream's in their order; the streams of which the end was among them."""
        plain = [read for read in reads if read[0].slot >= 0]
        odd = self._take_plain(plain) if len(plain) >= _FEW else {read[0].slot for read in plain}
        if not odd and len(plain) == len(reads):
            return []
        for slot in odd:
            self._leave(self._plain[slot])
        slow = [read for read in reads if read[0].slot < 0]
        for stream, data, stamp, handled_ns in slow:
            stream.decode(data, _arrival_ns(stamp, handled_ns), handled_ns, self._chunks)
        for stream, *_ in slow:
            if stream.plain and stream.slot < 0:
                self._enter(stream)
        return [stream for stream, *_ in slow if stream.complete]

    def close(self, stream: Stream) -> None:
        """Finish a stream of which all reads were taken."""
        if stream.slot >= 0:
            self._leave(stream)
        stream.close()

    def flush(self) -> None:
        """Bring every stream up to date with what was decoded of it."""
        for stream in list(self._plain.values()):
            self._leave(stream)

    def _enter(self, stream: Stream) -> None:
        if not self._free:
            size = self._state.shape[1]
            self._state = np.concatenate([self._state, np.zeros_like(self._state)], axis=1)
            self._free = list(range(size, 2 * size))
        slot = stream.slot = self._free.pop()
        self._plain[slot] = stream
        self._state[:, slot] = stream.index, stream.tokens, stream.last_ns, stream.chunks

    def _leave(self, stream: Stream) -> None:
        slot = stream.slot
        _, stream.tokens, stream.last_ns, stream.chunks = self._state[:, slot].tolist()
        stream.slot = -1
        del self._plain[slot]
        self._free.append(slot)

    def _take_plain(self, reads: Sequence[Read]) -> set[int]:
        """Decode reads by their counts alone; the slots of streams with a read that is not of the usual form, of which
        none was decoded.
        """
        streams, data, stamps, handled = zip(*reads, strict=True)
        usual, read, tokens = _counts(data)
        slots, handled_ns = np.array([stream.slot for stream in streams]), np.array(handled)
        odd: set[int] = set(slots[~usual].tolist())
        arrival_ns = handled_ns
        if stamps[0]:
            times = np.frombuffer(b"".join(stamps), np.int64).reshape(-1, 2)
            arrival_ns = times[:, 0] * 1_000_000_000 + times[:, 1]
        # From here on by chunk: each stream's together and as they came, so that its predecessor stands before each.
        slots, arrival_ns, handled_ns = slots[read], arrival_ns[read], handled_ns[read]
        order = np.argsort(slots, kind="stable")
        slots, tokens, arrival_ns, handled_ns = slots[order], tokens[order], arrival_ns[order], handled_ns[order]
        index, seen, last_ns, chunks = self._state
        again = np.flatnonzero(slots[1:] == slots[:-1]) + 1
        before, before_ns = seen[slots], last_ns[slots]
        before[again], before_ns[again] = tokens[again - 1], arrival_ns[again - 1]
        last = np.ones(len(slots), np.bool_)
        last[again - 1] = False
        stale = tokens <= before  # it held text back, or has more to say than counts
        if odd or stale.any():
            odd |= set(slots[stale].tolist())
            kept = ~np.isin(slots, list(odd))
            last = last[kept]
            slots, tokens, arrival_ns, handled_ns, before, before_ns = (
                column[kept] for column in (slots, tokens, arrival_ns, handled_ns, before, before_ns)
            )
        rows = np.stack([index[slots], arrival_ns, handled_ns - arrival_ns, tokens - before, arrival_ns - before_ns], 1)
        self._chunks.frombytes(rows.tobytes())
        seen[slots[last]] = tokens[last]
        last_ns[slots[last]] = arrival_ns[last]
        np.add.at(chunks, slots, 1)
        return odd


def _counts(data: Sequence[bytes]) -> tuple[npt.NDArray[np.bool_], Integers, Integers]:
    """Whether each read is made of whole chunks with one unfinished event each; of the chunks in those that are, which
    read they are in, and their token counts.
    """
    joined = b"".join(data)
    characters = np.frombuffer(joined, np.uint8)
    ends = np.cumsum([len(part) for part in data])
    line_ends = np.flatnonzero(characters == ord("\n"))
    count = np.diff(np.searchsorted(line_ends, ends), prepend=0)
    usual = (count > 0) & (count % _LINE_ENDS == 0) & (characters[ends - 1] == ord("\n"))
    if not usual.all():
        line_ends = line_ends[np.repeat(usual, count)]
    read = np.repeat(np.flatnonzero(usual), count[usual] // _LINE_ENDS)
    last = line_ends[_LINE_ENDS - 1 :: _LINE_ENDS] + 1  # where each chunk ends
    places = _places(joined, COUNT)
    found = np.searchsorted(places, last)
    place = places[np.maximum(found - 1, 0)] if len(places) else np.zeros(len(last), np.int64)
    event = line_ends[::_LINE_ENDS] + 1
    tokens, right = _numbers(characters, place)
    right &= (place > event) & _stands(characters, event, _START) & _stands(characters, last - len(_END), _END)
    unfinished = _places(joined, _NOT_FINISHED)
    shown = np.searchsorted(unfinished, last)
    right &= unfinished[np.maximum(shown - 1, 0)] > event if len(unfinished) else False
    if not right.all():
        usual[read[~right]] = False
        kept = usual[read]
        read, tokens = read[kept], tokens[kept]
    return usual, read, tokens


def _stands(
    characters: npt.NDArray[np.uint8], places: Integers, wanted: npt.NDArray[np.uint8]
) -> npt.NDArray[np.bool_]:
    """Whether the wanted characters stand at each place."""
    inside = np.clip(places[:, None] + np.arange(len(wanted)), 0, len(characters) - 1)
    return np.asarray((characters[inside] == wanted).all(axis=1))


def _places(joined: bytes, wanted: bytes) -> Integers:
    """Where each occurrence ends."""
    lengths = np.array([len(part) for part in joined.split(wanted)[:-1]], np.int64)
    return np.cumsum(lengths + len(wanted))


def _numbers(characters: npt.NDArray[np.uint8], places: Integers) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """The whole number at each place, and whether there is one (shorter than eight digits, no space before it)."""
    window = characters[np.minimum(places[:, None] + np.arange(_DIGITS), len(characters) - 1)].astype(np.int64) - ord(
        "0"
    )
    length = ((window >= 0) & (window <= 9)).cumprod(axis=1).sum(axis=1)
    weights = length[:, None] - 1 - np.arange(_DIGITS)
    values = np.where(weights >= 0, window * _PLACES[np.maximum(weights, 0)], 0).sum(axis=1)
    return values, (length > 0) & (length < _DIGITS)


def _arrival_ns(stamp: bytes, handled_ns: int) -> int:
    if not stamp:
        return handled_ns
    seconds, nanoseconds = _TIMESPEC.unpack(stamp)
    return int(seconds * 1_000_000_000 + nanoseconds)
