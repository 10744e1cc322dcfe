"""A small real tokenizer per family: the 256 bytes, a few merges, and the family's own special tokens.

The merges are chosen to be awkward in the way real vocabularies are: newlines melt together (also across
the end of a turn marker), a full stop takes the newline after it, and a blank belongs to the word that
follows. Code that tokenises a turn by itself and searches for it fails on these as it would on the real one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_MERGES = (
    *("Ċ Ċ", "ĊĊ Ċ", ". Ċ", "Ġ t", "h e", "Ġt he", "Ġ a", "a t", "Ġ c", "Ġc at"),
    *("i n", "a n", "e r", "o n", "s t", "Ġ Ġ"),
)
_WORDS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"


@dataclass(frozen=True)
class TokenSet:
    """The special tokens of one family.

    Attributes:
        named: Tokens that become attributes (``image_token`` and ``image_token_id``) of the tokenizer.
        more: The other special tokens.
        adds_bos: Whether encoding puts BOS in front, as Gemma's tokenizers do.
        padding_side: Only where the real tokenizer names one: it wins over the processor's default.
    """

    eos: str
    pad: str
    bos: str | None = None
    named: dict[str, str] = field(default_factory=dict)
    more: tuple[str, ...] = ()
    adds_bos: bool = False
    padding_side: str | None = None


_CHATML = ("<|im_start|>", "<|im_end|>")
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_KIMI = ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>")
_QWEN = TokenSet(eos="<|im_end|>", pad="<|endoftext|>", more=(*_CHATML, *_VISION))

TOKEN_SETS: dict[str, TokenSet] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
    "qwen3_omni": TokenSet(
        eos="<|im_end|>",
        pad="<|endoftext|>",
        named={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "audio_token": "<|audio_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
        more=_CHATML,
    ),
    "kimi_vl": TokenSet(
        bos="[BOS]",
        eos="[EOS]",
        pad="[PAD]",
        more=(*_KIMI, "<|media_start|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"),
    ),
    "kimi_k25": TokenSet(
        bos="[BOS]",
        eos="<|im_end|>",
        pad="[PAD]",
        more=(
            *_KIMI,
            *("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"),
            "<|kimi_k25_video_placeholder|>",
        ),
    ),
    "gemma3": TokenSet(
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        named={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        more=("<start_of_turn>", "<end_of_turn>"),
        adds_bos=True,
        padding_side="left",
    ),
    "gemma4": TokenSet(
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        named={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        more=("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|video|>"),
        adds_bos=True,
        padding_side="left",
    ),
    "llava_onevision": TokenSet(eos="<|im_end|>", pad="<|endoftext|>", more=(*_CHATML, "<image>", "<video>")),
    "internvl": TokenSet(
        eos="<|im_end|>",
        pad="<|endoftext|>",
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        more=_CHATML,
    ),
    "smolvlm": TokenSet(
        bos="<|im_start|>",
        eos="<end_of_utterance>",
        pad="<|endoftext|>",
        named={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
        more=tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    ),
    "lfm2_vl": TokenSet(
        bos="<|startoftext|>",
        eos="<|im_end|>",
        pad="<|pad|>",
        named={
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail": "<|img_thumbnail|>",
        },
        more=(
            *_CHATML,
            *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)),
        ),
        adds_bos=True,
    ),
    "phi4_mm": TokenSet(
        bos="<|endoftext|>",
        eos="<|endoftext|>",
        pad="<|pad|>",
        named={"image_token": "<|image|>", "audio_token": "<|audio|>"},
        more=("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"),
    ),
    # No <video> token: the real vocabulary has none either, the processor writes image tokens for frames.
    "nemotron_omni": TokenSet(
        bos="<s>",
        eos="<|im_end|>",
        pad="<unk>",
        named={"image_token": "<image>", "audio_token": "<so_embedding>"},
        more=(*_CHATML, "<img>", "</img>", "<so_start>", "<so_end>"),
    ),
    "nemotron_parse": TokenSet(
        bos="<s>",
        eos="</s>",
        pad="<pad>",
        more=("<predict_bbox>", "<predict_classes>", "<output_markdown>", "<predict_no_text_in_pic>"),
    ),
}


def use_bytes_of_words(backend: Tokenizer, pattern: str) -> None:
    """Make a tokenizer split a text into words by ``pattern`` and each word into bytes."""
    from tokenizers import Regex, decoders, pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()


@cache
def tokenizer(family: str) -> PreTrainedTokenizerFast:
    """The tokenizer of ``family``, about 300 entries; the same object at every call."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens = TOKEN_SETS[family]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in _MERGES)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = [(first, second) for first, second in map(str.split, _MERGES)]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    use_bytes_of_words(backend, _WORDS)
    special = [tokens.bos, tokens.eos, tokens.pad, *tokens.named.values(), *tokens.more]
    backend.add_special_tokens(list(dict.fromkeys(token for token in special if token)))
    if tokens.adds_bos:
        assert tokens.bos is not None
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens.bos} $A",
            special_tokens=[(tokens.bos, backend.token_to_id(tokens.bos))],
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens.bos,
        eos_token=tokens.eos,
        pad_token=tokens.pad,
        extra_special_tokens=dict(tokens.named),
        **({"padding_side": tokens.padding_side} if tokens.padding_side else {}),
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
    fast.add_special_tokens({"additional_special_tokens": list(tokens.more)})
    return fast
