"""Decoding: from what was read to rows of chunks, many reads at once where they look alike.

Between its first and its last token nearly every read of a stream is one HTTP chunk with one event in it, of which only
the token count matters. Those are checked and read together, by array operations over the bytes of all of them;
everything else goes through :meth:`bench.load.stream.Stream.decode`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bench.load.stream import COUNT, Stream

NO_STAMP = bytes(16)
_NOT_FINISHED = b'"finish_reason":null'
_START = b"data: {"
_END = b"}\n\n\r\n"
_WORD = 8
_LINE_ENDS = 4  # of such a chunk: after its size, two after the event, after the chunk

Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]


@dataclass(eq=False, slots=True)
class Reads:
    """What was read and is not decoded: the bytes of all reads after each other, and of each read the slot of its
    stream, its length, the kernel's stamp (a timespec, or ``NO_STAMP``) and the time of handling.
    """

    data: bytearray = field(default_factory=bytearray)
    slots: array[int] = field(default_factory=lambda: array("q"))
    lengths: array[int] = field(default_factory=lambda: array("q"))
    stamps: bytearray = field(default_factory=bytearray)
    handled_ns: array[int] = field(default_factory=lambda: array("q"))

    def add(self, slot: int, data: bytes, stamp: bytes, handled_ns: int) -> None:
        self.data += data
        self.slots.append(slot)
        self.lengths.append(len(data))
        self.stamps += stamp
        self.handled_ns.append(handled_ns)

    def clear(self) -> None:
        self.data.clear()
        self.stamps.clear()
        for column in (self.slots, self.lengths, self.handled_ns):
            del column[:]


class Decoder:
    """Decodes reads in the order in which they came.

    Args:
        chunks: takes the rows of :data:`bench.load.stream.COLUMNS`.
    """

    def __init__(self, chunks: array[int]) -> None:
        self._chunks = chunks
        self._streams: list[Stream | None] = [None] * 64
        self._free = list(range(64))
        # Of streams that are read by their counts alone, by slot: index, tokens, last arrival and chunks so far.
        self._plain = np.zeros(64, np.bool_)
        self._state = np.zeros((4, 64), np.int64)

    def open(self, stream: Stream) -> int:
        """A slot for a stream whose body begins."""
        if not self._free:
            size = len(self._streams)
            self._streams += [None] * size
            self._plain = np.concatenate([self._plain, np.zeros_like(self._plain)])
            self._state = np.concatenate([self._state, np.zeros_like(self._state)], axis=1)
            self._free = list(range(size, 2 * size))
        stream.slot = self._free.pop()
        self._streams[stream.slot] = stream
        return stream.slot

    def close(self, stream: Stream) -> None:
        """Finish a stream of which all reads were taken."""
        if stream.slot >= 0:
            self._update(stream)
            self._streams[stream.slot] = None
            self._free.append(stream.slot)
            stream.slot = -1
        stream.close()

    def flush(self) -> None:
        """Bring every stream up to date with what was decoded of it."""
        for stream in self._streams:
            if stream is not None:
                self._update(stream)

    def take(self, reads: Reads) -> list[Stream]:
        """Decode reads; the streams of which the end was among them."""
        if not reads.slots:
            return []
        slots, lengths = np.array(reads.slots), np.array(reads.lengths)
        handled_ns = np.array(reads.handled_ns)
        times = np.frombuffer(bytes(reads.stamps), np.int64).reshape(-1, 2)
        arrival_ns = times[:, 0] * 1_000_000_000 + times[:, 1]
        arrival_ns = np.where(arrival_ns > 0, arrival_ns, handled_ns)
        data = bytes(reads.data)
        ends = np.cumsum(lengths)
        odd = self._take_plain(data, slots, ends, arrival_ns, handled_ns)
        if odd is None:
            return []
        complete = []
        for place in np.flatnonzero(odd).tolist():
            stream = self._streams[slots[place]]
            assert stream is not None
            end = int(ends[place])
            part = data[end - int(lengths[place]) : end]
            self._update(stream)
            stream.decode(part, int(arrival_ns[place]), int(handled_ns[place]), self._chunks)
            if stream.plain:
                self._state[:, stream.slot] = stream.index, stream.tokens, stream.last_ns, stream.chunks
                self._plain[stream.slot] = True
            elif stream.complete:
                complete.append(stream)
        return complete

    def _update(self, stream: Stream) -> None:
        """Give a stream its figures back."""
        if self._plain[stream.slot]:
            _, stream.tokens, stream.last_ns, stream.chunks = self._state[:, stream.slot].tolist()
            self._plain[stream.slot] = False

    def _take_plain(
        self, data: bytes, slots: Integers, ends: Integers, arrival_ns: Integers, handled_ns: Integers
    ) -> Booleans | None:
        """Decode the reads of streams that all their reads allow to be read by counts alone; which reads are left, None
        for none.
        """
        usual, read, tokens = _counts(data, ends, self._plain[slots])
        odd: Booleans | None = None
        if not usual.all():
            odd = np.isin(slots, slots[~usual])
            kept = ~odd[read]
            read, tokens = read[kept], tokens[kept]
        # By chunk, each stream's together and as they came, so that its predecessor stands before each.
        chunk_slots = slots[read]
        order = np.argsort(chunk_slots, kind="stable")
        chunk_slots, read, tokens = chunk_slots[order], read[order], tokens[order]
        index, seen, last_ns, count = self._state
        again = np.flatnonzero(chunk_slots[1:] == chunk_slots[:-1]) + 1
        before = seen[chunk_slots]
        before[again] = tokens[again - 1]
        stale = tokens <= before  # text was held back, or there is more to say than counts
        if stale.any():
            left = np.isin(slots, chunk_slots[stale])
            odd = left if odd is None else odd | left
            kept = ~left[read]
            chunk_slots, read, tokens, before = chunk_slots[kept], read[kept], tokens[kept], before[kept]
            again = np.flatnonzero(chunk_slots[1:] == chunk_slots[:-1]) + 1
        arrived_ns = arrival_ns[read]
        before_ns = last_ns[chunk_slots]
        before_ns[again] = arrived_ns[again - 1]
        rows = np.empty((len(read), 5), np.int64)
        rows[:, 0] = index[chunk_slots]
        rows[:, 1] = arrived_ns
        rows[:, 2] = handled_ns[read] - arrived_ns
        rows[:, 3] = tokens - before
        rows[:, 4] = arrived_ns - before_ns
        self._chunks.frombytes(rows.tobytes())
        # In order, so that of several of one stream the last one stays.
        seen[chunk_slots] = tokens
        last_ns[chunk_slots] = arrived_ns
        np.add.at(count, chunk_slots, 1)
        return odd


def _counts(data: bytes, ends: Integers, wanted: Booleans) -> tuple[Booleans, Integers, Integers]:
    """Whether each read is made of whole chunks with one unfinished event each; of the chunks in those that are, which
    read they are in, and their token counts.

    Args:
        ends: of the reads in the data.
        wanted: which reads may be.
    """
    characters = np.frombuffer(data, np.uint8)
    # The eight characters from each place on, the first one lowest.
    words: Words = np.ndarray(len(data) + 1, "<u8", data + bytes(_WORD), strides=(1,))
    line_ends = np.flatnonzero(characters == ord("\n"))
    count = np.diff(np.searchsorted(line_ends, ends), prepend=0)
    usual = wanted & (count > 0) & (count % _LINE_ENDS == 0) & (characters[ends - 1] == ord("\n"))
    if not usual.all():
        line_ends = line_ends[np.repeat(usual, count)]
    read = np.repeat(np.flatnonzero(usual), count[usual] // _LINE_ENDS)
    last = line_ends[_LINE_ENDS - 1 :: _LINE_ENDS] + 1  # where each chunk ends
    event = line_ends[::_LINE_ENDS] + 1
    places, unfinished = _places(data, COUNT), _places(data, _NOT_FINISHED)
    if not len(last) or not len(places) or not len(unfinished):
        none = np.zeros(0, np.int64)
        return np.zeros_like(usual), none, none
    place = places[np.maximum(np.searchsorted(places, last) - 1, 0)]
    shown = unfinished[np.maximum(np.searchsorted(unfinished, last) - 1, 0)]
    tokens, right = _numbers(words, place)
    right &= (place > event) & (shown > event)
    right &= _stands(words, event, _START) & _stands(words, last - len(_END), _END)
    if not right.all():
        usual[read[~right]] = False
        kept = usual[read]
        read, tokens = read[kept], tokens[kept]
    return usual, read, tokens


def _stands(words: Words, places: Integers, wanted: bytes) -> Booleans:
    """Whether the wanted characters, fewer than eight, stand at each place."""
    unwanted_bits = np.uint64(64 - 8 * len(wanted))
    word = np.uint64(int.from_bytes(wanted, "little")) << unwanted_bits
    return np.asarray(words[np.maximum(places, 0)] << unwanted_bits == word)


def _places(data: bytes, wanted: bytes) -> Integers:
    """Where each occurrence ends."""
    lengths = np.array([len(part) for part in data.split(wanted)[:-1]], np.int64)
    return np.cumsum(lengths + len(wanted))


def _numbers(words: Words, places: Integers) -> tuple[Integers, Booleans]:
    """The whole number at each place, and whether there is one (shorter than eight digits, no space before it).

    All eight characters of a word are worked on at once: arrays of single digits cost several times as much.
    """
    digits = words[places] ^ np.uint64(0x3030303030303030)
    others = (digits | digits + np.uint64(0x7676767676767676)) & np.uint64(0x8080808080808080)  # first one is right
    length = np.bitwise_count((others & (~others + np.uint64(1))) - np.uint64(1)) >> 3
    values = digits << (np.uint64(64) - np.uint64(8) * length.astype(np.uint64))  # zeros lead
    values = (values * np.uint64(10) + (values >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    values = (values * np.uint64(100) + (values >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    values = (values * np.uint64(10_000) + (values >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
    return values.astype(np.int64), (length > 0) & (length < _WORD)
