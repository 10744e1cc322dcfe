"""Samples as the model takes them: rows go in, ids, labels and media tensors of one sample come out.

Everything happens when a sample is asked for, so DataLoader workers share the work: media are loaded, the
template rendered, the processor run, answers labelled, the length checked. Our own part is small beside the
processor's; a sample with a fake image costs one more rendering, one that is truncated is encoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from packhorse.chat import IGNORE_INDEX, CannotAlign, tokenizer_of
from packhorse.conversation import parse_conversation
from packhorse.datasets.robust import OnBad, ReplacingDataset
from packhorse.errors import BadSample
from packhorse.families import family_of
from packhorse.families.base import TOKEN_KEYS, Encoded, Family
from packhorse.ledger import Ledger
from packhorse.media import inject_fake_image
from packhorse.types import Action, Conversation, Drop, MediaRef, Reason

if TYPE_CHECKING:
    import torch

Hook = Callable[[dict[str, Any], Any], dict[str, Any]]


class PreTokenizedDatasetWrapper(ReplacingDataset):
    """A torch dataset of encoded samples.

    Each sample is a dict with ``input_ids``, ``attention_mask`` and ``labels`` of shape [S], further tensors
    per token if the processor makes them (``mm_token_type_ids``), and the media tensors of its family
    (``pixel_values``, ``image_grid_thw``, …). Labels are not shifted; collate functions do that.

    Args:
        dataset: examples in the documented format.
        processor: of any family; see :func:`packhorse.families.family_of`.
        max_length: the most tokens a sample may have; None for no limit.
        max_retries: as for :class:`ReplacingDataset`, like ``on_bad``, ``max_in_a_row``, ``seed`` and
            ``ledger``.
        truncate: shorten a sample that is too long instead of treating it as bad. Whole turns are cut from
            its end; only where even the first answer does not fit, that answer's text is cut. A medium is
            never cut in two: it is there with all its tokens, or not at all.
        inject_fake_images: give samples without image or video the fake image, whose tokens get
            ``attention_mask`` 0, so that the vision tower runs on every rank.
        post_tokenize_hook: called as ``hook(result, processor) -> result`` before labels are made, with the
            processor's tensors (those per token of shape [1, S]).
    """

    def __init__(
        self,
        dataset: Any,
        processor: Any,
        max_length: int | None = None,
        max_retries: int = 10,
        *,
        truncate: bool = False,
        inject_fake_images: bool = True,
        post_tokenize_hook: Hook | None = None,
        on_bad: OnBad = "replace",
        max_in_a_row: int = 100,
        seed: int = 0,
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(
            dataset, max_retries, on_bad=on_bad, max_in_a_row=max_in_a_row, seed=seed, ledger=ledger
        )
        self.processor, self.max_length, self.truncate = processor, max_length, truncate
        self.inject_fake_images, self.post_tokenize_hook = inject_fake_images, post_tokenize_hook
        self.family = family_of(processor)

    def load(self, idx: int) -> dict[str, torch.Tensor]:
        """Encode one sample.

        Raises:
            BadSample: it cannot be encoded, or is too long.
        """
        key = self.key(idx)
        example = self.dataset[idx]
        wants_image = self.inject_fake_images and "image" in self.family.kinds
        shown = inject_fake_image(example) if wants_image else example
        fake = bool(shown.get("_injected_fake"))
        conversation = parse_conversation(shown, key)
        sample = self._labelled(conversation, fake)
        if self.max_length is not None and len(sample["input_ids"]) > self.max_length:
            sample = self._shortened(conversation, fake, len(sample["input_ids"]), self.max_length)
        if not (sample["labels"] != IGNORE_INDEX).any():
            self._remark(key, "nothing_supervised", "no token of it is learned", "kept")
        return sample

    def _labelled(self, conversation: Conversation, fake: bool) -> dict[str, torch.Tensor]:
        encoded = self.family.encode(conversation, self.processor)
        if fake:  # before the hook, which may move tokens and their mask
            first, behind = fake_tokens(self.family, self.processor, encoded, conversation)
            encoded.tokens["attention_mask"][first:behind] = 0
        if self.post_tokenize_hook is not None:
            encoded = self._hooked(encoded)
        try:
            labels = self.family.labels(self.processor, encoded)
        except CannotAlign as error:
            raise BadSample(str(error), key=conversation.key, stage="encode") from error
        return {**encoded.tokens, "labels": labels, **encoded.media}

    def _hooked(self, encoded: Encoded) -> Encoded:
        assert self.post_tokenize_hook is not None
        batch = {name: tensor.unsqueeze(0) for name, tensor in encoded.tokens.items()}
        result = self.post_tokenize_hook({**batch, **encoded.media}, self.processor)
        tokens = {name: result[name][0] for name in TOKEN_KEYS if name in result}
        media = {name: value for name, value in result.items() if name not in tokens}
        return replace(encoded, tokens=tokens, media=media)

    def _shortened(
        self, conversation: Conversation, fake: bool, length: int, limit: int
    ) -> dict[str, torch.Tensor]:
        too_long = f"{length} tokens are more than max_length={limit}"
        if not self.truncate:
            what = f"{too_long}; truncate=True cuts it"
            raise BadSample(what, reason="too_long", key=conversation.key, stage="encode")
        messages = conversation.messages
        answers = [n for n, message in enumerate(messages, 1) if message.role == "assistant"]
        for turns in reversed(answers):
            shorter = replace(conversation, messages=messages[:turns])
            if turns == len(messages) or not self._may_fit(shorter, limit):
                continue
            sample = self._labelled(shorter, fake)
            if len(sample["input_ids"]) <= limit:
                cut = f"{too_long}: turns {turns} to {len(messages) - 1} were cut"
                self._remark(conversation.key, "truncated", cut, "cut")
                return sample
        first = answers[0] if answers else len(messages)
        return self._with_cut_answer(replace(conversation, messages=messages[:first]), fake, limit, too_long)

    def _may_fit(self, conversation: Conversation, limit: int) -> bool:
        """Whether it could fit, judged by its text alone, which costs no media."""
        text = self.family.render(self.processor, self.family.turns(conversation))
        return len(tokenizer_of(self.processor)(text, add_special_tokens=False)["input_ids"]) <= limit

    def _with_cut_answer(
        self, conversation: Conversation, fake: bool, limit: int, too_long: str
    ) -> dict[str, torch.Tensor]:
        sample = self._labelled(conversation, fake)
        media_ids = self.family.media_token_ids(self.processor)
        cuts_media = any(token in media_ids for token in sample["input_ids"][limit:].tolist())
        if cuts_media or not (sample["labels"][:limit] != IGNORE_INDEX).any():
            what = f"{too_long}, and nothing to learn would be left"
            raise BadSample(what, reason="too_long", key=conversation.key, stage="encode")
        self._remark(conversation.key, "truncated", f"{too_long}: the first answer was cut", "cut")
        per_token = (*TOKEN_KEYS, "labels")
        return {name: value[:limit] if name in per_token else value for name, value in sample.items()}

    def _remark(self, key: str, reason: Reason, detail: str, action: Action) -> None:
        dataset = key.rpartition("/")[0]
        self.ledger.record(Drop(key, "encode", reason, detail, action, dataset, self.epoch))


def fake_tokens(
    family: Family, processor: Any, encoded: Encoded, conversation: Conversation
) -> tuple[int, int]:
    """First and behind-last token that the fake image brought into a sample, brackets and newlines included.

    They are what lies between the tokens that the conversation with the image and that without it have in
    common at their beginning and at their end. (A blank that the template writes only before a text, or that
    melts with the image's own newlines into one token, goes with them.)
    """
    text = family.render(processor, family.turns(_without_first_image(conversation)))
    arguments = family.text_arguments(processor, text)
    options = arguments.get("text_kwargs", arguments)  # some processors take them flat
    plain = list(tokenizer_of(processor)(text, **options)["input_ids"])
    ids = encoded.tokens["input_ids"].tolist()
    first = _common(ids, plain)
    behind = _common(ids[::-1], plain[first:][::-1])
    return first, len(ids) - behind


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many items two sequences have in common at their beginning."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(left), len(right)))


def _without_first_image(conversation: Conversation) -> Conversation:
    messages = list(conversation.messages)
    for number, message in enumerate(messages):
        images = [p for p in message.parts if isinstance(p, MediaRef) and p.kind == "image"]
        if images:
            rest = tuple(part for part in message.parts if part is not images[0])
            messages[number : number + 1] = [replace(message, parts=rest)] if rest else []
            break
    return replace(conversation, messages=tuple(messages))
