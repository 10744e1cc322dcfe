"""One suite over all families: they encode what their processors make, and only answers are supervised."""

from dataclasses import replace

import pytest
import torch

from contract.calls import Raw, own_batch
from contract.cases import ACCEPTED, CASES, REJECTED, STOPS, conversation, takes
from contract.chat_templates import TRIMS_TEXT
from contract.encoding import make
from contract.processors import FAMILIES, build, processor
from contract.samples import clip, turns
from packhorse.chat import IGNORE_INDEX, TOKEN_KEYS
from packhorse.count.token_counter import TokenCounter
from packhorse.errors import ConfigError
from packhorse.families import FAMILIES as DECLARED
from packhorse.families import Encoder, family_of
from packhorse.formats.conversation import parse_conversation
from packhorse.types import MediaRef
from raising import raises_bad_sample, raises_config

EVERY = tuple(FAMILIES)
every_family = pytest.mark.parametrize("name", EVERY)
every_sample = pytest.mark.parametrize(("name", "case"), ACCEPTED)

# Made better than the processor makes them; each has a test of its own.
OURS = {"video_second_per_grid", "audio_attention_mask"}


@every_sample
def test_ids_are_those_of_the_processors_own_batch(name, case, made):
    sample = made(name, case)
    alone = {"nemotron_omni"} if sample.raw.clips else set()
    other = [] if name in alone else [Raw(turns(question="And what is this thing, then?"))]
    batch = own_batch(name, [sample.raw, *other])
    ids = batch["input_ids"][0][batch["attention_mask"][0].bool()]
    assert torch.equal(sample.encoded.tokens["input_ids"], ids)
    assert all(len(values) == len(ids) for values in sample.encoded.tokens.values())


@every_sample
def test_what_was_tokenised_is_known_and_gives_the_same_labels(name, case, made):
    sample = made(name, case)
    # The processors of these two come with their models: what they do with a tokenizer is unknown.
    assert (sample.encoded.read is None) == (name in {"kimi_vl", "nemotron_parse"})
    again = Encoder(processor(name)).labels(replace(sample.encoded, read=None))
    assert torch.equal(sample.labels, again)


@every_sample
def test_media_tensors_are_those_of_the_processors_own_call(name, case, made):
    sample = made(name, case)
    own = own_batch(name, [sample.raw])
    assert own.keys() - TOKEN_KEYS - OURS == sample.encoded.media.keys() - OURS
    for key, value in sample.encoded.media.items():
        if key in OURS:
            continue
        expected = own[key]
        if name == "smolvlm" and len(sample.raw.clips) > 1:
            expected = expected.flatten(0, 1)[None]  # the videos of a sample are one entry
        assert torch.equal(value, expected), key
    for key in own.keys() & set(TOKEN_KEYS):
        assert torch.equal(sample.encoded.tokens[key], own[key][0]), key


@every_sample
def test_labels_give_back_the_answers_and_their_stop_tokens(name, case, made):
    answers = [
        message.text for message in made(name, case).conversation.messages if message.role == "assistant"
    ]
    if name in TRIMS_TEXT:
        answers = [answer.strip() for answer in answers]
    supervised = made(name, case).supervised_text(name)
    if name == "smolvlm":
        # The blank of "Assistant: " belongs to the first token of most answers.
        supervised = [
            text if text == answer + STOPS[name] else text.removeprefix(" ")
            for text, answer in zip(supervised, answers, strict=True)
        ]
    assert supervised == [answer + STOPS[name] for answer in answers if answer + STOPS[name]]


@every_sample
def test_media_tokens_are_not_supervised_and_labels_are_ids(name, case, made):
    sample = made(name, case)
    media = torch.tensor(sorted(Encoder(processor(name)).media_token_ids))
    ids, labels = sample.encoded.tokens["input_ids"], sample.labels
    assert labels.shape == ids.shape
    assert not torch.isin(labels, media).any()
    assert torch.equal(labels[labels != IGNORE_INDEX], ids[labels != IGNORE_INDEX])


@every_sample
def test_media_tokens_are_counted_without_decoding(name, case, made, files, monkeypatch):
    sample = made(name, case)
    encoder = Encoder(processor(name))
    monkeypatch.setattr("packhorse.families.encoder.load_media", None)
    refs = sample.conversation.media
    sizes = [(ref.kind, encoder.size_of(ref)) for ref in refs]
    images = sum(kind == "image" for kind, _ in sizes)
    predicted = sum(encoder.media_tokens(kind, size, images) for kind, size in sizes)
    content = encoder.media_token_ids
    assert predicted == sum(token in content for token in sample.encoded.tokens["input_ids"].tolist())
    assert (predicted > 0) is bool(refs and content)


@every_sample
def test_every_tensor_is_divided_among_its_media(name, case, made):
    encoder, encoded = Encoder(processor(name)), made(name, case).encoded
    for key, value in encoded.media.items():
        layout = encoder.family.layout[key]
        if layout.owner == "sample":
            assert value.shape[0] == 1
            continue
        rows = encoder.rows(encoded, key)
        assert len(rows) == sum(kind in layout.kinds for kind, _ in encoded.sizes)
        assert sum(rows) == value.shape[0]
        assert min(rows) >= 1


@pytest.mark.parametrize(("name", "case"), REJECTED)
def test_what_a_family_cannot_take_is_rejected_by_name(name, case, files):
    rejection = REJECTED[name, case]
    with raises_bad_sample(rejection.reason, key=f"{name}/{case}", stage="encode", match=rejection.words):
        make(name, case, files)


@pytest.mark.parametrize(
    ("name", "case"),
    [(n, c) for n in EVERY for c in ("one image", "video", "audio") if not takes(n, c)],
)
def test_a_kind_of_media_that_the_family_lacks_is_rejected(name, case, files):
    with raises_bad_sample("media_mismatch", match=f"a part of type {case}"):
        make(name, case, files)


@every_family
def test_a_typed_placeholder_is_rejected(name, files):
    made = processor(name)
    encoder = Encoder(made)
    for placeholder in encoder.placeholders.values():
        for role, case in (("user", "text"), ("assistant", "one image")):
            said = conversation(name, case, files)
            turn = next(turn for turn in said if turn["role"] == role)
            turn["content"].append({"type": "text", "text": f"Look: {placeholder}"})
            with raises_bad_sample("media_mismatch", match="not distinguishable from a media item"):
                encoder.encode(parse_conversation({"conversation": said}))


@every_family
def test_a_typed_content_token_is_rejected(name, files):
    made = processor(name)
    encoder = Encoder(made)
    for number in encoder.media_token_ids:
        token = made.tokenizer.convert_ids_to_tokens(number)
        said = turns(question=f"Look: {token}")
        with raises_bad_sample("media_mismatch"):
            encoder.encode(parse_conversation({"conversation": said}))


class InWorker(torch.utils.data.Dataset):
    def __init__(self, name, files):
        self.name, self.files = name, files
        self.cases = [case for family, case in ACCEPTED if family == name]

    def __len__(self):
        return len(self.cases)

    def __getitem__(self, number):
        sample = make(self.name, self.cases[number], self.files)
        return sample.encoded.tokens, sample.encoded.media, sample.labels


@every_family
def test_a_worker_encodes_the_same(name, made, files):
    dataset = InWorker(name, files)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=1, multiprocessing_context="fork", collate_fn=lambda same: same
    )
    for case, (tokens, media, labels) in zip(dataset.cases, loader, strict=True):
        here = made(name, case)
        assert torch.equal(labels, here.labels)
        for ours, theirs in ((here.encoded.tokens, tokens), (here.encoded.media, media)):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def returning(name, **extra):
    """A processor whose class is derived from the real one and returns more than that."""
    made = build(name)
    base = type(made)

    class Derived(base):
        def __call__(self, *args, **options):
            output = base.__call__(self, *args, **options)
            for key, value in extra.items():
                output[key] = value
            return output

    made.__class__ = Derived
    return made


@every_family
def test_an_undeclared_tensor_stops_the_run(name):
    made = returning(name, surprise=torch.zeros(1, 7))
    encoder = Encoder(made)
    assert encoder.family is family_of(processor(name))
    with raises_config("surprise", (1, 7)):
        encoder.encode(parse_conversation({"conversation": turns()}))


@every_family
def test_a_tensor_of_another_shape_than_declared_stops_the_run(name, files):
    layouts = family_of(processor(name)).layout
    key, layout = next((k, v) for k, v in layouts.items() if "image" in v.kinds)
    if layout.rows_from:
        key = layout.rows_from
    encoder = Encoder(returning(name, **{key: torch.ones(3, 3, 3, dtype=torch.long)}))
    said = conversation(name, "one image", files)
    # A grid of another shape also changes how many patches are expected.
    with pytest.raises(ConfigError, match=r"for {'image': 1} .* expects \d+ along axis 0") as caught:
        encoder.encode(parse_conversation({"conversation": said}))
    assert caught.value.setting in layouts


@every_family
def test_every_declared_tensor_is_one_that_the_processor_returns(name, made):
    encoder = Encoder(processor(name))
    samples = [made(family_name, case) for family_name, case in ACCEPTED if family_name == name]
    seen = {key for sample in samples for key in sample.encoded.media}
    later = {"second_per_grid_ts"} if name == "qwen2_vl" else set()  # from Qwen2.5-VL on
    assert seen == encoder.family.layout.keys() - later


@every_family
def test_a_family_is_found_by_its_class_and_declares_itself_fully(name):
    encoder = Encoder(processor(name))
    assert FAMILIES[name].class_name in encoder.family.processor_classes
    assert set(encoder.family.kinds) == FAMILIES[name].modalities
    for key, layout in encoder.family.layout.items():
        assert set(layout.kinds) <= set(encoder.family.kinds), key
        assert layout.rows_from is None or layout.rows_from in encoder.family.layout, key
        assert layout.rows_from is None or layout.owner == "rows", key
    assert encoder.family.fill.keys() <= {
        key for key, layout in encoder.family.layout.items() if layout.ragged
    }


def test_no_two_families_serve_one_class():
    names = [name for family in DECLARED for name in family.processor_classes]
    assert len(names) == len(set(names))
    assert len({family.name for family in DECLARED}) == len(DECLARED)


def test_every_case_is_taken_by_some_family():
    assert {case for _, case in ACCEPTED} == set(CASES)


@pytest.mark.parametrize("name", [n for n in EVERY if "audio" in FAMILIES[n].modalities])
def test_audio_that_is_too_short_is_rejected_and_a_little_longer_is_not(name):
    made = processor(name)
    encoder = Encoder(made)
    for samples, enough in ((encoder.family.least_samples - 1, False), (encoder.family.least_samples, True)):
        said = turns("audio")
        said[0]["content"][0]["audio"] = (torch.zeros(samples).numpy(), 16_000)
        parsed = parse_conversation({"conversation": said}, "a/1")
        if enough:
            encoded = encoder.encode(parsed)
            assert encoded.sizes == (("audio", samples),)
            assert all(torch.isfinite(value.float()).all() for value in encoded.media.values())
        else:
            with raises_bad_sample("broken_media", match=f"needs at least {encoder.family.least_samples}"):
                encoder.encode(parsed)


def test_references_stay_as_they_were(files):
    ref = MediaRef("image", str(files["wide.png"]))
    before = repr(ref)
    made = processor("qwen2_vl")
    Encoder(made).size_of(ref)
    Encoder(made).load([ref])
    assert repr(ref) == before


def question(*files):
    said = turns(*(kind for kind, _ in files))
    for part, (kind, source) in zip(said[0]["content"], files, strict=False):
        part[kind] = source
    return parse_conversation({"conversation": said}, "a/1")


@pytest.mark.parametrize("name", ["llava_onevision", "internvl"])
def test_videos_of_different_length_in_one_sample_are_rejected(name, files):
    two = question(("video", str(files["video.mp4"])), ("video", str(files["slow.mp4"])))
    with raises_bad_sample("sample_failed", key="a/1", match="equal size"):
        Encoder(processor(name)).encode(two)


class _BrokenDecoder:
    """An audio decoder, as datasets return it, for a file whose header cannot be used."""

    def get_all_samples(self):
        raise ZeroDivisionError("a sampling rate of 0")

    def __repr__(self):
        return "decoder of clip.ogg"


def test_an_error_of_a_decoder_names_the_media_item_and_not_the_processor():
    sample = question(("audio", _BrokenDecoder()))
    with raises_bad_sample(
        "broken_media", stage="media", match="ZeroDivisionError: a sampling rate of 0"
    ) as bad:
        Encoder(processor("qwen3_omni")).encode(sample)
    assert "_BrokenDecoder" in bad.value.detail
    assert "processor" not in bad.value.detail


def test_counting_names_a_media_item_that_its_decoder_cannot_read():
    sample = question(("audio", _BrokenDecoder()))
    with raises_bad_sample("broken_media", key="a/1", stage="media", match="ZeroDivisionError"):
        TokenCounter(Encoder(processor("qwen3_omni"))).count(sample)


def test_qwen3_omni_gives_each_video_its_own_time_per_patch(files):
    made = processor("qwen3_omni")
    two = question(("video", str(files["video.mp4"])), ("video", str(files["slow.mp4"])))
    encoded = Encoder(made).encode(two)
    # All frames are taken, 10 and 1 in a second; two frames are a patch.
    assert encoded.media["video_second_per_grid"].tolist() == pytest.approx([2 / 10, 2 / 1])


def test_qwen3_omni_counts_the_same_audio_tokens_next_to_a_longer_clip(made):
    short = made("qwen3_omni", "audio and image")
    audio = short.raw.audios[0]
    assert len(audio) == 16_000  # 16,028 samples before they were cut to whole hops
    long = Raw(turns("audio"), audios=(torch.zeros(24_000).numpy(),))
    batch = own_batch("qwen3_omni", [short.raw, long])
    ids = batch["input_ids"][0][batch["attention_mask"][0].bool()]
    assert torch.equal(ids, short.encoded.tokens["input_ids"])


def test_phi4_masks_a_single_clip_too(made):
    one, two = (made("phi4_mm", case).encoded.media for case in ("audio", "two audio clips"))
    assert one["audio_attention_mask"].all()
    assert one["audio_attention_mask"].shape == one["audio_input_features"].shape[:2]
    assert two["audio_attention_mask"].sum(1).tolist() == [98, 98]


@pytest.mark.parametrize("family", DECLARED, ids=lambda family: family.name)
def test_a_family_can_be_sent_to_another_process(family):
    import pickle

    assert type(pickle.loads(pickle.dumps(family))) is type(family)


def test_nemotron_parse_uses_the_task_prompt_where_the_user_says_nothing(files):
    from packhorse.families.nemotron_parse import TASK_PROMPT, NemotronParse

    made = processor("nemotron_parse")
    page = question(("image", str(files["wide.png"])))
    silent = parse_conversation({"conversation": [turns("image")[0] | {"content": ""}, *turns()[1:]]})
    for family, said, prompt, stop in (
        (NemotronParse(), page, "What is it?", ""),
        (NemotronParse(), silent, TASK_PROMPT, ""),
        (NemotronParse(task_prompt="<s><output_markdown>"), page, "<s><output_markdown>", ""),
        (NemotronParse(stop="</s>"), silent, TASK_PROMPT, "</s>"),
    ):
        encoder = Encoder(made, family)
        encoded = encoder.encode(said)
        labels = encoder.labels(encoded)
        assert encoded.text == prompt + "A cat." + stop
        assert made.tokenizer.decode(labels[labels != IGNORE_INDEX]) == "A cat." + stop


def test_a_typed_placeholder_does_not_pass_for_an_image_that_the_template_dropped(files):
    made = build("qwen2_vl")
    made.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
    )
    said = conversation("qwen2_vl", "one image", files)
    said[0]["content"].append({"type": "text", "text": "<|image_pad|>"})
    with raises_bad_sample("media_mismatch", match="1 of them typed in a text"):
        Encoder(made).encode(parse_conversation({"conversation": said}))


def test_a_template_that_rejects_a_conversation_makes_a_bad_sample():
    made = build("qwen2_vl")
    made.chat_template = "{{ raise_exception('roles must alternate') }}"
    with raises_bad_sample("wrong_format", match="roles must alternate"):
        Encoder(made).encode(question())


@pytest.mark.parametrize("name", [n for n in EVERY if "video" in FAMILIES[n].modalities])
def test_a_video_three_pixels_high_is_not_taken_for_channels(name):
    video, metadata = clip(4, width=90, height=3)
    said = turns("video")
    said[0]["content"][0] |= {"video": video, "video_metadata": metadata}
    encoded = Encoder(processor(name)).encode(parse_conversation({"conversation": said}))
    ((_, size),) = encoded.sizes
    assert (size.total_frames, size.height, size.width) == (4, 3, 90)


def test_smolvlm_keeps_its_own_template_and_joins_the_frames_of_a_sample(files):
    made = build("smolvlm")
    made.chat_template = made.chat_template.replace("<end_of_utterance>", "<end_of_utterance> .")
    two = question(("video", str(files["video.mp4"])), ("video", str(files["slow.mp4"])))
    encoded = Encoder(made).encode(two)
    assert "A cat.<end_of_utterance> .\n" in encoded.text
    # One frame a second: 1 of the first video and 5 of the second, none of them padding.
    assert (
        encoded.media["pixel_values"].shape[:2] == encoded.media["pixel_attention_mask"].shape[:2] == (1, 6)
    )
    assert encoded.media["pixel_attention_mask"].all()
