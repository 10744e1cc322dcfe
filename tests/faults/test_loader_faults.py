"""A loader on machines and data that fail: it goes on, or stops and says why; nothing is lost silently."""

import gc
import os
import resource
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import packhorse
from contract.samples import make_image
from count_samples import python_path, write_chats
from faults.faulty_data import (
    Faulty,
    Once,
    be_killed,
    children,
    crash,
    hang,
    leave,
    raising,
    small_disk,
)
from loader_samples import chat, delivered_rows, load, texts
from packhorse.errors import BadSample, ConfigError, SystemFault
from packhorse.ledger import Ledger
from packhorse.loader import TooManyBad
from raising import raises_bad_sample

pytestmark = pytest.mark.system

ROWS = 60
EVERYTHING = list(range(ROWS))


def build_loader(rows: Any, **options: Any) -> packhorse.Loader:
    """A loader of small packs; faults begin when it is there."""
    loader = load(rows, **{"num_workers": 1, "max_bad_share": 0.2, **options})
    if isinstance(rows, Faulty):
        rows.armed = True
    _built.append(loader)
    return loader


_built: list[packhorse.Loader] = []


@pytest.fixture(autouse=True)
def _no_workers_left() -> Iterator[None]:
    """An error that a test has caught holds on to its loader, and so do its num_workers."""
    yield
    while _built:
        _built.pop().close()


def until_it_stops(loader: packhorse.Loader, seen: list[int]) -> None:
    """Adds what is delivered to ``seen``."""
    for batch in loader:
        seen += batch.info.samples


def lost_samples(loader: packhorse.Loader) -> dict[str, str]:
    """What the ledger has: reasons by key."""
    return {drop.key: drop.reason for drop in loader.ledger}


# Workers that die.


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("fault", [crash, be_killed, leave])
def test_a_worker_that_dies_once_is_replaced_and_nothing_is_lost_or_doubled(
    fault: Any, num_workers: int, tmp_path: Path
) -> None:
    loader = build_loader(Faulty(texts(ROWS), {17: Once(tmp_path, fault)}), num_workers=num_workers)
    seen = delivered_rows(loader)
    assert (tmp_path / "happened0").exists()
    assert sorted(seen) == EVERYTHING
    assert len(loader.ledger) == 0
    assert loader.epoch_stats is not None
    assert (loader.epoch_stats.delivered, loader.epoch_stats.lost) == (ROWS, 0)


def test_batches_after_a_death_are_those_of_a_run_without_one(tmp_path: Path) -> None:
    whole = [loader_batch["input_ids"].tolist() for loader_batch in build_loader(texts(ROWS), num_workers=0)]
    loader = build_loader(Faulty(texts(ROWS), {17: Once(tmp_path, crash, times=2)}), num_workers=2)
    assert [batch["input_ids"].tolist() for batch in loader] == whole


def test_a_worker_killed_while_the_loop_trains_does_not_disturb_the_training_step() -> None:
    loader = build_loader(texts(ROWS), num_workers=2)
    before = children()
    seen: list[int] = []
    killed = 0
    for step, batch in enumerate(loader):
        seen += batch.info.samples
        if step in (1, 4):
            pids = children() - before
            assert pids
            os.kill(min(pids), signal.SIGKILL)
            killed += 1
            end = time.monotonic() + 0.3
            while time.monotonic() < end:  # a training step, in which an error has no business
                time.sleep(0.01)
    assert killed == 2
    assert sorted(seen) == EVERYTHING


def test_a_worker_killed_between_two_epochs_is_replaced() -> None:
    loader = build_loader(texts(ROWS), num_workers=2)
    before = children()
    first = delivered_rows(loader)
    pids = children() - before
    os.kill(max(pids), signal.SIGKILL)
    time.sleep(0.2)
    assert sorted(first) == sorted(delivered_rows(loader)) == EVERYTHING
    assert loader.epoch == 1


def test_a_worker_killed_after_a_break_is_replaced_and_the_rest_comes() -> None:
    loader = build_loader(texts(ROWS), num_workers=1)
    before = children()
    first = delivered_rows(loader, 3)
    for worker in children() - before:
        os.kill(worker, signal.SIGKILL)
    time.sleep(0.2)
    assert sorted(first + delivered_rows(loader)) == EVERYTHING


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_sample_that_kills_its_worker_every_time_stops_the_run_and_is_named(num_workers: int) -> None:
    loader = build_loader(Faulty(texts(ROWS), {17: crash}), num_workers=num_workers)
    seen: list[int] = []
    with pytest.raises(SystemFault, match="workers died 3 times") as caught:
        until_it_stops(loader, seen)
    guilty = next(pack for pack in loader.plan.bins() if 17 in pack)
    assert set(str(caught.value).partition(": samples ")[2].partition(". A")[0].split(", ")) == {
        str(index) for index in guilty
    }
    assert "Segmentation fault" in str(caught.value)
    assert "while encoding 17:" in str(caught.value)
    assert 17 not in seen
    assert len(set(seen)) == len(seen)
    state = loader.state_dict()
    again = build_loader(texts(ROWS))
    again.load_state_dict(state)
    assert sorted(seen + delivered_rows(again)) == EVERYTHING


def test_after_deaths_that_were_survived_all_workers_work_again(tmp_path: Path) -> None:
    early = delivered_rows(load(texts(ROWS)), 3)[-1]
    loader = build_loader(
        Faulty(texts(ROWS), {early: Once(tmp_path, crash, times=2)}), num_workers=2, prefetch_factor=1
    )
    before = children()
    seen: list[int] = []
    for batch in loader:
        seen += batch.info.samples
        last = len(children() - before)
    assert (tmp_path / "happened1").exists()
    assert sorted(seen) == EVERYTHING
    assert last == 2


def test_no_worker_is_left_after_by_a_run_that_stops() -> None:
    before = children()
    loader = build_loader(Faulty(texts(ROWS), {17: crash}), num_workers=2)
    with pytest.raises(SystemFault):
        delivered_rows(loader)
    assert children() - before == set()


# Data that fail.


@pytest.fixture
def images(tmp_path: Path) -> list[dict[str, Any]]:
    """Every third example has an image of its own on the disk."""
    rows = []
    for number, row in enumerate(texts(ROWS)):
        if number % 3:
            rows.append(row)
            continue
        path = tmp_path / f"{number}.png"
        make_image(64 + number % 3, 60).save(path)
        rows.append(chat("what", f"this {number}", {"type": "image", "image": str(path)}))
    return rows


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_image_that_disappears_in_mid_epoch_is_recorded_and_its_pack_goes_on(
    images: list[dict[str, Any]], tmp_path: Path, num_workers: int
) -> None:
    loader = build_loader(images, num_workers=num_workers, batch_size=2)
    seen = delivered_rows(loader, 1)
    gone = [n for n in range(0, ROWS, 3) if n not in seen][-3:]
    for number in gone:
        (tmp_path / f"{number}.png").unlink()
    companions = 0
    for batch in loader:
        seen += batch.info.samples
        companions += bool(batch.info.lost) and bool(batch.info.samples)
    # An image that a worker had read ahead is no loss.
    assert sorted(seen) + sorted(map(int, lost_samples(loader))) == sorted(seen) + sorted(
        set(EVERYTHING) - set(seen)
    )
    assert len(seen) == len(set(seen))
    assert set(lost_samples(loader).values()) == {"missing_media"}
    assert set(map(int, lost_samples(loader))) <= set(gone)
    assert lost_samples(loader)
    assert companions, "no pack had a sample that was left"
    stats = loader.epoch_stats
    assert stats is not None
    assert stats.reasons == {"missing_media": len(lost_samples(loader))}
    assert stats.delivered == len(seen)


@pytest.mark.parametrize("mode", ["pack", "pad"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_read_that_hangs_is_recorded_after_its_time_and_the_run_goes_on(
    num_workers: int, mode: str, tmp_path: Path, images: list[dict[str, Any]]
) -> None:
    os.mkfifo(tmp_path / "fifo")  # no process ever writes to it
    reading = partial(Path.read_bytes, tmp_path / "fifo")
    loader = build_loader(
        Faulty(images, {17: hang, 30: reading}, only_workers=False),
        num_workers=num_workers,
        mode=mode,
        sample_timeout=0.5,
    )
    seen = delivered_rows(loader)
    assert sorted(seen) == [n for n in EVERYTHING if n not in (17, 30)]
    assert lost_samples(loader) == {"17": "broken_media", "30": "broken_media"}
    details = [drop.detail for drop in loader.ledger]
    assert all("not ready after 0.5 s (sample_timeout)" in detail for detail in details)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_an_image_that_becomes_a_pipe_in_mid_epoch_is_recorded_and_not_waited_for(
    tmp_path: Path, images: list[dict[str, Any]]
) -> None:
    loader = build_loader(images)
    (tmp_path / "30.png").unlink()
    os.mkfifo(tmp_path / "30.png")
    assert sorted(delivered_rows(loader)) == [n for n in EVERYTHING if n != 30]
    assert lost_samples(loader) == {"30": "missing_media"}


def test_a_batch_that_does_not_come_in_time_stops_the_run_and_names_its_samples() -> None:
    before = children()
    loader = build_loader(Faulty(texts(ROWS), {17: hang}), num_workers=2, timeout=2)
    started = time.monotonic()
    with pytest.raises(SystemFault, match=r"did not arrive within timeout=2 s") as caught:
        delivered_rows(loader)
    assert "17" in str(caught.value).partition(": samples ")[2].partition(". A")[0].split(", ")
    assert "sample_timeout" in str(caught.value)
    assert time.monotonic() - started < 20
    assert children() - before == set()


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "mistake",
    [NameError("name 'imgae' is not defined"), TypeError("a mistake"), ConfigError("no such thing")],
)
def test_a_mistake_in_a_program_stops_the_run_and_is_no_bad_sample(
    mistake: Exception, num_workers: int, tmp_path: Path
) -> None:
    loader = build_loader(
        Faulty(texts(ROWS), {17: raising(mistake)}, only_workers=False), num_workers=num_workers
    )
    with pytest.raises(type(mistake), match=str(mistake)):
        delivered_rows(loader)
    assert len(loader.ledger) == 0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_disk_that_fails_while_rows_are_read_stops_the_run_and_drops_no_row(
    num_workers: int, tmp_path: Path
) -> None:
    loader = build_loader(str(write_chats(tmp_path, ROWS)), num_workers=num_workers)
    file = os.open("/proc/self/mem", os.O_RDONLY)  # the kernel answers EIO where no memory is mapped
    os.dup2(file, loader.dataset.sources[0].file._fd)
    os.close(file)
    with pytest.raises(SystemFault, match=r"chats\.jsonl: input/output error.*check the disk"):
        delivered_rows(loader)
    assert len(loader.ledger) == 0


@pytest.mark.parametrize(
    "error",
    [
        BadSample("torn in two", reason="broken_media", key="x/7", stage="media"),
        ConfigError("pack_size=1 is too small"),
        SystemFault("no file handle is left"),
        TooManyBad("12 samples failed"),
        RuntimeError("the request timed out after 5 s, a proxy exited unexpectedly"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        KeyError("messages"),
    ],
)
def test_what_a_worker_raises_comes_back_with_its_words(error: Exception) -> None:
    loader = build_loader(Faulty(texts(ROWS), {17: raising(error)}), on_bad="raise")
    with pytest.raises((type(error), RuntimeError)) as caught:
        delivered_rows(loader)
    assert str(error) in str(caught.value)
    if not isinstance(error, UnicodeDecodeError):  # which torch cannot build from words alone
        assert type(caught.value) is type(error)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_is_too_slow_is_an_error_where_bad_samples_are(num_workers: int) -> None:
    data = Faulty(texts(ROWS), {17: hang}, only_workers=False)
    loader = build_loader(data, num_workers=num_workers, sample_timeout=0.3, on_bad="raise")
    with raises_bad_sample("broken_media", key="17", stage="media", match="not ready after 0.3 s"):
        delivered_rows(loader)


# A ledger that cannot be written.


def with_something_to_record(number: int) -> list[dict[str, Any]]:
    """Healthy examples: each is cut, which is recorded, and none is bad."""
    return [chat(f"question {n}", f"answer {n} " * 30) for n in range(number)]


def cutting(number: int, folder: Path, **options: Any) -> packhorse.Loader:
    """A loader with a ledger in a folder, into which it writes for every sample."""
    rows = with_something_to_record(number)
    return build_loader(rows, ledger_dir=folder / "ledger", on_overlong="truncate", pack_size=64, **options)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_full_disk_under_the_ledger_stops_the_run_and_no_healthy_sample_is_called_bad(
    num_workers: int, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", "16k") as mounted:
        if not mounted:
            pytest.skip("mounting a file system is not allowed here")
        loader = cutting(200, tmp_path / "disk", num_workers=num_workers)
        with pytest.raises(SystemFault, match="the disk is full") as caught:
            delivered_rows(loader)
        file = tmp_path / "disk" / "ledger" / "rank-00000.jsonl"
        assert str(file.with_suffix("")) in str(caught.value)  # or the step file, next to it
        assert 0 < len(Ledger.load(file)) < 200
        assert {drop.reason for drop in loader.ledger} == {"truncated"}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_ledger_that_may_not_grow_stops_the_run_with_the_reason(num_workers: int, tmp_path: Path) -> None:
    loader = cutting(200, tmp_path, num_workers=num_workers)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(
            SystemFault, match=r"rank-00000.(jsonl|steps) cannot be written: the file size limit is reached"
        ):
            delivered_rows(loader)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert {drop.reason for drop in loader.ledger} == {"truncated"}


def test_a_ledger_with_free_space_again_gets_what_could_not_be_written(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as mounted:
        if not mounted:
            pytest.skip("mounting a file system is not allowed here")
        ballast = tmp_path / "disk" / "ballast"
        ballast.write_bytes(bytes(56 * 1024))
        loader = cutting(60, tmp_path / "disk", num_workers=0)
        seen: list[int] = []
        with pytest.raises(SystemFault):
            until_it_stops(loader, seen)
        ballast.unlink()
        seen += delivered_rows(loader)
        assert sorted(seen) == list(range(60))
        written = Ledger.load(tmp_path / "disk" / "ledger" / "rank-00000.jsonl")
        assert sorted(int(drop.key) for drop in written) == list(range(60))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_ledger_folder_that_may_not_be_written_stops_the_run(num_workers: int, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k", "ro") as mounted:
        if not mounted:
            pytest.skip("mounting a file system is not allowed here")
        loader = cutting(20, tmp_path / "disk", num_workers=num_workers)
        with pytest.raises(SystemFault, match="Read-only file system") as caught:
            delivered_rows(loader)
        assert str(tmp_path / "disk" / "ledger") in str(caught.value)
        assert "in memory" in str(caught.value)


def test_a_file_where_the_ledger_folder_should_be_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("not a folder")
    loader = cutting(20, tmp_path)
    with pytest.raises(SystemFault, match="cannot be written"):
        delivered_rows(loader)


# How much may be bad.


def failing(number: int, bad: list[int]) -> Faulty:
    torn = raising(BadSample("torn in two", reason="broken_media"))
    return Faulty(texts(number), dict.fromkeys(bad, torn), only_workers=False)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_share_of_bad_samples_is_tolerated_to_the_last_and_one_more_stops_the_run(num_workers: int) -> None:
    at_the_limit = build_loader(failing(100, list(range(29))), max_bad_share=0.29, num_workers=num_workers)
    assert sorted(delivered_rows(at_the_limit)) == list(range(29, 100))
    assert at_the_limit.epoch_stats is not None
    assert at_the_limit.epoch_stats.lost == 29
    over = build_loader(failing(100, list(range(30))), max_bad_share=0.29, num_workers=num_workers)
    with pytest.raises(TooManyBad, match=r"max_bad_share=29.00%.*torn in two") as caught:
        delivered_rows(over)
    assert (caught.value.bad, caught.value.samples) == (30, 100)
    assert caught.value.reasons == {"broken_media": 30}


def test_samples_found_bad_when_counted_count_too() -> None:
    rows = texts(96) + [{"conversation": []}] * 4
    assert len(delivered_rows(build_loader(rows, max_bad_share=0.04))) == 96
    with pytest.raises(TooManyBad, match=r"max_bad_share=3\.00%") as caught:
        build_loader(rows, max_bad_share=0.03)
    assert (caught.value.bad, caught.value.samples) == (4, 100)
    data = failing(100, [3])
    data.rows = rows
    with pytest.raises(TooManyBad) as caught:
        delivered_rows(build_loader(data, max_bad_share=0.04))
    assert (caught.value.bad, caught.value.samples) == (5, 100)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_consecutive_failures_are_tolerated_up_to_the_limit(num_workers: int) -> None:
    first = load(texts(ROWS))
    order = delivered_rows(first)
    options = {"max_bad_share": None, "max_consecutive_bad": 5, "num_workers": num_workers}
    assert len(delivered_rows(build_loader(failing(ROWS, order[20:25]), **options))) == ROWS - 5
    with pytest.raises(TooManyBad, match="max_consecutive_bad=5") as caught:
        delivered_rows(build_loader(failing(ROWS, order[20:26]), **options))
    assert (caught.value.setting, caught.value.bad) == ("max_consecutive_bad", 6)
    assert caught.value.reasons == {"broken_media": 6}
    # With one good sample among them they are not consecutive.
    assert (
        len(delivered_rows(build_loader(failing(ROWS, order[20:25] + order[26:31]), **options))) == ROWS - 10
    )


def test_a_batch_at_which_the_run_was_stopped_does_not_count_as_used() -> None:
    data = failing(ROWS, [30])
    loader = build_loader(data, max_bad_share=0.0)
    seen: list[int] = []
    with pytest.raises(TooManyBad):
        until_it_stops(loader, seen)
    data.armed = False
    again = build_loader(data, max_bad_share=0.1)
    again.load_state_dict(loader.state_dict())
    assert sorted(seen + delivered_rows(again)) == [n for n in EVERYTHING if n != 30]


def test_with_several_ranks_the_share_is_that_of_all_of_them() -> None:
    """Each rank may lose its part and what chance adds; a rank that loses far more stops."""
    for rank in range(4):
        data = failing(400, list(range(0, 400, 4)))
        with pytest.raises(TooManyBad, match="on this rank"):
            delivered_rows(build_loader(data, rank=rank, size=4, max_bad_share=0.05))
    assert (
        sum(
            len(delivered_rows(build_loader(failing(400, [5]), rank=r, size=4, num_workers=0)))
            for r in range(4)
        )
        == 399
    )


@pytest.mark.slow  # each of them imports everything
def test_workers_that_are_spawned_are_replaced_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path / "path"))
    loader = build_loader(Faulty(texts(20), {7: Once(tmp_path, be_killed)}), multiprocessing_context="spawn")
    assert sorted(delivered_rows(loader)) == list(range(20))


def test_workers_end_with_the_last_reference_to_their_loader() -> None:
    gc.collect()
    before = children()
    gc.disable()  # nothing but references keeps them
    try:
        loader = load(texts(ROWS), num_workers=2)
        delivered_rows(loader, 2)
        assert len(children() - before) == 2
        started = time.monotonic()
        del loader
        assert children() - before == set()
        assert time.monotonic() - started < 4
    finally:
        gc.enable()
