"""Media of conversations: found, counted, converted, measured; overlong samples dropped by name."""

import logging
from types import SimpleNamespace

import pytest
from collate_stubs import GREETING, CallProcessor, CharTokenizer, StrictProcessor, chatml, make_turns, text
from PIL import Image

from contract.calls import Raw, own_batch
from contract.processors import FAMILIES, processor
from contract.samples import clip, make_image, tone, turns
from packhorse import collate_fns
from raising import raises_bad_sample


def question(*media) -> list[dict]:
    return make_turns(("user", [*media, *text("What?")]), ("assistant", "A cat."))


def image(source) -> dict:
    return {"type": "image", "image": source}


def test_media_come_as_the_parts_hold_them_in_the_order_of_the_text():
    small = make_image(8, 8)
    conversations = [
        question(image(small), {"type": "video", "video": "a.mp4", "fps": 2}),
        GREETING,
        question(image("b.png"), {"type": "audio", "audio": "c.wav"}),
    ]
    assert collate_fns._extract_media_from_conversations(conversations) == ([small, "b.png"], ["a.mp4"])


def test_without_media_there_is_none():
    conversations = [GREETING, make_turns(("user", "Hi"))]
    assert collate_fns._extract_media_from_conversations(conversations) == (None, None)


def test_images_and_videos_are_counted_for_each_sample():
    video = {"type": "video", "video": ["1.png", "2.png"]}
    conversations = [question(image("a.png"), video, image("b.png")), GREETING, question(video)]
    assert collate_fns._count_media_per_sample(conversations) == ([2, 0, 0], [1, 0, 1])
    assert collate_fns._count_media_per_sample([]) == ([], [])


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "CMYK", "1", "LA", "I;16"])
def test_any_image_becomes_rgb_in_place(mode):
    part = image(Image.new(mode, (4, 3)))
    conversation = question(part)
    assert collate_fns._ensure_rgb([conversation, make_turns(("user", "Hi"))])[0] is conversation
    assert part["image"].mode == "RGB"
    assert part["image"].size == (4, 3)


def test_rgb_images_and_paths_stay():
    rgb = make_image(4, 4)
    parts = [image(rgb), image("a.png")]
    collate_fns._ensure_rgb([question(*parts)])
    assert parts[0]["image"] is rgb
    assert parts[1]["image"] == "a.png"


@pytest.mark.parametrize(
    "owner",
    [
        SimpleNamespace(patch_size=14, merge_size=2, min_pixels=100, max_pixels=900),
        SimpleNamespace(patch_size=14, merge_size=2, size={"min_pixels": 100, "max_pixels": 900}),
        SimpleNamespace(patch_size=14, merge_size=2, size={"shortest_edge": 100, "longest_edge": 900}),
    ],
)
def test_the_geometry_of_images_is_read_from_the_processor(owner):
    found = collate_fns._extract_image_config(SimpleNamespace(image_processor=owner))
    expected = {"patch_size": 14, "merge_size": 2, "factor": 28, "min_pixels": 100, "max_pixels": 900}
    assert found == expected


def test_a_processor_without_that_geometry_has_none():
    assert collate_fns._extract_image_config(SimpleNamespace()) is None
    assert collate_fns._extract_image_config(processor("smolvlm")) is None


def test_the_geometry_of_a_real_processor():
    found = collate_fns._extract_image_config(processor("qwen3_vl"))
    assert (found["patch_size"], found["factor"]) == (16, 32)
    assert (found["min_pixels"], found["max_pixels"]) == (4 * 32 * 32, 32 * 32 * 256)


RAW = {
    "image": Raw(turns("image", "image"), images=(make_image(100, 60), make_image(300, 200))),
    "video": Raw(turns("video"), clips=(clip(6),)),
    "audio": Raw(turns("audio"), audios=(tone(16_000),)),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in FAMILIES for kind in sorted(FAMILIES[name].modalities) if FAMILIES[name].chats],
)
def test_media_tokens_are_estimated_exactly_for_known_families(name, kind):
    from packhorse.families import Encoder

    raw = RAW[kind]
    media = iter(
        [
            *(image(one) for one in raw.images),
            *(
                {"type": "video", "video": frames, "video_metadata": metadata}
                for frames, metadata in raw.clips
            ),
            *({"type": "audio", "audio": (clip, 16_000)} for clip in raw.audios),
        ]
    )
    conversation = [
        {**turn, "content": [part if part["type"] == "text" else next(media) for part in turn["content"]]}
        for turn in raw.conversation
    ]
    ids = own_batch(name, [raw])["input_ids"][0].tolist()
    content = Encoder(processor(name)).media_token_ids
    placeholders = len(raw.images) + len(raw.clips) + len(raw.audios)
    assert (
        collate_fns._estimate_media_tokens(conversation, processor(name))
        == sum(token in content for token in ids) - placeholders
    )


def test_media_that_cannot_be_read_add_nothing(tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    parts = [image(str(tmp_path / "missing.png")), image(str(broken)), {"type": "image"}]
    assert collate_fns._estimate_media_tokens(question(*parts), processor("qwen2_vl")) == 0


def test_images_of_an_unknown_processor_are_measured_by_its_geometry(tmp_path):
    path = tmp_path / "a.png"
    make_image(56, 84).save(path)
    unknown = CallProcessor()
    assert collate_fns._estimate_media_tokens(question(image(str(path))), unknown) == 0
    unknown.image_processor = SimpleNamespace(patch_size=14, merge_size=2, min_pixels=1, max_pixels=10**6)
    conversation = question(image(str(path)), image(make_image(28, 28)))
    assert collate_fns._estimate_media_tokens(conversation, unknown) == 5
    assert collate_fns._estimate_media_tokens(question({"type": "video", "video": "a.mp4"}), unknown) == 0


def test_no_limit_leaves_all():
    conversations = [GREETING, GREETING]
    assert collate_fns._drop_overlong_samples(conversations, object(), None) == (conversations, [0, 1])


@pytest.mark.parametrize("made", [CallProcessor, StrictProcessor], ids=["renders", "cannot render"])
def test_overlong_samples_are_dropped_and_named(made, ledger, caplog):
    long = make_turns(("user", "Why? " * 50), ("assistant", "So."))
    with caplog.at_level(logging.WARNING):
        kept, places = collate_fns._drop_overlong_samples([GREETING, long, GREETING], made(), 100)
    assert (kept, places) == ([GREETING, GREETING], [0, 2])
    (entry,) = ledger
    assert (entry.reason, entry.action, entry.stage) == ("too_long", "dropped", "collate")
    assert "more than max_length=100" in entry.detail
    assert "more than max_length=100" in caplog.text


def test_images_count_towards_the_length(ledger):
    conversation, words = question(image(make_image(280, 280))), question()
    text_tokens = len(own_batch("qwen2_vl", [Raw(turns("image", question="What?"))])["input_ids"][0])
    real = processor("qwen2_vl")
    assert collate_fns._drop_overlong_samples([conversation], real, text_tokens + 99)[1] == [0]
    assert collate_fns._drop_overlong_samples([conversation, words], real, text_tokens + 98)[1] == [1]


def test_a_batch_with_nothing_left_is_an_error_and_not_recorded(ledger):
    with raises_bad_sample("too_long"):
        collate_fns._drop_overlong_samples([GREETING, GREETING], CallProcessor(), 5)
    assert len(ledger) == 0


def test_a_tokenizer_that_only_encodes_is_enough(ledger):
    class Encoder:
        def encode(self, words, add_special_tokens):
            return CharTokenizer()(words)["input_ids"]

    stub = SimpleNamespace(tokenizer=Encoder(), apply_chat_template=lambda turns, tokenize: chatml(turns))
    length = len(CharTokenizer()(chatml(GREETING))["input_ids"])
    assert collate_fns._drop_overlong_samples([GREETING], stub, length)[1] == [0]
    with raises_bad_sample("too_long"):
        collate_fns._drop_overlong_samples([GREETING], stub, length - 1)
