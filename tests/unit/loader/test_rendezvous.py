"""Ranks that wait for each other through a real key-value store; threads are the ranks."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from packhorse import distributed as rendezvous
from packhorse.distributed import Rendezvous, Watch
from packhorse.errors import SystemFault
from packhorse.types import World

RANKS = 3


def places(store: dist.Store, token: str = "first") -> list[Rendezvous]:
    return [Rendezvous(store, World(rank, RANKS), token) for rank in range(RANKS)]


def new_store(seconds: float = 30) -> dist.Store:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=seconds))
    return store


def test_no_rank_leaves_a_meeting_before_all_have_arrived() -> None:
    ranks = places(new_store())
    with ThreadPoolExecutor(RANKS) as pool:
        waiting = [pool.submit(rank.meet) for rank in ranks[:-1]]
        with pytest.raises(TimeoutError):
            waiting[0].result(timeout=0.5)
        ranks[-1].meet()
        for one in waiting:
            one.result(timeout=10)


def test_what_ranks_wrote_in_an_earlier_process_group_does_not_count() -> None:
    store = new_store(seconds=0.5)
    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(Rendezvous.meet, places(store)))
        # torchrun keeps its store when a process group ends.
        ranks = places(store, "second")
        assert not ranks[0].has_moved_on(1)
        with pytest.raises(SystemFault, match=r"rank 1 has not built its loader within 0\.5 s"):
            ranks[0].meet()


def test_a_message_of_any_size_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_CHUNK", 7)
    first, second, _ = places(new_store())
    for size in (0, 1, 6, 7, 8, 100):
        data = bytes(range(size))
        first.send(f"of {size}", data)
        assert second.wait_for(f"of {size}", rank=0)
        assert second.receive(f"of {size}", remove=True) == data
        assert not second.has_message(f"of {size}")


def test_a_message_that_will_not_come_is_not_waited_for() -> None:
    ranks = places(new_store())
    with ThreadPoolExecutor(RANKS) as pool:
        waiting = pool.submit(ranks[1].wait_for, "tasks", 0)
        meeting = [pool.submit(ranks[2].meet)]
        with pytest.raises(TimeoutError):  # another rank than the one that should send it has moved on
            waiting.result(timeout=0.5)
        meeting.append(pool.submit(ranks[0].meet))
        assert waiting.result(timeout=10) is False
        ranks[1].meet()
        for one in meeting:
            one.result(timeout=10)


def test_a_busy_rank_is_waited_for_longer_than_the_timeout() -> None:
    busy, waiting, _ = places(new_store(seconds=0.4))
    watch = Watch()
    with busy.busy("count the tokens"), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(waiting.wait_for, "result", 0)
        with pytest.raises(TimeoutError):
            answer.result(timeout=2)
        assert not waiting.look([0], watch)
        busy.send("result", b"")
        assert answer.result(timeout=10)
