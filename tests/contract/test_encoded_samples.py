"""PreTokenizedDatasetWrapper in unusual cases: audio, lost images, hooks, tools, a wrong set-up."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.processors import FAMILIES, build, processor
from contract.samples import make_image, tone
from contract.test_tokenized import IMAGE, TEXT, answers, chat, follows_the_policy, say, wrap
from packhorse.chat import answer_spans
from packhorse.collate_fns import (
    COLLATE_FNS,
    default_collate_fn,
    pad_collate_fn,
    phi4_mm_collate_fn,
    qwen3_omni_collate_fn,
)
from packhorse.datasets import PreTokenizedDatasetWrapper, RobustDatasetWrapper, open_meta_dataset
from packhorse.errors import BadSample
from packhorse.families import Encoder
from packhorse.formats.example_media import inject_fake_image
from packhorse.ledger import Ledger
from raising import raises_bad_sample, raises_config

HEARING = [name for name, fixture in FAMILIES.items() if "audio" in fixture.modalities]


def audio_part(samples: int = 16_000) -> dict[str, Any]:
    return {"type": "audio", "audio": (tone(samples), 16_000)}


def audio_example() -> dict[str, Any]:
    example = chat(say("user", "What is said?"), say("assistant", "Hello."), say("user", "And?"),
                   say("assistant", "Bye."))  # fmt: skip
    example["conversation"][0]["content"].insert(0, audio_part())
    example["conversation"][2]["content"].append(audio_part(8_000))
    return example


def media_in(name: str, ids: torch.Tensor) -> int:
    media = torch.tensor(sorted(Encoder(processor(name)).media_token_ids))
    return int(torch.isin(ids, media).sum())


# --- the fake image ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HEARING)
def test_a_fake_image_hides_itself_and_no_audio(name: str) -> None:
    with_fake, without = (
        wrap(name, audio_example())[0],
        wrap(name, audio_example(), inject_fake_images=False)[0],
    )
    seen = with_fake["attention_mask"] == 1
    assert torch.equal(with_fake["input_ids"][seen], without["input_ids"])
    assert len(with_fake["input_ids"]) > len(without["input_ids"])


@pytest.mark.parametrize(
    ("name", "function"),
    [
        *((name, default_collate_fn) for name in HEARING),
        ("phi4_mm", phi4_mm_collate_fn),
        ("qwen3_omni", qwen3_omni_collate_fn),
    ],
)
def test_a_fake_image_in_a_batch_hides_itself_and_no_audio(name: str, function: Any) -> None:
    plain = function([audio_example()], processor(name))["input_ids"][0]
    batch = function([inject_fake_image(audio_example())], processor(name))
    assert torch.equal(batch["input_ids"][0][batch["attention_mask"][0] == 1], plain)
    assert media_in(name, batch["input_ids"]) > media_in(name, plain)


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3", "internvl", "smolvlm"])
def test_a_sample_that_loses_its_only_image_gets_the_fake_one(name: str) -> None:
    turns = [say("user", "Hi"), say("assistant", "Hello."), say("user", make_image(64, 48), "And?"),
             say("assistant", "A dog, " * 90)]  # fmt: skip
    short = wrap(name, chat(*turns[:2]))[0]
    wrapper = wrap(name, chat(*turns), max_length=len(short["input_ids"]), truncate=True, on_bad="raise")
    cut = wrapper[0]
    assert cut.keys() == short.keys()
    assert all(torch.equal(cut[key], short[key]) for key in cut)
    assert not cut["attention_mask"].all()
    assert [drop.reason for drop in wrapper.ledger] == ["truncated"]


def test_a_fake_image_that_was_injected_before_is_injected_again_if_its_turn_is_cut() -> None:
    example = inject_fake_image(
        chat(say("assistant", "Welcome."), say("user", "Hi"), say("assistant", "A dog, " * 80))
    )
    short = wrap("qwen2_vl", chat(say("assistant", "Welcome.")))[0]
    options: dict[str, Any] = {"max_length": len(short["input_ids"]), "truncate": True, "on_bad": "raise"}
    assert torch.equal(wrap("qwen2_vl", example, **options)[0]["input_ids"], short["input_ids"])
    bare = wrap("qwen2_vl", example, **options, inject_fake_images=False)[0]
    assert bare["attention_mask"].all(), "nothing is hidden where no image is left"


def test_no_sample_ends_in_a_media_item() -> None:
    """Labels are shifted by one later, which cuts the last token."""
    example = chat(say("user", "q"), say("assistant", "here ", make_image(64, 48), " it is " * 20))
    whole = wrap("qwen2_vl", example)[0]["input_ids"]
    images = media_in("qwen2_vl", whole)
    last = int((whole == processor("qwen2_vl").image_token_id).nonzero()[-1])
    for limit, fits in ((last + 1, False), (last + 2, True)):
        wrapper = wrap("qwen2_vl", example, max_length=limit, truncate=True, on_bad="skip")
        sample = wrapper[0]
        assert (sample is not None) is fits
        if fits:
            batch = pad_collate_fn([sample], processor("qwen2_vl"))
            assert media_in("qwen2_vl", batch["input_ids"]) == images
        else:
            (drop,) = wrapper.ledger
            assert (drop.reason, "a media item would be cut" in drop.detail) == ("too_long", True)


def test_a_template_that_ends_in_a_media_item_is_rejected() -> None:
    made = build("qwen2_vl")
    made.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for p in m['content'] %}"
        "{{ p['text'] if p['type'] == 'text' else '<|image_pad|>' }}{% endfor %}"
        "{{ '' if loop.last else '<|im_end|>\n' }}{% endfor %}"
    )
    with raises_bad_sample("media_mismatch", match="the last token"):
        PreTokenizedDatasetWrapper([chat(say("user", make_image(64, 48)))], made, on_bad="raise")[0]


# --- templates --------------------------------------------------------------------------------------------

USER_FIRST = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}"


def test_what_a_template_rejects_is_a_bad_sample_also_where_the_fake_image_would_hide_it() -> None:
    made = build("gemma3")
    made.chat_template = USER_FIRST + made.chat_template
    alone = chat(say("assistant", "Only me."))
    follows_the_policy(made, alone, "encode", "wrong_format", "the chat template rejects it: user first")


def test_what_a_template_rejects_while_a_sample_is_shortened_is_a_bad_sample() -> None:
    made = build("qwen2_vl")
    made.chat_template = made.chat_template + (
        "{% if messages | length == 2 %}{{ raise_exception('two turns') }}{% endif %}"
    )
    long = chat(say("user", "a"), say("assistant", "b"), say("user", "c"), say("assistant", "d " * 200))
    options: dict[str, Any] = {"max_length": 80, "truncate": True, "ledger": Ledger()}
    assert PreTokenizedDatasetWrapper([long], made, on_bad="skip", **options)[0] is None
    assert options["ledger"].counts() == {"wrong_format": 1}


TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for p in m['content'] %}{{ p['text'] }}"
    "{% endfor %}{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function']['name'] }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
)


def test_tool_calls_reach_the_template_and_are_supervised() -> None:
    made = build("qwen2_vl")
    made.chat_template = TOOLS
    call = [{"type": "function", "function": {"name": "weather", "arguments": {}}}]
    turns = [
        {"role": "user", "content": "Rain?", "tool_calls": None},
        {"role": "assistant", "content": "Let me see.", "tool_calls": call},
        {"role": "tool", "content": "It rains."},
        {"role": "assistant", "content": "", "tool_calls": call},
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": "Yes."},
    ]
    samples = PreTokenizedDatasetWrapper([chat(*turns)], made, inject_fake_images=False, on_bad="raise")
    batch = default_collate_fn([chat(*turns)], made)
    for labels in (samples[0]["labels"], batch["labels"][0]):
        text = made.tokenizer.decode(labels[labels >= 0])
        assert text == (
            "Let me see.<tool_call>weather</tool_call><|im_end|><tool_call>weather</tool_call><|im_end|>"
            "Yes.<|im_end|>"
        )


def test_tool_calls_are_part_of_the_answer_also_where_contents_are_texts() -> None:
    made = build("qwen2_vl")
    made.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
        "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c }}</tool_call>{% endfor %}<|im_end|>\n"
        "{% endfor %}"
    )
    turns = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "A", "tool_calls": ["b"]}]
    encoder = Encoder(made)
    text = encoder.render(turns)
    ((start, end),) = answer_spans(encoder, turns, text)
    assert text[start:end] == "A<tool_call>b</tool_call><|im_end|>"


@pytest.mark.parametrize("name", [name for name, fixture in FAMILIES.items() if fixture.chats])
def test_an_answer_without_any_part_is_an_empty_answer(name: str) -> None:
    nothing = chat(say("user", "q"), say("assistant"), say("user", "r"), say("assistant", "s"))
    empty = chat(say("user", "q"), say("assistant", ""), say("user", "r"), say("assistant", "s"))
    assert answers(name, wrap(name, nothing)[0]) == answers(name, wrap(name, empty)[0])


# --- hooks ------------------------------------------------------------------------------------------------


def test_a_hook_that_cuts_media_tokens_makes_a_bad_sample() -> None:
    def cut(result: dict[str, Any], given: Any) -> dict[str, Any]:
        per_token = ("input_ids", "attention_mask", "mm_token_type_ids")
        return {key: value[:, :12] if key in per_token else value for key, value in result.items()}

    with raises_bad_sample("media_mismatch", match=r"before the post_tokenize_hook, \d+ after it"):
        wrap("qwen2_vl", IMAGE, post_tokenize_hook=cut, on_bad="raise")[0]


@pytest.mark.parametrize("axes", [(1,), (3, 1)])
def test_what_a_hook_adds_per_token_is_cut_with_the_tokens(axes: tuple[int, ...]) -> None:
    def add(result: dict[str, Any], given: Any) -> dict[str, Any]:
        length = result["input_ids"].shape[1]
        return {**result, "position_ids": torch.arange(length).expand(*axes, length)}

    long = chat(say("user", "q"), say("assistant", "cat " * 200))
    sample = wrap("qwen2_vl", long, post_tokenize_hook=add, max_length=80, truncate=True, on_bad="raise")[0]
    assert sample["position_ids"].shape == (*axes[:-1], 80)
    batch = pad_collate_fn([sample], processor("qwen2_vl"))
    assert batch["position_ids"].shape == (*axes[:-1], 1, 79)


@pytest.mark.parametrize("policy", ["replace", "skip", "raise"])
def test_a_slip_in_a_hook_stops_the_run_and_a_bad_sample_does_not(policy: Any) -> None:
    def typo(result: dict[str, Any], given: Any) -> dict[str, Any]:
        return result["inputs_ids"]

    def reject(result: dict[str, Any], given: Any) -> dict[str, Any]:
        raise BadSample("not today", stage="encode")

    with raises_config("post_tokenize_hook", match="KeyError: 'inputs_ids'"):
        wrap("qwen2_vl", TEXT, TEXT, post_tokenize_hook=typo, on_bad=policy)[0]
    skipping = wrap("qwen2_vl", TEXT, post_tokenize_hook=reject, on_bad="skip")
    assert skipping[0] is None
    robust = RobustDatasetWrapper([TEXT], on_bad="skip", ledger=Ledger())
    collate = robust.robust_collate(
        lambda batch: default_collate_fn(batch, processor("qwen2_vl"), None, typo)
    )
    with raises_config("post_tokenize_hook", match="KeyError: 'inputs_ids'"):
        collate([TEXT])


# --- audio next to the conversation -----------------------------------------------------------------------


@pytest.mark.parametrize("name", HEARING)
@pytest.mark.parametrize("typed", ["<|endoftext11|>", "<|audio_1|>", "own", ""])
def test_audio_next_to_the_conversation_is_a_part_of_it(name: str, typed: str) -> None:
    typed = processor(name).audio_token if typed == "own" else typed
    separate = {
        **chat(say("user", f"{typed}What?"), say("assistant", "Hi.")),
        "audio": (tone(16_000), 16_000),
    }
    inside = chat(say("user", "What?"), say("assistant", "Hi."))
    inside["conversation"][0]["content"].insert(0, audio_part())
    expected = wrap(name, inside, on_bad="raise")[0]
    found = wrap(name, separate, on_bad="raise")[0]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    functions = {default_collate_fn, COLLATE_FNS[FAMILIES[name].class_name]} - {qwen3_omni_collate_fn}
    for function in functions:
        first, second = (function([example], processor(name)) for example in (separate, inside))
        assert torch.equal(first["input_ids"], second["input_ids"])


def test_audio_that_has_no_place_is_rejected() -> None:
    clip = (tone(16_000), 16_000)
    wrong = {
        "and in the conversation": {**audio_example(), "audio": clip},
        "1 audio clips for 2 placeholders": {
            **chat(say("user", "<|audio_1|><|audio_1|>"), say("assistant", "x")),
            "audio": clip,
        },
        "1 audio clips for 0 placeholders": {**chat(say("assistant", "x")), "audio": clip},
    }
    for words, example in wrong.items():
        with raises_bad_sample("media_mismatch", match=words):
            wrap("phi4_mm", example, on_bad="raise")[0]
        with raises_bad_sample("media_mismatch", match=words):
            phi4_mm_collate_fn([example], processor("phi4_mm"))
    with raises_bad_sample("media_mismatch", match="a part of type audio"):
        wrap("qwen2_vl", {**TEXT, "audio": clip}, on_bad="raise")[0]


def test_audio_next_to_the_conversation_that_is_too_short_is_rejected() -> None:
    short = {**chat(say("user", "What?"), say("assistant", "x")), "audio": (tone(399), 16_000)}
    with raises_bad_sample("broken_media", match="at least 400"):
        phi4_mm_collate_fn([short], processor("phi4_mm"))


# --- set-up -------------------------------------------------------------------------------------------------


def test_a_processor_without_a_chat_template_is_rejected_at_once() -> None:
    made = build("qwen2_vl")
    made.chat_template = None
    with raises_config("processor.chat_template"):
        PreTokenizedDatasetWrapper([TEXT], made)
    robust = RobustDatasetWrapper([TEXT], on_bad="skip", ledger=Ledger())
    for limit in (None, 100):
        collate = robust.robust_collate(lambda batch, limit=limit: default_collate_fn(batch, made, limit))
        with raises_config("processor.chat_template"):
            collate([TEXT])
    made.tokenizer = copy.deepcopy(made.tokenizer)
    made.tokenizer.chat_template = "the processor does not ask for this one"
    with raises_config("processor.chat_template"):
        PreTokenizedDatasetWrapper([TEXT], made)
    PreTokenizedDatasetWrapper([TEXT], processor("nemotron_parse"))


def test_truncation_needs_a_length() -> None:
    with raises_config("truncate", True):
        wrap("qwen2_vl", TEXT, truncate=True)


def test_a_robust_wrapper_inside_is_rejected_where_it_skips() -> None:
    class Gone:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Any:
            raise OSError("gone")

    robust = RobustDatasetWrapper(Gone(), on_bad="skip", ledger=Ledger())
    with raises_config("dataset"):
        PreTokenizedDatasetWrapper(robust, processor("qwen2_vl"), on_bad="skip", ledger=Ledger())[0]


def test_encoded_samples_in_a_function_for_examples_stop_the_run() -> None:
    samples = wrap("qwen2_vl", TEXT, IMAGE, on_bad="skip")
    for function in {*COLLATE_FNS.values()} - {qwen3_omni_collate_fn}:
        collate = samples.robust_collate(
            lambda batch, function=function: function(batch, processor("qwen2_vl"))
        )
        with raises_config("conversation"):
            collate(samples.__getitems__([0, 1]))
    assert len(samples.ledger) == 0


def test_an_empty_conversation_is_a_bad_sample() -> None:
    follows_the_policy(processor("qwen2_vl"), chat(), "encode", "empty_conversation", "without turns")


def test_a_remark_on_a_replacement_is_recorded_under_its_own_name() -> None:
    """It was delivered cut, whichever sample it replaces."""
    bad = chat(say("user", "?"), say("assistant", "x"))
    bad["conversation"][0]["content"].insert(0, {"type": "image", "image": "/nowhere.png"})
    long = chat(
        say("user", "q"), say("assistant", "word " * 100), say("user", "r"), say("assistant", "v " * 99)
    )
    wrapper = wrap("qwen2_vl", bad, long, max_length=240, truncate=True)
    wrapper[0]
    entries = [(drop.key, drop.reason, drop.action) for drop in wrapper.ledger]
    assert entries == [("1", "truncated", "cut"), ("0", "missing_media", "replaced")]
    wrapper[1]
    assert len(wrapper.ledger) == 2, "requested by itself, it is the same entry"


def test_a_missing_image_is_recorded_with_file_and_line(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "x"}]
    rows = [{"messages": turns, "images": ["no.png"]}] * 2
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = open_meta_dataset({"a": {"file_name": str(tmp_path / "a.jsonl"), "media_dir": str(tmp_path)}})
    wrapper = PreTokenizedDatasetWrapper(dataset, processor("qwen2_vl"), on_bad="skip")
    assert wrapper[1] is None
    (drop,) = dataset.ledger
    assert (drop.key, drop.reason) == ("a/1", "missing_media")
    assert "a.jsonl:2" in drop.detail
