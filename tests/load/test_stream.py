"""Decoding of responses, byte by byte where a network may cut them."""

from __future__ import annotations

import itertools
import random
import struct
from array import array

import orjson
import pytest

from bench.load.decoding import Decoder, Reads
from bench.load.metrics import rows
from bench.load.stream import Stream

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(payload: object) -> bytes:
    return b"data: " + (payload if isinstance(payload, bytes) else orjson.dumps(payload)) + b"\n\n"


def chunked(*bodies: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(body), body) for body in (*bodies, b"")[:-1]) + b"0\r\n\r\n"


def native(tokens: int, finish: object = None, text: str = "abc") -> bytes:
    meta = {"prompt_tokens": 5, "completion_tokens": tokens, "cached_tokens": 0, "finish_reason": finish}
    return event({"text": text, "meta_info": meta})


def chat(tokens: int | None, finish: str | None = None, **delta: object) -> bytes:
    usage = {} if tokens is None else {"usage": {"prompt_tokens": 5, "completion_tokens": tokens}}
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **usage})


def stamped(at_ns: int) -> bytes:
    """The kernel's stamp."""
    return struct.pack("@ll", *divmod(at_ns, 1_000_000_000))


def decode(data: bytes, *, is_native: bool, cuts: list[int] | None = None, asked: int = 9) -> tuple[Stream, list]:
    """Decode a response that arrives in pieces, the n-th at n milliseconds."""
    stream = Stream(0, b"", is_native, asked)
    places = [0, *(cuts or []), len(data)]
    chunks: array[int] = array("q")
    decoder, reads = Decoder(chunks), Reads()
    for number, (begin, end) in enumerate(itertools.pairwise(places), start=1):
        part = data[begin:end]
        body = stream.read_head(part) if stream.status is None else part
        if body is not None and stream.slot < 0:
            decoder.open(stream)
        if body:
            reads.add(stream.slot, body, stamped(number * 1_000_000), number * 1_000_000 + 5)
    decoder.take(reads)
    decoder.close(stream)
    return stream, rows(chunks).tolist()


def test_every_cut_of_a_response_gives_the_same_tokens() -> None:
    data = HEAD + chunked(native(1), native(4) + native(5), native(9, {"type": "length"}), event(b"[DONE]"))
    for cut in range(1, len(data)):
        stream, found = decode(data, is_native=True, cuts=[cut])
        assert stream.ok, (cut, stream.error)
        assert stream.complete
        assert [row[3] for row in found] == [1, 3, 1, 4]
        assert not stream.miscounted(ignore_eos=True)


def test_many_cuts_of_an_openai_response_give_the_same_tokens() -> None:
    rng = random.Random(1)
    data = HEAD + chunked(
        chat(0, role="assistant", content=""),
        b": keep-alive\n\n",
        chat(2, content="\u2028 two"),
        chat(3, content=""),
        chat(6, "stop", content="six\u0085"),
        event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 6}}),
        event(b"[DONE]"),
    )
    for _ in range(300):
        stream, found = decode(data, is_native=False, cuts=sorted(rng.sample(range(1, len(data)), 12)), asked=6)
        assert stream.ok, stream.error
        assert [row[3] for row in found] == [2, 1, 3]
        assert (stream.first_tokens, stream.tokens, stream.finish_reason) == (2, 6, "stop")


def test_an_event_arrives_when_its_last_byte_does() -> None:
    data = HEAD + chunked(native(1), native(2, {"type": "stop"}))
    middle = data.index(b"completion_tokens", data.index(b"completion_tokens") + 1)
    stream, found = decode(data, is_native=True, cuts=[len(HEAD), middle])
    assert [row[1] for row in found] == [2_000_000, 3_000_000]
    assert found[1][4] == 1_000_000
    assert stream.first_ns == 2_000_000


def test_text_that_looks_like_a_count_is_not_one() -> None:
    text = 'x "completion_tokens": 99, "meta_info":'
    stream, found = decode(HEAD + chunked(native(3, {"type": "stop"}, text)), is_native=True, asked=3)
    assert stream.tokens == 3
    assert len(found) == 1


def test_other_line_ends_and_spaces_are_read_too() -> None:
    body = (
        b'data:{"meta_info": {"completion_tokens":  2, "finish_reason": {"type": "stop"}}}\r\n\r\ndata: [DONE]\r\n\r\n'
    )
    stream, _ = decode(HEAD + chunked(body), is_native=True)
    assert (stream.ok, stream.tokens) == (True, 2)


def test_reasoning_tokens_are_not_counted_twice() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 4, "completion_tokens_details": {"reasoning_tokens": 5}}
    data = HEAD + chunked(
        chat(2, reasoning_content="hm"),
        chat(4, "stop", content="so"),
        event({"choices": [], "usage": usage}),
    )
    stream, _ = decode(data, is_native=False)
    assert (stream.tokens, stream.miscounted(ignore_eos=False)) == (4, False)
    assert stream.first_ns < stream.first_answer_ns or stream.first_ns == stream.first_answer_ns == 1_000_000


def test_a_final_count_that_the_chunks_do_not_reach_is_flagged() -> None:
    data = HEAD + chunked(
        chat(2, "stop", content="so"), event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 7}})
    )
    stream, _ = decode(data, is_native=False)
    assert stream.miscounted(ignore_eos=False)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (HEAD + b"5\r\ndata:", "inside a chunk"),
        (HEAD + chunked(native(2)), "without a finish reason"),
        (HEAD + b"zz\r\n", "size of an HTTP chunk"),
        (HEAD + chunked(event({"error": {"message": "boom"}})), "boom"),
        (HEAD + chunked(native(2, {"type": "abort", "message": "too long"})), "too long"),
        (HEAD + chunked(event(b"{nonsense")), "nonsense"),
        (b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nslow", "HTTP 429: slow"),
    ],
)
@pytest.mark.parametrize("is_native", [True, False])
def test_a_broken_reply_says_what_was_seen(data: bytes, said: str, is_native: bool) -> None:
    if b"meta_info" in data and not is_native:
        pytest.skip("an event of the other route")
    stream, _ = decode(data, is_native=is_native)
    assert said in stream.error


def test_another_protocol_is_refused() -> None:
    with pytest.raises(ValueError, match="expected an HTTP response"):
        Stream(0, b"", True, 1).read_head(b"SSH-2.0-OpenSSH_9.6\r\n")


def test_acceptance_of_the_openai_routes_is_read_from_sglangs_additions() -> None:
    details = {"spec_verify_ct": 3, "spec_correct_drafts_histogram": [0, 1, 2]}
    data = HEAD + chunked(
        chat(7, "stop", content="x"),
        event({"choices": [], "usage": {"completion_tokens": 7}, "sglext": {"spec_tokens_details": details}}),
    )
    stream, _ = decode(data, is_native=False)
    assert (stream.verify_steps, stream.accepted_histogram) == (3, (0, 1, 2))


@pytest.mark.parametrize("is_native", [True, False])
def test_many_streams_at_once_are_decoded_as_each_alone(is_native: bool) -> None:
    rng = random.Random(7)
    events = native if is_native else (lambda tokens, finish=None: chat(tokens, finish and "length", content="w"))
    replies, expected = [], []
    for _ in range(40):
        counts = list(itertools.accumulate(rng.randint(0, 3) + (place == 0) for place in range(30)))
        parts = [events(count) for count in counts] + [events(counts[-1] + 1, {"type": "length"}), event(b"[DONE]")]
        data = chunked(*parts)
        cuts = list(itertools.accumulate(len(b"%x" % len(part)) + len(part) + 4 for part in parts))
        cuts += rng.sample(range(1, len(data)), rng.choice([0, 0, 3]))  # most streams come chunk by chunk
        places = sorted({0, *cuts, len(data)})
        replies.append([data[a:b] for a, b in itertools.pairwise(places)])
        expected.append(sorted({count for count in counts if count} | {counts[-1] + 1}))
    chunks: array[int] = array("q")
    decoder = Decoder(chunks)
    streams = [Stream(index, b"", is_native, 1) for index in range(40)]
    for stream in streams:
        stream.read_head(HEAD)
        decoder.open(stream)
    now = 0
    while any(replies):
        reads = Reads()
        for _ in range(100):
            index = rng.randrange(40)
            if replies[index]:
                now += 1_000
                reads.add(streams[index].slot, replies[index].pop(0), stamped(now), now + 7)
        decoder.take(reads)
    for stream in streams:
        decoder.close(stream)
    found = rows(chunks)
    assert (found[:, 2] == 7).all()
    for index, stream in enumerate(streams):
        own = found[found[:, 0] == index]
        assert stream.ok, stream.error
        assert own[:, 3].cumsum().tolist() == expected[index]
        assert own[1:, 4].tolist() == (own[1:, 1] - own[:-1, 1]).tolist()
        assert (stream.tokens, stream.chunks, stream.last_ns) == (expected[index][-1], len(own), own[-1, 1])
