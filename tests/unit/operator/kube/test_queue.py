"""The queue of jobs: once each, one worker each, soonest first, retries further and further apart."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlightning_operator.kube.queue import Closed, WorkQueue


def test_a_burst_of_additions_is_one_piece_of_work() -> None:
    async def scenario() -> list[str]:
        queue: WorkQueue[str] = WorkQueue()
        for _ in range(100):
            queue.add("job", 0.02)
        taken = [await queue.get()]
        queue.done("job")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.06):
                taken.append(await queue.get())
        return taken

    assert asyncio.run(scenario()) == ["job"]


def test_a_key_is_never_in_two_hands_and_comes_again_if_added_meanwhile() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add("job")
        assert await queue.get() == "job"
        queue.add("job")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.03):
                await queue.get()
        queue.done("job")
        assert await queue.get() == "job"

    asyncio.run(scenario())


def test_the_earliest_time_wins() -> None:
    now = 0.0
    queue: WorkQueue[str] = WorkQueue(clock=lambda: now)
    queue.add("job", 10)
    queue.add("job", 2)
    queue.add("job", 600)
    now = 1.9
    key, wait = queue._pop()
    assert (key, wait) == (None, pytest.approx(0.1))  # type: ignore[comparison-overlap]
    now = 2.0
    assert queue._pop() == ("job", None)
    queue.done("job")
    assert queue._pop() == (None, None), "the two other times went with the first"


def test_retries_double_up_to_a_minute_and_start_anew_after_a_success() -> None:
    queue: WorkQueue[str] = WorkQueue(clock=lambda: 0.0, jitter=lambda: 1.0)
    # 0.5 s doubled: 0.5, 1, 2, 4, 8, 16, 32, and 64 would be more than 60.
    assert [queue.retry("job") for _ in range(9)] == [
        (1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (5, 8.0), (6, 16.0), (7, 32.0), (8, 60.0), (9, 60.0),
    ]  # fmt: skip
    queue.forgive("job")
    assert queue.retry("job") == (1, 0.5)
    assert 0.25 <= WorkQueue[str](clock=lambda: 0.0).retry("job")[1] <= 0.5, "jittered"


def test_waiting_and_working_times_are_known() -> None:
    now = 100.0
    queue: WorkQueue[str] = WorkQueue(clock=lambda: now)
    assert (queue.overdue, queue.longest_work) == (0.0, 0.0)
    queue.add("slow")
    queue.add("later", 50)
    now = 130.0
    assert (queue.overdue, queue.longest_work) == (30.0, 0.0)
    assert queue._pop() == ("slow", None)
    now = 135.0
    assert (queue.overdue, queue.longest_work, queue.idle) == (0.0, 5.0, False)


def test_close_wakes_every_worker_and_takes_nothing_more() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add("job", 60)

        async def work() -> None:
            with pytest.raises(Closed):
                await queue.get()

        workers = [asyncio.create_task(work()) for _ in range(3)]
        await asyncio.sleep(0.01)
        queue.close()
        queue.add("other")
        async with asyncio.timeout(1):
            await asyncio.gather(*workers)
        assert len(queue) == 0

    asyncio.run(scenario())


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.floats(0, 0.004), st.floats(0, 0.004)), min_size=1, max_size=30
    )
)  # fmt: skip
def test_nothing_is_lost_and_nothing_overlaps(additions: list[tuple[str, float, float]]) -> None:
    """Every addition is followed by a pass that began after it, and no key is worked on twice at a time."""

    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        loop = asyncio.get_running_loop()
        added: dict[str, float] = {}
        begun: dict[str, float] = {}
        busy: Counter[str] = Counter()

        async def work() -> None:
            try:
                while True:
                    key = await queue.get()
                    busy[key] += 1
                    assert busy[key] == 1
                    begun[key] = loop.time()
                    await asyncio.sleep(0.001)
                    busy[key] -= 1
                    queue.done(key)
            except Closed:
                pass

        workers = [asyncio.create_task(work()) for _ in range(3)]
        for key, pause, delay in additions:
            await asyncio.sleep(pause)
            added[key] = loop.time()
            queue.add(key, delay)
        async with asyncio.timeout(5):
            while len(queue) or not queue.idle:
                await asyncio.sleep(0.001)
        queue.close()
        await asyncio.gather(*workers)
        assert all(begun[key] >= time for key, time in added.items())

    asyncio.run(scenario())
