"""One suite over all families: a batch is what the processor itself makes, labelled and shifted by one."""

import copy
import inspect
from collections.abc import Mapping
from functools import cache

import pytest
import torch

from contract.calls import Raw, own_batch
from contract.cases import ACCEPTED, STOPS, conversation
from contract.chat_templates import TRIMS_TEXT
from contract.processors import FAMILIES, build, processor
from contract.samples import clip, make_image, turns
from contract.tiny_models import MODELS, WITHOUT_VIDEO, tiny_model
from noise_floor import largest_difference, noise_floor
from packhorse.chat import IGNORE_INDEX, TOKEN_KEYS
from packhorse.collate_fns import COLLATE_FNS, default_collate_fn, pad_collate_fn
from packhorse.datasets import PreTokenizedDatasetWrapper
from packhorse.families import Encoder
from packhorse.families.models import attention_of
from packhorse.formats.example_media import inject_fake_image
from packhorse.integrations.attention import use_attention
from packhorse.ledger import Ledger
from raising import raises_bad_sample

BATCHES: dict[str, tuple[str, ...]] = {
    "words alone": ("text",),
    "an image": ("one image",),
    "words, an image, two images": ("text", "one image", "two images"),
    "many turns": ("many turns", "system", "an image in every turn", "empty answer"),
    "what users type": ("typed ChatML", "typed marker", "Chinese", "emoji"),
    "unusual images": ("rgba", "palette", "one pixel"),
    "a video": ("video",),
    "a video, words, an image": ("video", "text", "one image"),
    "audio": ("audio", "two audio clips", "text"),
    "audio and an image": ("audio and image", "audio", "one image"),
}
CHATTING = [name for name, fixture in FAMILIES.items() if fixture.chats]
BUNDLED = [name for name in CHATTING if FAMILIES[name].bundled]

# Qwen3-Omni's function resizes by another package first; it has tests of its own.
GOLDEN = [
    pytest.param(name, function, cases, id=f"{name}, {function.__name__}: {batch}")
    for name in CHATTING
    for function in dict.fromkeys([COLLATE_FNS[FAMILIES[name].class_name], default_collate_fn])
    for batch, cases in BATCHES.items()
    if all((name, case) in ACCEPTED for case in cases)
    if not function.__name__.startswith("qwen3_omni")
    if function.__name__ != "nemotron_omni_collate_fn" or "video" not in cases  # it takes fewer frames
]
# Packhorse returns these for every sample, or exactly; each has its own test below.
OURS = {"video_second_per_grid", "batch_num_images"}


@pytest.fixture
def fresh_ledger(monkeypatch):
    """An empty ledger in place of the process's own."""
    ledger = Ledger()
    monkeypatch.setattr("packhorse.collate.finish.default_ledger", lambda: ledger)
    return ledger


@pytest.fixture(scope="module")
def collated(files):
    """A function that collates cases of a family, once per batch."""
    return cache(lambda name, function, cases: function(examples(name, cases, files), processor(name)))


def examples(name, cases, files):
    return [{"conversation": conversation(name, case, files)} for case in cases]


def supervised_text(name: str, labels: torch.Tensor) -> str:
    return processor(name).tokenizer.decode(labels[labels != IGNORE_INDEX])


def answers(name, case, files) -> str:
    said = [
        "".join(part["text"] for part in turn["content"])
        for turn in conversation(name, case, files)
        if turn["role"] == "assistant"
    ]
    return "".join((text.strip() if name in TRIMS_TEXT else text) + STOPS[name] for text in said)


def rows(batch: Mapping[str, torch.Tensor], key: str) -> list[torch.Tensor]:
    """A tensor per token, row by row, without padding."""
    return [row[mask.bool()] for row, mask in zip(batch[key], batch["attention_mask"], strict=True)]


@pytest.mark.parametrize(("name", "function", "cases"), GOLDEN)
def test_a_batch_is_the_processors_own_shifted_by_one(name, function, cases, collated, made):
    batch = collated(name, function, cases)
    raws = [made(name, case).raw for case in cases]
    in_one_call = name not in ("smolvlm", "nemotron_omni") or not any(raw.clips for raw in raws)
    own = own_batch(name, raws) if in_one_call or len(cases) == 1 else {"input_ids": ()}
    if len(own["input_ids"]) == len(raws):  # SmolVLM's of transformers 5.12 drops rows without images
        for key, value in own.items():
            expected = value[:, :-1] if key in TOKEN_KEYS else value
            if "pixel_values" in key and function is default_collate_fn:
                expected = expected.to(torch.bfloat16)
            if key not in OURS:
                assert batch[key].dtype == expected.dtype or function is not default_collate_fn
                assert torch.equal(batch[key], expected.to(batch[key].dtype)), key
        assert batch.keys() - own.keys() <= {
            *("labels", "shift_labels", "input_mode"),
            *("n_images_per_sample", "n_videos_per_sample", "n_audios_per_sample"),
        }
    else:
        # Neither processor takes videos together with other samples; each sample is as it is alone.
        for row, raw, mask in zip(batch["input_ids"], raws, batch["attention_mask"], strict=True):
            alone = own_batch(name, [raw])["input_ids"][0]
            assert torch.equal(row[mask.bool()], alone[: int(mask.sum())])


@pytest.mark.parametrize(("name", "function", "cases"), GOLDEN)
def test_labels_are_the_next_tokens_of_the_answers(name, function, cases, collated, files):
    batch = collated(name, function, cases)
    ids, labels = batch["input_ids"], batch["labels"]
    assert ids.shape == labels.shape == batch["attention_mask"].shape
    following = labels[:, :-1] != IGNORE_INDEX
    assert torch.equal(labels[:, :-1][following], ids[:, 1:][following])
    media = torch.tensor(sorted(Encoder(processor(name)).media_token_ids))
    assert not torch.isin(labels, media).any()
    for row, case in zip(labels, cases, strict=True):
        said, expected = supervised_text(name, row), answers(name, case, files)
        if name == "smolvlm":  # the space of "Assistant: " belongs to the first token of most answers
            said, expected = said.replace(" ", ""), expected.replace(" ", "")
        assert said == expected


@pytest.mark.parametrize(("name", "function", "cases"), GOLDEN)
def test_media_are_counted_for_each_sample(name, function, cases, collated, files):
    batch = collated(name, function, cases)
    for kind in ("image", "video", "audio"):
        key = f"n_{kind}s_per_sample"
        numbers = [
            sum(part["type"] == kind for turn in conversation(name, case, files) for part in turn["content"])
            for case in cases
        ]
        assert (batch[key].tolist() == numbers) if any(numbers) else (key not in batch)


@pytest.mark.parametrize("name", BUNDLED)
def test_encoded_samples_padded_are_the_batch_made_at_once(name, files):
    cases = [case for case in ("text", "one image", "two images", "audio") if (name, case) in ACCEPTED]
    given = examples(name, cases, files)
    samples = PreTokenizedDatasetWrapper(given, processor(name), inject_fake_images=False, on_bad="raise")
    padded = pad_collate_fn(
        [samples[index] for index in range(len(given))], processor(name), pixel_dtype=None
    )
    at_once = default_collate_fn(given, processor(name), pixel_dtype=None)
    for key in set(TOKEN_KEYS) & at_once.keys() - {"attention_mask"}:
        # Shifted, a row that is padded on the left lacks its last token; one padded on the right has it.
        pairs = zip(rows(padded, key), rows(at_once, key), strict=True)
        assert all(torch.equal(one[: len(other)], other[: len(one)]) for one, other in pairs), key
    for row, other in zip(padded["labels"], at_once["labels"], strict=True):
        assert torch.equal(row[row != IGNORE_INDEX], other[other != IGNORE_INDEX])
    for key in at_once.keys() - set(TOKEN_KEYS) - {"labels", "shift_labels", "batch_num_images"}:
        assert torch.equal(padded[key], at_once[key]), key


@pytest.mark.parametrize("name", [name for name in BUNDLED if "video" in FAMILIES[name].modalities])
def test_encoded_samples_count_their_media_as_the_batch_made_at_once_does(name, files):
    for cases in (("video",), ("two images", "text", "video")):
        given = examples(name, cases, files)
        samples = PreTokenizedDatasetWrapper(given, processor(name), inject_fake_images=False, on_bad="raise")
        padded = pad_collate_fn([samples[index] for index in range(len(given))], processor(name))
        at_once = default_collate_fn(given, processor(name))
        for key in ("n_images_per_sample", "n_videos_per_sample"):
            assert (key in padded) is (key in at_once)
            assert key not in padded or padded[key].tolist() == at_once[key].tolist()


FOR_MODELS = [
    pytest.param(name, cases, id=f"{name}-{' + '.join(cases)}")
    for name in MODELS
    for cases in (("text", "one image", "two images"), ("video", "text"))
    if all((name, case) in ACCEPTED for case in cases) and not ("video" in cases and name in WITHOUT_VIDEO)
]


@pytest.mark.parametrize(("name", "cases"), FOR_MODELS)
def test_a_model_takes_the_batch_and_padding_does_not_change_what_it_says(name, cases, files, parity):
    given, model = examples(name, cases, files), tiny_model(name).eval()
    samples = PreTokenizedDatasetWrapper(given, processor(name), on_bad="raise")

    def losses(batch):
        inputs = {key: value for key, value in batch.items() if key != "labels" and not key.startswith("n_")}
        with torch.no_grad():
            logits = model(**inputs).logits
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")

    encoded = [samples[index] for index in range(len(given))]
    batch = pad_collate_fn(encoded, processor(name))
    before, alone = attention_of(model), {}
    for attention in ("sdpa", "eager"):
        use_attention(model, attention)
        found = [losses(pad_collate_fn([sample], processor(name))).sum(dim=1) for sample in encoded]
        alone[attention] = torch.cat(found).sort().values
    use_attention(model, before)
    # For some models the sample with the fake image becomes the last row.
    together = losses(batch).sum(dim=1).sort().values
    pixels = next(key for key in ("pixel_values_videos", "pixel_values") if key in batch)
    without = losses({**batch, pixels: batch[pixels].ne(0).float()}).sum(dim=1).sort().values
    assert (alone["sdpa"] > 0).all()
    parity.check(
        "loss",
        largest_difference(together, alone["sdpa"]),
        noise_floor(alone["sdpa"], alone["eager"]),
        largest_difference(without, alone["sdpa"]),
    )


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_that_a_model_makes_of_a_padded_batch_is_the_mean_over_its_labels(name, files, parity):
    """Counts of media are in the batch too, and do the model no harm."""
    given = examples(name, ("text", "one image"), files)
    samples = PreTokenizedDatasetWrapper(given, processor(name), on_bad="raise")
    batch = pad_collate_fn([samples[0], samples[1]], processor(name))
    assert batch["shift_labels"] is batch["labels"]
    with torch.no_grad():
        out = tiny_model(name)(**batch)
    flat, labels = out.logits.flatten(0, 1), batch["labels"].flatten()
    by_hand = torch.nn.functional.cross_entropy(flat, labels)
    other_order = torch.nn.functional.cross_entropy(flat.flip(0), labels.flip(0))
    twice = torch.nn.functional.cross_entropy(flat[:-1], labels[1:])
    parity.check(
        "loss",
        largest_difference(out.loss, by_hand),
        noise_floor(by_hand, other_order),
        largest_difference(twice, by_hand),
    )


@pytest.mark.parametrize("name", BUNDLED)
def test_a_fixed_length_is_kept_and_longer_samples_are_dropped_if_requested(name, files, fresh_ledger):
    given = examples(name, ("many turns", "one image", "text"), files)
    whole = default_collate_fn(given, processor(name), pixel_dtype=None)
    lengths = [len(row) for row in rows(whole, "input_ids")]
    limit = sorted(lengths)[-1] - 1
    batch = default_collate_fn(given, processor(name), limit, drop_overlong=True)
    assert batch["input_ids"].shape == batch["labels"].shape == (2, limit - 1)
    assert fresh_ledger.counts() == {"too_long": 1}
    padding = processor(name).tokenizer.pad_token_id
    assert (batch["input_ids"][batch["attention_mask"] == 0] == padding).all()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", BUNDLED)
def test_longer_samples_are_truncated_and_the_others_stay_as_they_are(name, side, files, fresh_ledger):
    made = copy.copy(processor(name))
    made.tokenizer = copy.deepcopy(made.tokenizer)
    made.tokenizer.padding_side = made.tokenizer.init_kwargs["padding_side"] = side
    given = examples(name, ("many turns", "one image", "text"), files)
    whole = default_collate_fn(given, made)
    expected = {key: rows(whole, key) for key in ("input_ids", "labels")}
    limit = len(expected["input_ids"][0]) - 3
    others = max(map(len, expected["input_ids"][1:]))
    given, place = (given, 0) if others < limit else ([given[0]], 0)
    batch = default_collate_fn(given, made, limit)
    assert batch["input_ids"].shape == batch["labels"].shape == (len(given), limit - 1)
    for key, values in expected.items():
        found = rows(batch, key)
        assert torch.equal(found[place], values[place][: limit - 1])
        for row in range(1, len(given)):
            assert torch.equal(found[row][: len(values[row])], values[row])
    for key in whole.keys() & {"pixel_values", "image_pixel_values"} if len(given) > 1 else ():
        assert torch.equal(batch[key], whole[key])
    assert fresh_ledger.counts() == {"truncated": 1}
    assert [drop.action for drop in fresh_ledger] == ["cut"]


def media_tokens(name: str, row: torch.Tensor) -> int:
    ids = Encoder(processor(name)).media_token_ids
    return int(torch.isin(row, torch.tensor(sorted(ids))).sum())


@pytest.mark.parametrize("name", BUNDLED)
def test_no_limit_cuts_through_an_image_and_a_single_long_sample_never_stops_a_run(name, files, fresh_ledger):
    """Whatever the limit: what is left of a sample is what the processor makes of its first media."""
    collate = COLLATE_FNS[FAMILIES[name].class_name]
    collate = default_collate_fn if "max_length" not in inspect.signature(collate).parameters else collate
    example, alone = ({"conversation": turns(*["image"] * number)} for number in (2, 1))
    for part in (*example["conversation"][0]["content"], *alone["conversation"][0]["content"]):
        part |= {"image": make_image(60, 40)} if part["type"] == "image" else {}
    whole = collate([example], processor(name))["input_ids"]
    one = media_tokens(name, collate([alone], processor(name))["input_ids"][0])
    two = media_tokens(name, whole[0])
    seen = set()
    for limit in (4, *range(8, whole.shape[1] + 1, max(1, whole.shape[1] // 6)), whole.shape[1]):
        batch = collate([example], processor(name), limit)
        assert batch["input_ids"].shape == (1, limit - 1)
        number = int(batch.get("n_images_per_sample", torch.zeros(1))[0])
        assert media_tokens(name, batch["input_ids"][0]) == {0: 0, 1: one, 2: two}[number]
        assert (number > 0) == any("pixel_values" in key for key in batch)
        seen.add(number)
    assert {0, 2} <= seen
    assert set(fresh_ledger.counts()) <= {"truncated", "nothing_supervised"}


@pytest.mark.parametrize("name", BUNDLED)
def test_the_fake_image_of_a_sample_is_hidden_from_attention(name, files):
    (words,) = examples(name, ("many turns",), files)
    image = examples(name, ("one image",), files)
    batch = default_collate_fn([*image, inject_fake_image(words)], processor(name))
    plain = default_collate_fn([*image, words], processor(name))
    media = torch.tensor(sorted(Encoder(processor(name)).media_token_ids))
    hidden = batch["input_ids"][1][batch["attention_mask"][1] == 0]
    shown = batch["input_ids"][1][batch["attention_mask"][1] == 1]
    assert torch.isin(hidden, media).any()
    assert not torch.isin(shown, media).any()
    # The visible tokens are the sample without the image, except for spaces that the template writes with it,
    # and for the last token, which the shift takes from the longest row only.
    decode = processor(name).tokenizer.decode
    seen, whole = ("".join(decode(ids).split()) for ids in (shown, rows(plain, "input_ids")[1]))
    assert seen.startswith(whole) or whole.startswith(seen)
    assert len(seen) > len(whole) - 20
    assert (
        supervised_text(name, batch["labels"][1]).split() == supervised_text(name, plain["labels"][1]).split()
    )
    assert batch["n_images_per_sample"].tolist() == [1, 1]


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("qwen")])
@pytest.mark.parametrize("function", [default_collate_fn, pad_collate_fn])
def test_a_fake_image_does_not_take_the_place_of_the_next_rows_image(name, function, files):
    """Qwen models pass over hidden image tokens, but not over their grid."""
    given = [inject_fake_image(one) for one in examples(name, ("text", "one image", "many turns"), files)]
    if function is pad_collate_fn:
        samples = PreTokenizedDatasetWrapper(given, processor(name), on_bad="raise")
        batch = pad_collate_fn([samples[index] for index in range(3)], processor(name))
    else:
        batch = default_collate_fn(given, processor(name), pixel_dtype=None)
    texts = [supervised_text(name, row) for row in batch["labels"]]
    assert texts == [answers(name, case, files) for case in ("one image", "text", "many turns")]
    inputs = {key: value for key, value in batch.items() if key != "labels" and not key.startswith("n_")}
    with torch.no_grad():
        assert torch.isfinite(tiny_model(name)(**inputs).logits).all()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3", "internvl", "smolvlm"])
def test_the_tokenizer_decides_on_which_side_is_padded(name, side, files):
    made = build(name)
    made.tokenizer = copy.deepcopy(made.tokenizer)
    made.tokenizer.padding_side = made.tokenizer.init_kwargs["padding_side"] = side
    given = examples(name, ("text", "many turns"), files)
    for limit in (None, 400):
        batch = default_collate_fn(given, made, limit)
        mask = batch["attention_mask"][0]
        assert mask[0] == (side == "right")
        assert mask[-1] == (side == "left")
        for row, case in zip(batch["labels"], ("text", "many turns"), strict=True):
            said, expected = supervised_text(name, row), answers(name, case, files)
            assert said.replace(" ", "") == expected.replace(" ", "")
        assert batch["input_ids"].shape[1] == 399 or limit is None


@pytest.mark.parametrize("name", [name for name in BUNDLED if "video" in FAMILIES[name].modalities])
def test_videos_that_do_not_go_into_one_call_go_into_one_batch(name, files):
    def video_example(frames):
        pixels, metadata = clip(frames)
        video = {"type": "video", "video": pixels, "video_metadata": metadata}
        return {"conversation": [{**turn, "content": list(turn["content"])} for turn in turns()], "v": video}

    given = [video_example(4), video_example(4)]
    for example in given:
        example["conversation"][0]["content"].insert(0, example.pop("v"))
    raw = Raw(turns("video"), clips=(clip(4),))
    batch = default_collate_fn(given, processor(name), pixel_dtype=None)
    own = own_batch(name, [raw])
    assert torch.equal(batch["input_ids"], own["input_ids"][:, :-1].repeat(2, 1))
    assert batch["n_videos_per_sample"].tolist() == [1, 1]
    for key in own.keys() - set(TOKEN_KEYS) - OURS:
        assert torch.equal(batch[key], torch.cat([own[key], own[key]])), key
    if "video_second_per_grid" in batch:
        assert batch["video_second_per_grid"].tolist() == [1.0, 1.0]  # two frames a second, two a patch


def test_llava_counts_images_for_every_sample_when_videos_are_among_them(files):
    batch = default_collate_fn(
        examples("llava_onevision", ("video", "two images", "text"), files), processor("llava_onevision")
    )
    assert batch["batch_num_images"].tolist() == [0, 2, 0]


@pytest.mark.parametrize("name", CHATTING)
def test_examples_stay_as_they_were(name, files):
    given = examples(name, ("text", "one image"), files)
    given[0]["conversation"][0]["content"] = "Only text."
    before = copy.deepcopy(given)
    COLLATE_FNS[FAMILIES[name].class_name](given, processor(name))
    assert given == before


@pytest.mark.parametrize("name", CHATTING)
def test_a_corrupt_image_is_named(name, tmp_path):
    broken = tmp_path / "broken.png"
    make_image(64, 48).save(broken)
    broken.write_bytes(broken.read_bytes()[:90])
    example = {"conversation": turns("image")}
    example["conversation"][0]["content"][0]["image"] = str(broken)
    with raises_bad_sample("broken_media", match=r"broken\.png"):
        COLLATE_FNS[FAMILIES[name].class_name]([example], processor(name))


@pytest.mark.parametrize("name", CHATTING)
def test_an_empty_batch_has_nothing_in_it(name):
    assert COLLATE_FNS[FAMILIES[name].class_name]([], processor(name)) == {}
    assert pad_collate_fn([], processor(name)) == {}


@pytest.mark.parametrize("name", BUNDLED)
def test_a_batch_of_nothing_but_overlong_samples_is_rejected(name, files):
    with raises_bad_sample("too_long"):
        default_collate_fn(
            examples(name, ("text", "one image"), files), processor(name), 3, drop_overlong=True
        )
