"""When a socket is looked at: real sockets of one process, and a loop."""

import asyncio

import pytest
import zmq

from oobleckd.daemon.readiness import MAX_PER_TURN, Readiness

URGENT, IDLE = b"urgent", b"idle"


class Reader:
    """Reads as the hub does; ``turns``: what was taken between two times that it was asked whether all is
    calm.
    """

    def __init__(self, socket):
        self.socket, self.turns, self.turn, self.rests = socket, [], [], []
        self.news, self.asked = asyncio.Event(), asyncio.Event()
        self.readiness = Readiness(socket, self.take_one, self.is_calm)

    def take_one(self):
        try:
            self.turn.append(self.socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return False
        return True

    def is_calm(self, resting):
        turn, self.turn = self.turn, []
        if turn:
            self.turns.append(turn)
            self.news.set()
        self.rests.append(resting)
        self.asked.set()
        return URGENT not in turn and len(turn) > (not resting)

    async def until(self, count):
        while sum(map(len, self.turns)) < count:
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), 10)


@pytest.fixture
def ends():
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://here")
        other.connect("inproc://here")
        yield one, other


async def until_resting(reader, other):
    """Nothing is looked at now but after a rest."""
    while reader.readiness._rest is None:
        count = sum(map(len, reader.turns))
        other.send(IDLE)
        other.send(IDLE)
        await reader.until(count + 2)


async def until_awake(reader):
    """What comes is looked at at once."""
    while reader.readiness._rest is not None:
        reader.asked.clear()
        await asyncio.wait_for(reader.asked.wait(), 10)


@pytest.mark.asyncio
async def test_one_at_a_time_is_looked_at_at_once(ends):
    reader = Reader(ends[0])
    reader.readiness.start()
    for count in range(1, 6):
        ends[1].send(IDLE)
        await reader.until(count)
    assert not any(reader.rests)
    reader.readiness.stop()


@pytest.mark.asyncio
async def test_what_is_calm_is_taken_together_and_nothing_is_missed(ends):
    reader = Reader(ends[0])
    reader.readiness.start()
    await until_resting(reader, ends[1])
    before = len(reader.turns)
    for _ in range(5):
        ends[1].send(IDLE)
        await asyncio.sleep(0)  # the loop would have looked by now
    await reader.until(sum(map(len, reader.turns)) + 5)
    assert len(reader.turns) - before < 5
    assert any(reader.rests)
    await until_awake(reader)  # a rest in which nothing came was the last one
    count = sum(map(len, reader.turns))
    ends[1].send(IDLE)
    await reader.until(count + 1)
    assert not reader.rests[-1]
    reader.readiness.stop()


@pytest.mark.asyncio
async def test_what_is_urgent_ends_the_rests(ends):
    reader = Reader(ends[0])
    reader.readiness.start()
    await until_resting(reader, ends[1])
    count = sum(map(len, reader.turns))
    ends[1].send(URGENT)
    await reader.until(count + 1)
    await until_awake(reader)
    ends[1].send(URGENT)
    await reader.until(count + 2)
    assert not reader.rests[-1]
    reader.readiness.stop()


@pytest.mark.asyncio
async def test_a_send_looks_at_the_socket_in_a_rest_too(ends):
    reader = Reader(ends[0])
    reader.readiness.start()
    await until_resting(reader, ends[1])
    ends[1].send(URGENT)
    reader.readiness.look()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert URGENT in reader.turn or URGENT in reader.turns[-1]
    reader.readiness.stop()


@pytest.mark.asyncio
async def test_more_than_a_turn_s_worth_gives_others_their_turn_and_is_taken(ends):
    reader = Reader(ends[0])
    for _ in range(MAX_PER_TURN + 10):
        ends[1].send(IDLE)
    reader.readiness.start()
    await reader.until(MAX_PER_TURN + 10)
    reader.readiness.stop()


@pytest.mark.asyncio
async def test_nothing_is_taken_after_the_end(ends):
    reader = Reader(ends[0])
    reader.readiness.start()
    await until_resting(reader, ends[1])
    reader.readiness.stop()
    taken = sum(map(len, reader.turns))
    ends[1].send(IDLE)
    await asyncio.sleep(0.01)  # longer than a rest, in which nothing may happen
    assert sum(map(len, reader.turns)) + len(reader.turn) == taken
