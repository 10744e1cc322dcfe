"""``PreTokenizedDatasetWrapper``: examples in, encoded samples out.

Samples are encoded when they are accessed, so DataLoader workers share the work. A sample with a fake image
costs one more rendering and tokenization; one that is truncated is encoded twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from packhorse.chat import IGNORE_INDEX, Processor, token_keys
from packhorse.encode.robust import OnBad, ReplacingDataset
from packhorse.errors import DATA_ERRORS, BadSample, ConfigError
from packhorse.families import Encoded, Encoder
from packhorse.formats.conversation import parse_conversation, split_documents
from packhorse.formats.example_media import has_image, inject_fake_image
from packhorse.ledger import Ledger
from packhorse.types import Action, Conversation, Drop, Reason, Rows, Sample

if TYPE_CHECKING:
    import torch


Hook = Callable[[dict[str, Any], Any], Mapping[str, Any]]
"""Takes the tensors of a processor's call and the processor, returns the tensors to use."""


class PreTokenizedDatasetWrapper(ReplacingDataset):
    """A torch dataset of encoded samples.

    Each sample is a dict with ``input_ids``, ``attention_mask`` and ``labels`` of shape [S], further tensors
    per token if the processor returns them (``mm_token_type_ids``), the media tensors of its family
    (``pixel_values``, ``image_grid_thw``, …) and, if there are media, their numbers: ``n_images`` and
    ``n_videos``. Labels are not shifted; collate functions do that.

    Args:
        dataset: examples in the documented format; not a :class:`RobustDatasetWrapper`.
        processor: of any family (see :func:`packhorse.families.family_of`), or its encoder.
        max_length: the most tokens a sample may have; None for no limit.
        max_retries: as for :class:`ReplacingDataset`, like ``on_bad``, ``max_consecutive_bad``, ``seed`` and
            ``ledger``.
        truncate: shorten a sample that is too long instead of treating it as bad. Whole turns are cut from
            its end; if even the first answer does not fit, its text is cut. All tokens of a media item are
            kept, or none.
        inject_fake_images: give samples without image or video the fake image, whose tokens get
            ``attention_mask`` 0, so that the vision tower runs on every rank.
        post_tokenize_hook: called as ``hook(result, processor) -> result`` before labels are built, with the
            processor's tensors (those per token of shape [1, S]). It may raise :class:`BadSample` to reject
            a sample; anything else that it raises stops the run.

    Raises:
        ConfigError: the processor has no chat template, or ``truncate`` has no ``max_length`` to cut to.
    """

    def __init__(
        self,
        dataset: Rows,
        processor: Processor | Encoder,
        max_length: int | None = None,
        max_retries: int = 10,
        *,
        truncate: bool = False,
        inject_fake_images: bool = True,
        post_tokenize_hook: Hook | None = None,
        on_bad: OnBad = "replace",
        max_consecutive_bad: int = 100,
        seed: int = 0,
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(
            dataset,
            max_retries,
            on_bad=on_bad,
            max_consecutive_bad=max_consecutive_bad,
            seed=seed,
            ledger=ledger,
        )
        if truncate and max_length is None:
            raise ConfigError.of("truncate", True, "set max_length to the most tokens a sample may have")
        self.encoder = Encoder.of(processor)
        self.processor, self.family = self.encoder.processor, self.encoder.family
        self.max_length, self.truncate = max_length, truncate
        self.inject_fake_images, self.post_tokenize_hook = inject_fake_images, post_tokenize_hook
        self.encoder.check_template()

    def load(self, idx: int) -> dict[str, torch.Tensor]:
        """Return :meth:`load_sample` as the documented dict."""
        return self.load_sample(idx).to_dict()

    def load_sample(self, idx: int) -> Sample:
        """Encode one sample; BadSample if it cannot be encoded, or is too long, or is preference data."""
        key, example = self._read_example(idx)
        return self.encode(example, key)

    def load_documents(self, idx: int) -> list[Sample]:
        """Encode a row of preference data: both answers of a pair, next to each other, or one sample.

        Raises:
            BadSample: as :meth:`load_sample`, for either answer.
        """
        key, example = self._read_example(idx)
        return [
            replace(self.encode(plain, key), role=role) for role, plain in split_documents(example).items()
        ]

    def _read_example(self, idx: int) -> tuple[str, Mapping[str, Any]]:
        key, example = self.read(idx)
        if example is None:
            what = f"the dataset returns None for sample {idx}: pass it without a RobustDatasetWrapper, as "
            raise ConfigError(f"{what}PreTokenizedDatasetWrapper has its own on_bad", setting="dataset")
        return key, example

    def encode(self, example: Mapping[str, Any], key: str) -> Sample:
        """Encode an example, which need not be in the dataset; ``key`` names it in errors.

        Raises:
            BadSample: it cannot be encoded, or is too long.
        """
        if example.get("audio") is not None:
            example = self.encoder.place_audio(example, key)
        conversation = parse_conversation(example, key)
        sample, cut = self._encode_labelled(*self._with_fake_image(example, conversation)), ""
        if self.max_length is not None and len(sample) > self.max_length:
            sample, cut = self._shorten(example, key, len(sample), self.max_length)
        if int(sample.tokens["input_ids"][-1]) in self.encoder.media_token_ids:
            detail = "the last token belongs to a media item and would be cut when labels are shifted"
            raise BadSample(detail, reason="media_mismatch", key=key, stage="encode")
        if cut:
            self._remark(key, "truncated", cut, "cut")
        if sample.labels is None or not (sample.labels != IGNORE_INDEX).any():
            self._remark(key, "nothing_supervised", "no token of it is supervised", "kept")
        return sample

    def _with_fake_image(
        self, example: Mapping[str, Any], conversation: Conversation
    ) -> tuple[Conversation, bool]:
        """Return the conversation, with a fake image if it needs one, and whether it has one."""
        wanted = self.inject_fake_images and "image" in self.family.kinds
        # An empty conversation stays empty: encoding rejects it.
        if wanted and conversation.messages and not has_image(conversation):
            example = inject_fake_image(example)
            conversation = parse_conversation(example, conversation.key)
        images = any(ref.kind == "image" for ref in conversation.media)
        return conversation, images and bool(example.get("_injected_fake"))

    def _first_turns(self, example: Mapping[str, Any], turns: int, key: str) -> tuple[Conversation, bool]:
        """:meth:`_with_fake_image` of the first turns."""
        shorter = {**example, "conversation": example["conversation"][:turns]}
        return self._with_fake_image(shorter, parse_conversation(shorter, key))

    def _encode_labelled(self, conversation: Conversation, fake: bool) -> Sample:
        # The fake image is hidden before the hook, which may move tokens and their mask.
        encoded = self.encoder.encode(conversation, fake_image=fake)
        if self.post_tokenize_hook is not None:
            encoded = self._run_hook(encoded, conversation)
        return self.encoder.label_sample(encoded, conversation.key)

    def _run_hook(self, encoded: Encoded, conversation: Conversation) -> Encoded:
        assert self.post_tokenize_hook is not None
        batch = {name: tensor.unsqueeze(0) for name, tensor in encoded.tokens.items()}
        result = run_hook(self.post_tokenize_hook, {**batch, **encoded.media}, self.processor)
        tokens = {name: result[name].squeeze(-2) for name in token_keys(result, self.family.layout)}
        media = {name: value for name, value in result.items() if name not in tokens}
        before, after = (self._media_tokens(each["input_ids"]) for each in (encoded.tokens, tokens))
        if before != after:
            raise self.family.bad(
                f"{before.total()} media tokens before the post_tokenize_hook, {after.total()} after it",
                conversation,
            )
        return replace(encoded, tokens=tokens, media=media)

    def _media_tokens(self, ids: torch.Tensor) -> Counter[int]:
        return Counter(token for token in ids.tolist() if token in self.encoder.media_token_ids)

    def _shorten(self, example: Mapping[str, Any], key: str, length: int, limit: int) -> tuple[Sample, str]:
        """Return the sample without what does not fit, and a description of the cut."""
        too_long = f"{length} tokens are more than max_length={limit}"
        if not self.truncate:
            raise BadSample(f"{too_long}; truncate=True cuts it", reason="too_long", key=key, stage="encode")
        turns = example["conversation"]
        answers = [number for number, turn in enumerate(turns, 1) if turn["role"] == "assistant"]
        for number in reversed(answers):
            if number == len(turns):
                continue
            shown, fake = self._first_turns(example, number, key)
            if not self._may_fit(shown, limit):
                continue
            sample = self._encode_labelled(shown, fake)
            if len(sample) <= limit:
                return sample, f"{too_long}: turns {number} to {len(turns) - 1} were cut"
        first = answers[0] if answers else len(turns)
        shown, fake = self._first_turns(example, first, key)
        return self._with_cut_answer(shown, fake, limit, too_long), f"{too_long}: the first answer was cut"

    def _may_fit(self, conversation: Conversation, limit: int) -> bool:
        """Return whether its text alone fits, which needs no media."""
        text = self.encoder.render_conversation(conversation)
        return len(self.encoder.tokenizer(text, add_special_tokens=False)["input_ids"]) <= limit

    def _with_cut_answer(self, conversation: Conversation, fake: bool, limit: int, too_long: str) -> Sample:
        sample = self._encode_labelled(conversation, fake)
        # Shifting labels cuts one token more, so a media item has to end before the last one.
        cuts_media = self._media_tokens(sample.tokens["input_ids"][limit - 1 :])
        shorter = sample.cut(slice(limit))
        is_supervised = shorter.labels is not None and bool((shorter.labels != IGNORE_INDEX).any())
        if cuts_media or not is_supervised:
            rest = "a media item would be cut" if is_supervised else "no supervised token would remain"
            raise BadSample(
                f"{too_long}, and {rest}", reason="too_long", key=conversation.key, stage="encode"
            )
        return shorter

    def _remark(self, key: str, reason: Reason, detail: str, action: Action) -> None:
        self.ledger.record(Drop.from_key(key, "encode", reason, detail, action, epoch=self.epoch))


def run_hook(hook: Hook, result: dict[str, Any], processor: Processor) -> Mapping[str, Any]:
    """Return what a user's hook makes of the tensors; ConfigError if it fails or returns no ``input_ids``."""
    try:
        changed = hook(result, processor)
    except BadSample:
        raise
    except DATA_ERRORS as error:  # a mistake in the hook cannot be distinguished from a bad sample
        what = (
            f"post_tokenize_hook failed: {type(error).__name__}: {error} (raise BadSample to reject a sample)"
        )
        raise ConfigError(what, setting="post_tokenize_hook") from error
    if not isinstance(changed, Mapping) or "input_ids" not in changed:
        name = type(changed).__name__
        what = f"post_tokenize_hook returned a {name} without input_ids: expected the tensors it was given"
        raise ConfigError(what, setting="post_tokenize_hook", value=name)
    return changed
