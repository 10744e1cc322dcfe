"""Broken samples are replaced the same way on every run, recorded, and never hide a programming error."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset

from packhorse.datasets import RobustDatasetWrapper, open_meta_dataset
from packhorse.encode.robust import make_robust_collate
from packhorse.errors import BadSample, ConfigError, ReplacementsFailed
from packhorse.ledger import Ledger, default_ledger
from raising import raises_config


class Numbers(Dataset[dict[str, int]]):
    """Sample i is {"id": i}; some indices fail."""

    def __init__(self, size: int, broken: dict[int, Exception] | None = None) -> None:
        self.size, self.broken = size, broken or {}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, int]:
        if index in self.broken:
            raise self.broken[index]
        return {"id": index}


def ids(samples: list[dict[str, int]]) -> list[int]:
    return [sample["id"] for sample in samples]


class Picky:
    """A collate function that can be sent to a spawned worker."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad

    def __call__(self, samples: list[dict[str, int]]) -> list[int]:
        if self.bad & set(ids(samples)):
            raise ValueError("odd")
        return ids(samples)


def picky(bad: set[int], error: Exception) -> Callable[[list[dict[str, int]]], list[int]]:
    def collate(samples: list[dict[str, int]]) -> list[int]:
        if bad & set(ids(samples)):
            raise error
        return ids(samples)

    return collate


def test_it_is_a_torch_dataset_that_passes_good_samples_on() -> None:
    wrapper = RobustDatasetWrapper(Numbers(3), ledger=Ledger())
    assert isinstance(wrapper, Dataset)
    assert ids(list(wrapper)) == [0, 1, 2]
    assert wrapper[-1] == {"id": 2}
    assert len(wrapper.ledger) == 0
    with pytest.raises(IndexError):
        wrapper[3]


def test_the_replacement_depends_on_seed_epoch_and_index_alone() -> None:
    def replacement(seed: int = 0, epoch: int = 0, index: int = 5) -> int:
        broken = {i: OSError("x") for i in (5, 6)}
        wrapper = RobustDatasetWrapper(Numbers(1000, broken), seed=seed, ledger=Ledger())
        wrapper.set_epoch(epoch)
        wrapper[index - 3]  # earlier requests do not matter
        return wrapper[index]["id"]

    assert replacement() == replacement()
    assert len({replacement(), replacement(seed=1), replacement(epoch=1), replacement(index=6)}) == 4


def test_a_replacement_is_recorded_with_reason_and_substitute() -> None:
    broken = {2: BadSample("cut off", reason="broken_media", stage="media"), 3: ValueError("odd")}
    wrapper = RobustDatasetWrapper(Numbers(4, broken), ledger=Ledger())
    instead = wrapper[2]["id"]
    wrapper[3]
    first, second = wrapper.ledger
    assert (first.key, first.stage, first.reason, first.action) == ("2", "media", "broken_media", "replaced")
    assert first.detail == f"cut off; {instead} instead"
    assert second.reason == "sample_failed"
    assert second.detail.startswith("ValueError: odd; ")


def test_skipping_gives_none_and_raising_raises() -> None:
    broken = {1: OSError("gone")}
    wrapper = RobustDatasetWrapper(Numbers(3, broken), on_bad="skip", ledger=Ledger())
    assert [wrapper[i] for i in range(3)] == [{"id": 0}, None, {"id": 2}]
    assert [(d.key, d.action) for d in wrapper.ledger] == [("1", "dropped")]
    assert wrapper.robust_collate(ids)([wrapper[i] for i in range(3)]) == [0, 2]
    assert wrapper.robust_collate(ids)([None, None]) is None
    with pytest.raises(OSError, match="gone"):
        RobustDatasetWrapper(Numbers(3, broken), on_bad="raise")[1]
    with raises_config("on_bad", "drop"):
        RobustDatasetWrapper(Numbers(1), on_bad="drop")  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["replace", "skip", "raise"])
@pytest.mark.parametrize(
    "error", [NameError("x"), TypeError("x"), AttributeError("x"), ImportError("x"), MemoryError()]
)
def test_a_programming_error_is_never_retried(policy: Any, error: Exception) -> None:
    wrapper = RobustDatasetWrapper(Numbers(3, {1: error}), on_bad=policy, ledger=Ledger())
    with pytest.raises(type(error)):
        wrapper[1]
    with pytest.raises(type(error)):
        wrapper.robust_collate(picky({0}, error))([wrapper[0]])
    assert len(wrapper.ledger) == 0


def test_when_all_replacements_fail_the_last_cause_is_chained() -> None:
    broken = {i: OSError(f"gone {i}") for i in range(5)}
    with pytest.raises(ReplacementsFailed) as error:
        RobustDatasetWrapper(Numbers(5, broken), 3, ledger=Ledger())[0]
    assert isinstance(error.value, RuntimeError)
    assert error.value.failures == 4
    assert error.value.last is not None
    assert error.value.__cause__ is error.value.last.original
    assert isinstance(error.value.__cause__, OSError)


def test_a_dataset_of_one_broken_sample_ends_instead_of_looping() -> None:
    with pytest.raises(ReplacementsFailed):
        RobustDatasetWrapper(Numbers(1, {0: OSError("gone")}), ledger=Ledger())[0]
    assert len(RobustDatasetWrapper(Numbers(0))) == 0


def test_a_batch_that_cannot_be_collated_is_redrawn_and_recorded() -> None:
    def run() -> tuple[list[int], list[str]]:
        wrapper = RobustDatasetWrapper(Numbers(100), ledger=Ledger())
        collate = wrapper.robust_collate(picky({3}, ValueError("token mismatch")))
        batch = collate(wrapper.__getitems__([2, 3]))
        return batch, [f"{d.key} {d.reason} {d.action} {d.detail}" for d in wrapper.ledger]

    batch, entries = run()
    assert len(batch) == 2
    assert 3 not in batch
    assert entries == [
        f"{i} collate_failed replaced ValueError: token mismatch (which sample of the batch is at fault is "
        f"not known); {other} instead"
        for i, other in zip((2, 3), batch, strict=True)
    ]
    assert run() == (batch, entries), "the same on every run"


def naming(bad: set[int]) -> Callable[[Any], list[int]]:
    """A collate function that names the sample which it cannot take."""

    def collate(samples: Any) -> list[int]:
        for sample, key in zip(samples, samples.keys, strict=True):
            if sample["id"] in bad:
                raise BadSample("no image", reason="missing_media", key=key, stage="media")
        return ids(samples)

    return collate


def test_only_the_sample_that_an_error_names_is_dropped() -> None:
    wrapper = RobustDatasetWrapper(Numbers(9), on_bad="skip", ledger=Ledger())
    assert wrapper.robust_collate(naming({3, 5}))(wrapper.__getitems__([2, 3, 4, 5])) == [2, 4]
    entries = [(drop.key, drop.reason, drop.stage, drop.action) for drop in wrapper.ledger]
    assert entries == [(key, "missing_media", "media", "dropped") for key in ("3", "5")]
    assert wrapper.robust_collate(naming({3}))(wrapper.__getitems__([3])) is None


def test_only_the_sample_that_an_error_names_is_replaced() -> None:
    def run(bad: set[int]) -> tuple[list[int], list[str]]:
        wrapper = RobustDatasetWrapper(Numbers(9), ledger=Ledger())
        batch = wrapper.robust_collate(naming(bad))(wrapper.__getitems__([2, 3, 4]))
        return batch, [f"{d.key} {d.action} {d.detail}" for d in wrapper.ledger]

    (two, other, four), entries = run({3})
    assert (two, four) == (2, 4)
    assert entries == [f"3 replaced no image; {other} instead"]
    # A substitute that fails too is passed over and not recorded: it was not requested.
    (_, another, _), entries = run({3, other})
    assert another not in (3, other)
    assert entries == [f"3 replaced no image; {another} instead"]
    assert run({3, other}) == run({3, other})
    with pytest.raises(ReplacementsFailed) as failed:
        run(set(range(9)))
    assert failed.value.last is not None
    assert failed.value.last.detail == "no image"


def test_an_error_that_names_no_sample_of_a_named_batch_is_about_all_of_them() -> None:
    wrapper = RobustDatasetWrapper(Numbers(9), on_bad="skip", ledger=Ledger())
    too_long = BadSample("all are too long", reason="too_long", stage="collate")
    assert wrapper.robust_collate(picky({3}, too_long))(wrapper.__getitems__([2, 3])) is None
    assert [(drop.key, drop.reason) for drop in wrapper.ledger] == [("2", "too_long"), ("3", "too_long")]
    assert wrapper.robust_collate(picky({3}, too_long))([{"id": 3}]) is None
    assert wrapper.ledger.counts()["collate_failed"] == 1, "their rows are unknown"


@pytest.mark.parametrize("policy", ["replace", "skip"])
def test_a_wrong_set_up_is_not_counted_as_bad_samples(policy: Any) -> None:
    wrapper = RobustDatasetWrapper(Numbers(9), on_bad=policy, ledger=Ledger())
    with pytest.raises(ConfigError, match="use another"):
        wrapper.robust_collate(picky({3}, ConfigError("use another")))(wrapper.__getitems__([2, 3]))
    assert len(wrapper.ledger) == 0


def test_a_batch_that_never_collates_stops_with_its_cause() -> None:
    wrapper = RobustDatasetWrapper(Numbers(9), max_retries=2, ledger=Ledger())
    with pytest.raises(ReplacementsFailed) as error:
        wrapper.robust_collate(picky(set(range(9)), ValueError("never")))([wrapper[0]])
    assert error.value.failures == 3
    assert isinstance(error.value.__cause__, ValueError)
    with pytest.raises(ValueError, match="never"):
        RobustDatasetWrapper(Numbers(9), on_bad="raise").robust_collate(picky({0}, ValueError("never")))(
            [{"id": 0}]
        )


def test_skipping_everything_stops_instead_of_training_on_nothing() -> None:
    broken = {i: OSError(f"gone {i}") for i in range(20) if i != 4}
    wrapper = RobustDatasetWrapper(Numbers(20, broken), on_bad="skip", max_consecutive_bad=5, ledger=Ledger())
    assert [wrapper[i] for i in range(9)].count(None) == 8, "a good sample in between restarts the count"
    with pytest.raises(ReplacementsFailed) as error:
        wrapper[9]
    assert error.value.failures == 5
    assert error.value.last is not None
    assert error.value.last.detail == "OSError: gone 9"
    assert isinstance(error.value.__cause__, OSError)
    wrapper = RobustDatasetWrapper(Numbers(9), on_bad="skip", max_consecutive_bad=2, ledger=Ledger())
    collate = wrapper.robust_collate(picky({0, 1}, RuntimeError("sizes differ")))
    assert collate([wrapper[0]]) is None
    with pytest.raises(ReplacementsFailed) as error:
        collate([wrapper[1]])
    assert error.value.failures == 2


def test_any_dataset_can_be_collated_robustly() -> None:
    before = default_ledger().counts().get("collate_failed", 0)
    collate = make_robust_collate(Numbers(50), picky({7, 8}, ValueError("odd")), max_retries=9)
    assert collate([{"id": 1}]) == [1]
    assert 7 not in collate([{"id": 7}])
    collate([{"id": 7}, {"id": 8}])
    # The rows are unknown: none is named, all are counted.
    assert default_ledger().counts()["collate_failed"] - before == 3
    assert {drop.key for drop in default_ledger() if drop.reason == "collate_failed"} == {""}


def test_iterating_does_not_take_a_samples_index_error_for_the_end() -> None:
    broken = Numbers(5, {2: IndexError("inside")})
    with pytest.raises(IndexError, match="inside"):
        list(RobustDatasetWrapper(broken, on_bad="raise"))
    assert len(list(RobustDatasetWrapper(broken, ledger=Ledger()))) == 5


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_batch_lost_in_a_worker_is_named_row_by_row(method: str) -> None:
    ledger = Ledger()
    wrapper = RobustDatasetWrapper(Numbers(12), on_bad="skip", ledger=ledger)
    loader = DataLoader(
        Subset(wrapper, [11, 3, 5, 7]),
        batch_size=2,
        num_workers=1,
        collate_fn=wrapper.robust_collate(Picky({3})),
        multiprocessing_context=method,
    )
    assert list(loader) == [None, [5, 7]]
    assert {drop.key for drop in ledger} == {"11", "3"}


def test_a_processor_without_videos_does_not_stop_samples_without_videos() -> None:
    example = {"conversation": [{"role": "user", "content": "hi"}]}
    wrapper = RobustDatasetWrapper([example], ledger=Ledger())
    wrapper.preload_media, wrapper.processor = True, object()
    assert wrapper[0]["_injected_fake"] is True


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_workers_replace_is_in_the_ledger_of_the_parent(method: str) -> None:
    ledger = Ledger()
    wrapper = RobustDatasetWrapper(Numbers(20, {4: OSError("gone"), 11: OSError("gone")}), ledger=ledger)
    loader = DataLoader(
        wrapper,
        batch_size=5,
        num_workers=2,
        collate_fn=wrapper.robust_collate(ids),
        multiprocessing_context=method,
    )
    seen = [i for batch in loader for i in batch]
    assert len(seen) == 20
    assert {drop.key for drop in ledger} == {"4", "11"}
    alone = RobustDatasetWrapper(wrapper.dataset, ledger=Ledger())
    assert seen == ids([alone[i] for i in range(20)]), "workers choose the same replacements"


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    Image.new("RGBA", (30, 20), (255, 0, 0, 255)).save(tmp_path / "good.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:40])

    def row(text: str, *images: str) -> str:
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]
        return json.dumps({"messages": turns, "images": list(images)})

    rows = [row("<image>a", "good.png"), row("b"), row("<image>c", "cut.png"), row("<image>d", "no.png")]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    meta = {"a": {"file_name": "a.jsonl", "media_dir": "."}}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    return tmp_path / "meta.json"


def test_preloading_loads_media_and_gives_text_the_fake_image(mixture: Path) -> None:
    dataset = list(open_meta_dataset(mixture)[:2])
    before = copy.deepcopy(dataset)
    wrapper = RobustDatasetWrapper(dataset)
    assert wrapper.preload_media is False
    assert wrapper[0] == dataset[0]
    wrapper.preload_media = True
    with_image, text_only = wrapper[0], wrapper[1]
    image = with_image["conversation"][0]["content"][0]["image"]
    assert (image.mode, image.size) == ("RGB", (30, 20))
    assert not with_image.get("_injected_fake")
    assert text_only["_injected_fake"] is True
    fake = text_only["conversation"][0]["content"][0]["image"]
    assert (fake.size, fake.getpixel((5, 5))) == ((56, 56), (255, 255, 255))
    assert dataset == before, "the caller's examples stay as they were"


def test_broken_media_are_named_by_row_in_the_datasets_own_ledger(mixture: Path) -> None:
    wrapper = RobustDatasetWrapper(open_meta_dataset(mixture), on_bad="skip")
    wrapper.preload_media = True
    assert [wrapper[i] is None for i in range(4)] == [False, False, True, True]
    assert {d.key: (d.dataset, d.reason) for d in wrapper.dataset.ledger} == {
        "a/2": ("a", "broken_media"),
        "a/3": ("a", "missing_media"),
    }


def test_a_broken_media_item_is_reported_with_the_location_of_its_row_and_no_line_is_counted_for_it(
    mixture: Path,
) -> None:
    def places() -> list[str]:
        wrapper = RobustDatasetWrapper(open_meta_dataset(mixture), on_bad="skip")
        wrapper.preload_media = True
        assert wrapper[2] is wrapper[3] is None
        return [drop.detail.rpartition("; ")[2].partition(" (byte")[0] for drop in wrapper.ledger]

    file = mixture.parent / "a.jsonl"
    assert places() == [f"{file}:3", f"{file}:4"]
    file.write_text("\n" + file.read_text())
    assert places() == [f"{file}, row 2", f"{file}, row 3"]
