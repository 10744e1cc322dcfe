"""Taking up a run: nothing twice, nothing lost, the same batches; whatever has changed around it."""

import itertools
import json

import pytest
import torch

from contract.tiny_models import tiny_model
from count_samples import chat, write_meta, write_rows
from loader_samples import delivered_rows, load, mixed_rows, texts
from packhorse.errors import BadSample, ConfigError
from raising import raises_config

SHAPES = [(1, 1, 1), (3, 2, 1), (9, 1, 1), (4, 3, 2)]


def batches(loader, steps=None):
    return [dict(batch) for batch in itertools.islice(loader, steps)]


def assert_bit_equal(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]


def loaders_of_all_ranks(rows, shape, mode):
    world, batch_size, accumulation = shape
    for rank in range(world):
        yield load(
            rows, rank, world, batch_size=batch_size, gradient_accumulation_steps=accumulation, mode=mode
        )


@pytest.mark.parametrize("mode", ["pack", "pad"])
@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(SHAPES, 2)))
def test_another_shape_gets_exactly_what_was_not_used(before, after, mode):
    rows = texts(60)
    stop = 2
    used, state = [], None
    for loader in loaders_of_all_ranks(rows, before, mode):
        used += delivered_rows(loader, stop)
        state = loader.state_dict()
    state = json.loads(json.dumps(state))
    steps = set()
    for loader in loaders_of_all_ranks(rows, after, mode):
        loader.load_state_dict(state)
        if loader.epoch == 0:
            steps.add(loader.remaining)
            used += delivered_rows(loader)

    assert sorted(used) == list(range(60))
    assert len(steps) <= 1


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("mode", ["pack", "pad"])
def test_the_same_shape_goes_on_with_the_same_batches(mode, num_workers):
    rows = mixed_rows(40)
    loader = load(rows, 1, 2, mode=mode, batch_size=2, num_workers=num_workers)
    whole = batches(loader)
    loader.close()
    assert len(whole) > 3
    for stop in (1, len(whole) // 2, len(whole) - 1):
        first = load(rows, 1, 2, mode=mode, batch_size=2, num_workers=num_workers)
        before = batches(first, stop)
        state = first.state_dict()  # with workers that have built some batches ahead
        first.close()
        second = load(rows, 1, 2, mode=mode, batch_size=2, num_workers=2 - num_workers)
        second.load_state_dict(state)
        assert second.remaining == len(whole) - stop
        assert_bit_equal(before + batches(second), whole)
        second.close()


@pytest.mark.parametrize("with_files", [False, True])
def test_a_state_is_small_and_plain_and_the_same_on_every_rank(tmp_path, with_files):
    rows = texts(40)
    states = []
    for rank in range(3):
        loader = load(rows, rank, 3, ledger_dir=tmp_path if with_files else None)
        delivered_rows(loader, 2)
        states.append(loader.state_dict())
    assert states[0] == states[1] == states[2]
    assert len(json.dumps(states[0])) < 1000


def test_steps_that_were_fetched_ahead_need_not_count():
    rows = texts(40)
    loader = load(rows)
    delivered_rows(loader, 5)
    state = loader.state_dict(consumed=3)
    again = load(rows)
    again.load_state_dict(state)
    assert again.cursor == 3
    delivered_rows(again, 4)
    assert again.state_dict(consumed=1)["segments"] == [[1, 1, 1, 4]]
    with raises_config("consumed", 5, match="4 micro-steps"):
        again.state_dict(consumed=5)


def test_a_state_of_another_plan_is_rejected_and_both_are_named():
    one, other = load(texts(20)), load(texts(20), seed=1)
    with raises_config("plan", one.plan_key, match=f"this loader has plan {other.plan_key}"):
        other.load_state_dict(one.state_dict())
    assert one.plan_key != other.plan_key


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pack_size": 300}, r"differ in the capacity of a pack \(256 there, 300 here\):"),
        ({"seed": 7}, r"differ in seed \(0 there, 7 here\):"),
        ({"alignment": 4}, r"differ in alignment \(1 there, 4 here\):"),
        ({"max_documents": 3}, "limits"),
        ({"mode": "pad"}, r"mode \(pack there, pad here\)"),
    ],
)
def test_a_rejected_state_says_what_differs(change, message):
    state = load(texts(20)).state_dict()
    with raises_config("plan", state["plan"], match=message):
        load(texts(20), **change).load_state_dict(state)


def test_a_state_of_other_rows_in_memory_is_rejected():
    state = load(texts(20)).state_dict()
    with raises_config("data", ["data in memory"], match="changed since"):
        load(texts(19)).load_state_dict(state)


def test_a_rejected_state_names_up_to_five_datasets_that_changed(tmp_path):
    names = ["books", "charts", "coco", "maps", "songs", "texts"]
    meta = write_meta(tmp_path, {name: {"file_name": f"{name}.jsonl"} for name in names})
    states = []
    for words in (5, 6):
        for name in names:
            write_rows(tmp_path / f"{name}.jsonl", [chat(words, 9)])
        loader = load(meta)
        states.append(loader.state_dict())
    with raises_config("data", names, match=r"'books'.*'songs'[^;]*; …\. Restore them") as caught:
        loader.load_state_dict(states[0])
    assert "'texts'" not in str(caught.value)


def test_a_state_without_what_its_plan_was_made_from_is_rejected_all_the_same():
    state = load(texts(20)).state_dict()
    del state["made_from"]
    with raises_config("plan", state["plan"], match=r"has plan \w+: data"):
        load(texts(20), seed=1).load_state_dict(state)


@pytest.mark.parametrize(
    "change", [{"pack_size": 300}, {"mode": "pad"}, {"max_documents": 3}, {"alignment": 4}, {"seed": 7}]
)
def test_whatever_changes_the_packs_or_their_order_changes_the_name_of_the_plan(change):
    rows = texts(20)
    assert load(rows).plan_key != load(rows, **change).plan_key


@pytest.mark.parametrize(
    "change",
    [{"num_workers": 1}, {"batch_size": 3}, {"gradient_accumulation_steps": 2}, {"prefetch_factor": 4}],
)
def test_what_does_not_change_the_packs_keeps_the_name_of_the_plan(change):
    rows = texts(20)
    assert load(rows).plan_key == load(rows, 1, 3, **change).plan_key


@pytest.mark.parametrize(
    ("state", "setting"),
    [
        ({}, "state"),
        ({"version": 1}, "state"),
        ({"version": 9, "plan": "x", "epoch": 0, "segments": []}, "version"),
    ],
)
def test_something_else_than_a_state_is_rejected(state, setting):
    with raises_config(setting, match="loader"):
        load(texts(4)).load_state_dict(state)


@pytest.mark.parametrize("used", [{}, [], [3], [3, 0, 0]])
def test_a_state_without_both_counts_of_used_samples_is_rejected(used):
    loader = load(texts(4))
    with raises_config("state"):
        loader.load_state_dict({**loader.state_dict(), "used": used})


def test_a_rejected_state_leaves_the_loader_as_it_was():
    loader = load(texts(20))
    delivered_rows(loader, 2)
    state = loader.state_dict()
    wrong = {**state, "segments": [[1, 1, 1, 10_000]]}
    with pytest.raises(ConfigError, match="micro-steps"):
        loader.load_state_dict(wrong)
    assert loader.state_dict() == state


def test_a_state_taken_at_the_end_of_an_epoch_goes_on_with_the_next():
    rows = texts(20)
    loader = load(rows)
    delivered_rows(loader)
    again = load(rows)
    again.load_state_dict(loader.state_dict())
    assert (again.epoch, again.cursor) == (1, 0)
    assert sorted(delivered_rows(again)) == list(range(20))


class Failing(list):
    """Rows of which some cannot be read any more."""

    gone = ()

    def __getitem__(self, index):
        if index in self.gone:
            raise BadSample("gone", reason="missing_media", stage="media")
        return super().__getitem__(index)


@pytest.mark.parametrize("gone", [(), (3, 5), range(20)], ids=["none", "two", "all"])
def test_a_loader_that_resumes_at_the_end_of_an_epoch_has_the_stats_of_it(tmp_path, gone):
    rows = Failing(texts(20))
    settings = {"max_bad_share": None, "max_consecutive_bad": None, "ledger_dir": tmp_path}
    loader = load(rows, **settings)
    rows.gone = gone
    delivered_rows(loader)
    assert loader.epoch_stats is not None
    assert (loader.epoch_stats.delivered, loader.epoch_stats.lost) == (20 - len(gone), len(gone))
    rows.gone = ()
    again = load(rows, **(settings | {"max_bad_share": 0.01}))
    assert again.epoch_stats is None
    again.load_state_dict(loader.state_dict())
    assert again.epoch_stats == loader.epoch_stats
    delivered_rows(again)
    assert (again.epoch_stats.epoch, again.epoch_stats.delivered) == (1, 20)


def test_breaking_off_and_iterating_again_goes_on():
    loader = load(texts(30))
    seen = delivered_rows(loader, 2) + delivered_rows(loader, 1) + delivered_rows(loader)
    assert sorted(seen) == list(range(30))
    assert loader.epoch == 0


def test_after_an_epoch_comes_the_next_with_other_packs():
    loader = load(texts(60))
    first = [batch.info.samples for batch in loader]
    second = [batch.info.samples for batch in loader]
    assert loader.epoch == 1
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == list(range(60))
    assert first != second


def test_setting_the_present_epoch_changes_nothing_and_another_starts_it():
    loader = load(texts(30))
    delivered_rows(loader, 2)
    loader.set_epoch(0)
    assert loader.cursor == 2
    loader.set_epoch(3)
    assert (loader.epoch, loader.cursor) == (3, 0)
    third = [batch.info.samples for batch in loader]
    loader.set_epoch(3)  # it is over: once more
    assert [batch.info.samples for batch in loader] == third
    with raises_config("epoch", -1):
        loader.set_epoch(-1)


def test_an_iterator_of_an_epoch_that_was_left_ends():
    loader = load(texts(30))
    old = iter(loader)
    next(old)
    loader.set_epoch(5)
    assert list(old) == []
    assert sorted(delivered_rows(loader)) == list(range(30))


def test_no_sample_is_touched_to_resume():
    class Counting(list):
        reads = 0

        def __getitem__(self, index):
            Counting.reads += 1
            return super().__getitem__(index)

    rows = Counting(texts(50))
    loader = load(rows)
    delivered_rows(loader, 5)
    state = loader.state_dict()
    again = load(rows)
    before = Counting.reads
    again.load_state_dict(state)
    assert Counting.reads == before
    batch = next(iter(again))
    assert Counting.reads - before == len(batch.info.samples)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_of_two_iterators_the_younger_goes_on_and_the_other_ends(num_workers):
    loader = load(texts(30), num_workers=num_workers)
    old, new = iter(loader), iter(loader)
    seen = []
    for iterator in (old, old, new, new):
        seen += next(iterator).info.samples
    assert list(old) == []
    for batch in new:
        seen += batch.info.samples
    assert sorted(seen) == list(range(30))
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterator_that_was_left_takes_no_batch_of_the_next_epoch(num_workers):
    loader = load(texts(30), num_workers=num_workers)
    old = iter(loader)
    next(old)
    loader.set_epoch(5)
    new = iter(loader)
    seen = list(next(new).info.samples)
    assert list(old) == []
    for batch in new:
        seen += batch.info.samples
    assert sorted(seen) == list(range(30))
    loader.close()


def test_taking_exactly_as_many_batches_as_there_are_ends_the_epoch():
    loader = load(texts(30))
    for epoch in range(3):
        seen = []
        for batch in itertools.islice(loader, len(loader)):
            seen += batch.info.samples
        assert (loader.epoch, sorted(seen)) == (epoch, list(range(30)))
        assert loader.epoch_stats.epoch == epoch


def test_packs_that_another_solver_has_planned_are_rejected():
    loader = load(texts(30))
    delivered_rows(loader, 2)
    state = {**loader.state_dict(), "packs": "of another version"}
    before = loader.state_dict()
    with raises_config("packs", "of another version", match="scipy"):
        loader.load_state_dict(state)
    assert loader.state_dict() == before


def test_the_cost_of_windows_and_images_is_in_the_state_of_models_that_have_them_alone():
    def made_from(name, **options):
        settings = {"family": name, "model": tiny_model(name).config, **options}
        loader = load(texts(20), **settings)
        delivered_rows(loader, 2)
        state = json.loads(json.dumps(loader.state_dict()))
        load(texts(20), **settings).load_state_dict(state)
        return state["made_from"]["source"]["weights"]

    assert made_from("qwen2_vl", cost_weights={"token": 2, "patch": 3})[:4] == [2, 0, 3, 0]
    assert len(made_from("qwen2_vl", cost_weights={"token": 2})) == 4  # as in states of earlier versions
    assert len(made_from("qwen2_vl")) == 8
    *_, windows, chunks, item, encoder, _, _ = made_from("gemma3")
    assert 0 < item < encoder
    assert [window for window, _ in windows] == [512]
    assert chunks == []


@pytest.mark.parametrize(
    "made_from", [5, {"source": 5}, {"source": "abc"}, {1: 2, "a": 3}, {"seed": [1]}, None]
)
def test_a_state_with_nonsense_in_what_its_plan_was_made_from_is_rejected_as_another(made_from):
    state = load(texts(20)).state_dict() | {"made_from": made_from}
    with raises_config("plan", state["plan"]):
        load(texts(20), seed=1).load_state_dict(state)


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({"model": {}, "loader": {}}, "a dict with ['loader', 'model']"),
        ({}, "a dict with []"),
        ("{}", "'{}'"),
    ],
)
def test_what_is_no_state_is_named(state, found):
    with raises_config("state", found, match=r"checkpoint\[.loader"):
        load(texts(4)).load_state_dict(state)
