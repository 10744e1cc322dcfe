"""The values that pass between stages: plain, frozen, and cheap to import (no torch)."""

from __future__ import annotations

import copy
import enum
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch.distributed.device_mesh import DeviceMesh

# For annotations only, so that this module does not import numpy.
Integers: TypeAlias = "npt.NDArray[np.int64]"
Floats: TypeAlias = "npt.NDArray[np.float64]"
Flags: TypeAlias = "npt.NDArray[np.bool_]"


class Rows(Protocol):
    """Rows or samples by index: a dataset with a length, or a list."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


IGNORE_INDEX = -100
"""The label of a token that is not supervised. Written nowhere else."""

MediaKind = Literal["image", "video", "audio"]
MEDIA_KINDS: tuple[MediaKind, ...] = get_args(MediaKind)
_TOKEN_FIELDS = ("labels", "position_ids", "loss_weights")  # of a sample or pack, next to ``tokens``


class MediaMask(enum.IntFlag):
    """A set of media kinds; arrays and files hold its integer."""

    NONE = 0
    IMAGE = 1
    VIDEO = 2
    AUDIO = 4

    @classmethod
    def of(cls, kinds: Iterable[MediaKind]) -> MediaMask:
        """Return the mask of these kinds."""
        mask = cls.NONE
        for kind in kinds:
            mask |= cls[kind.upper()]
        return mask

    @property
    def kinds(self) -> tuple[MediaKind, ...]:
        """The kinds in the mask, in the order of ``MEDIA_KINDS``."""
        return tuple(kind for kind in MEDIA_KINDS if MediaMask[kind.upper()] in self)


Reasoning = Literal["keep", "mask", "drop"]
"""What becomes of reasoning (``<think>…</think>``) in answers: trained, kept as context, removed."""

Task = Literal["sft", "preference"]
"""What rows are for: answers to train on, or answers to prefer and to avoid."""

DocumentRole = Literal["", "chosen", "rejected", "good", "bad"]
"""What a document of preference data is: one answer of a pair, or an answer with its label. Else empty."""

Action = Literal["dropped", "replaced", "cut", "repaired", "kept"]
"""What happened to the sample: ``dropped`` and ``replaced`` were not delivered; ``cut`` was delivered without
a part; ``repaired`` was delivered changed; ``kept`` was delivered unchanged, with a remark."""

Stage = Literal["select", "read", "convert", "media", "encode", "collate", "plan"]
"""The stage that noticed it."""

Reason = Literal[
    "not_sampled",  # sample_ratio below 1 did not draw the row
    "left_over",  # equal shards: the rows that do not divide by the world size
    "malformed_row",  # not JSON, not UTF-8, not an object
    "row_too_large",  # more bytes, or more characters of text, than a row may have
    "wrong_format",  # an object, but not a conversation under the declared columns and tags
    "empty_conversation",
    "no_assistant_turn",
    "unknown_role",
    "preference_data",  # two answers, or an answer and whether it is good, in a run on plain answers
    "no_preference",  # a plain answer in a run on preference data
    "unsupported_turn",  # the chat template cannot write a turn or a tool call of the row
    "unused_field",  # a column of a dataset that nothing reads
    "surplus_placeholder",  # more <image> in the text than images in the row
    "surplus_media",  # more images in the row than <image> in the text
    "outside_media_dir",
    "not_allowed",  # an address that the dataset does not allow
    "missing_media",
    "unreachable_media",  # no permission or no answer; the next run tries again
    "broken_media",
    "media_too_large",
    "unreadable_file",  # a data file of the mixture cannot be opened
    "extreme_aspect_ratio",  # an image that the processor rejects
    "special_token_in_text",  # a text contains a token that only a template may write
    "duplicate_conversation",  # the same conversation was seen before
    "same_file",  # two datasets of one mixture read the same file
    "sample_failed",  # a dataset raised for this sample; the detail names the exception
    "collate_failed",
    "too_long",  # more tokens than max_length
    "over_limit",  # more of something else than a pack may hold (visual tokens, media)
    "empty_sample",  # no token at all
    "pack_full",  # longer than estimated: it fits neither into its pack nor into the neighbouring ones
    "truncated",  # cut to max_length
    "media_mismatch",  # placeholders, media tokens and media of a sample do not agree
    "nothing_supervised",  # no token of the sample is supervised
]


# Addresses may be inside JSON, where writers escape "/" as "\/" and "&" as "\u0026", and that inside a repr.
_ADDRESS = re.compile(r":\\{0,4}/\\{0,4}/")
_USER_AND_PASSWORD = re.compile(r"(:\\{0,4}/\\{0,4}/)[^/?#\s]*@")
# A name has no delimiter, so the search is linear: rows may hold megabytes of anything.
_PARAMETER = re.compile(r"(?:[?&;#]|\\u00(?:3f|26|3b|23))([^=?&;#\s\\]+)(?:=|\\{1,4}u003d)", re.IGNORECASE)
_VALUE = re.compile(r"(?:(?!\\{1,4}(?:[\"'nrt]|u00(?:26|3b|23|22|27|3e)))[^&;#\s'\")>\]])+", re.IGNORECASE)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # of names such as X-Amz-Signature and AWSAccessKeyId
_SECRET_NAMES = frozenset({"key", "code"})  # secret as a whole name only: sort_key and zip_code are none
_SECRET_WORDS = frozenset(
    {"sig", "auth", "oauth", "authorization", "credential", "credentials", "passwd", "pwd", "passphrase"}
    | {"session", "sessionid", "policy", "jwt", "hmac"}
)
_SECRET_ENDS = ("token", "signature", "secret", "password", "apikey", "accesskey", "accesskeyid")
_SECRET_PAIRS = frozenset({("api", "key"), ("access", "key"), ("key", "pair"), ("subscription", "key")})


def mask_secrets(text: str) -> str:
    """Replace passwords, tokens and signatures of addresses in a text by ``***``.

    >>> mask_secrets("no file https://ann:pw@host/a.png?width=9&X-Amz-Signature=5f3a")
    'no file https://***@host/a.png?width=9&X-Amz-Signature=***'
    """
    if not _ADDRESS.search(text):
        return text
    text = _USER_AND_PASSWORD.sub(r"\1***@", text)
    pieces, done = [], 0
    for parameter in _PARAMETER.finditer(text):
        if parameter.start() < done or not _is_secret(parameter[1]):
            continue
        if value := _VALUE.match(text, parameter.end()):
            pieces += [text[done : parameter.end()], "***"]
            done = value.end()
    return "".join([*pieces, text[done:]])


def _is_secret(name: str) -> bool:
    """Return whether the value of a parameter of an address is secret."""
    words = [word.lower() for word in _WORD.findall(name)]
    return (
        name.lower() in _SECRET_NAMES
        or any(word in _SECRET_WORDS or word.endswith(_SECRET_ENDS) for word in words)
        or any(pair in _SECRET_PAIRS for pair in pairwise(words))
    )


@dataclass(frozen=True, slots=True)
class World:
    """This process is ``rank`` of ``size`` data-parallel processes.

    Passed as an argument, so that every cluster can be tested in one process; ``World.detect()`` is for the
    edge of a program.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(
                f"rank={self.rank}, world size={self.size}: expected size >= 1 and 0 <= rank < size"
            )

    @classmethod
    def detect(cls) -> World:
        """Return the world of ``torch.distributed`` if initialised, of torchrun's variables, else 0 of 1.

        All processes count as data-parallel ranks; if some share a model, use :meth:`from_mesh`. Does not
        import torch: a process that has not imported it has no process group.
        """
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        return cls()

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, dims: str | Sequence[str] | None = None) -> World:
        """Return the rank and size along the data-parallel dimensions of a mesh.

        Ranks that differ only in other dimensions (tensor, context or pipeline parallelism) are equal and get
        the same rows.

        Args:
            mesh: a ``torch.distributed.device_mesh.DeviceMesh`` with named dimensions.
            dims: the name of the data-parallel dimension, or the names of several, the slowest first, as
                ``("dp_replicate", "dp_shard")``; None for all dimensions, if ``mesh`` is a part of another.

        Raises:
            ValueError: the mesh has no names, or ``dims`` names no dimension or one of them twice.
        """
        dimensions = mesh.mesh_dim_names
        if not dimensions:
            raise ValueError(f"{mesh} has no named dimensions: create it with mesh_dim_names=('dp', …)")
        names = dimensions if dims is None else (dims,) if isinstance(dims, str) else tuple(dims)
        if not names or len(set(names)) < len(names):
            raise ValueError(f"{dims=}: expected different dimensions of the mesh, which has {dimensions}")
        rank, size = 0, 1
        for part in (mesh[name] for name in names):
            rank, size = rank * part.size() + part.get_local_rank(), size * part.size()
        return cls(rank, size)


@dataclass(frozen=True, slots=True)
class Drop:
    """One ledger entry: what happened to a sample (or one of its media items), at which stage and why.

    ``key`` names the row, unique over a mixture: ``coco/812`` is row 812 (from 0) of dataset ``coco``;
    ``coco/812#1`` is its second copy if ``sample_ratio`` is above 1. Secrets in ``detail`` are masked.
    """

    key: str
    stage: Stage
    reason: Reason
    detail: str = ""
    action: Action = "dropped"
    dataset: str = ""
    epoch: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "detail", mask_secrets(self.detail))

    @classmethod
    def from_key(
        cls,
        key: str,
        stage: Stage,
        reason: Reason,
        detail: str = "",
        action: Action = "dropped",
        *,
        epoch: int | None = None,
    ) -> Drop:
        """Return the entry of a row, with the dataset that its key names: ``coco`` for ``coco/812``."""
        return cls(key, stage, reason, detail, action, key.rpartition("/")[0], epoch)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Drop:
        """Read an entry of a ledger or step file; the first files had ``left_out`` for ``dropped``."""
        values = {name: entry[name] for name in cls.__dataclass_fields__}
        if values["action"] == "left_out":
            values["action"] = "dropped"
        return cls(**values)


@dataclass(frozen=True, slots=True)
class MediaRef:
    """Where one image, video or audio clip comes from.

    ``source`` is the value in the row: a path, an address (``s3://…``), ``db.lmdb::key``, encoded bytes, a
    decoded object (a PIL image, an array), or for a video a list of frame paths. ``options`` are further
    fields of the row's entry (``fps``, ``frame_indices``, …).
    """

    kind: MediaKind
    source: Any
    options: Mapping[str, Any] = field(default_factory=dict)


Owner = Literal["sample", "item", "rows"]
"""Who owns axis 0 of a media tensor: each *sample* has one entry, each media *item* has one, or each item has
several *rows* (patches, tiles, frames)."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The layout of one tensor of a family's processor.

    Args:
        kinds: the media it belongs to; several share it in the order of the text.
        owner: who owns axis 0.
        rows_from: for ``"rows"``: the key of the grid whose product is an item's number of rows; None if the
            family computes it without a tensor.
        ragged: other axes may differ from sample to sample; they are padded with zeros to the largest.
    """

    kinds: tuple[MediaKind, ...]
    owner: Owner
    rows_from: str | None = None
    ragged: bool = False


MediaLayout = Mapping[str, TensorLayout]
"""Every media tensor that a family's processor returns, by key; packing, collating and pipeline chunking read
it."""


@dataclass(frozen=True, slots=True)
class TokenCount:
    """The number of tokens of one encoded sample, by kind.

    Attributes:
        text: tokens that are no media content: of the template, brackets around media, timestamps, row and
            column tokens included.
        image: tokens of the content of images; ``video`` and ``audio`` likewise.
        supervised: supervised tokens, before the label shift.
        images: number of images; ``videos`` and ``audios`` likewise.
        patches: positions that the vision encoder attends over.
        exact: whether the processor returns exactly these.
        off_by: if not exact: the largest error of the total; -1 if unknown.
        rejected: for a pair, whose other counts are sums over both documents: tokens of the rejected one.
    """

    text: int
    image: int = 0
    video: int = 0
    audio: int = 0
    supervised: int = 0
    images: int = 0
    videos: int = 0
    audios: int = 0
    patches: int = 0
    exact: bool = True
    off_by: int = 0
    rejected: int = 0

    @property
    def total(self) -> int:
        """The length of the sample's ``input_ids``."""
        return self.text + self.image + self.video + self.audio


def is_weight(value: object) -> bool:
    """Return whether a value can be a factor for the loss: a finite number of 0 or more, or a boolean."""
    return isinstance(value, Real) and 0 <= float(value) < float("inf")


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of text inside a message."""

    text: str


Part = TextPart | MediaRef


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: the role, and the parts in order.

    ``extras`` are the turn's other fields (``tool_calls``, ``reasoning_content``, …) for the chat template;
    ``weight`` is a factor for the loss of an answer, 0 for one that is not trained.
    """

    role: str
    parts: tuple[Part, ...]
    extras: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0

    @property
    def text(self) -> str:
        """The text parts, joined without separators."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))


@dataclass(frozen=True)
class Conversation:
    """One sample: its turns, and its key in logs and in the ledger.

    Attributes:
        messages: the turns.
        key: the row's name.
        tools: functions that the model may call, for the chat template.
        chat_template_kwargs: options for the chat template.
        weight: factor for the loss of the whole sample.
        reasoning: ``"mask"`` leaves reasoning in answers out of the labels.
    """

    messages: tuple[Message, ...]
    key: str = ""
    tools: tuple[Any, ...] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    reasoning: Reasoning = "keep"

    @cached_property
    def media(self) -> tuple[MediaRef, ...]:
        """All media, in the order of the text."""
        return tuple(p for m in self.messages for p in m.parts if isinstance(p, MediaRef))

    @cached_property
    def uses_tools(self) -> bool:
        """Whether it has tools, results of tools, or turns with fields of their own, such as calls."""
        return bool(self.tools) or any(m.extras or m.role == "tool" for m in self.messages)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _TokenTensors:
    """Tensors per token (last axis) of a sample or pack.

    Attributes:
        tokens: ``input_ids``, ``attention_mask`` and further tensors per token [S], by key.
        labels: [S]; None before they are built.
        position_ids: [S], or [3, S] with mRoPE; None leaves them to the collate function.
        loss_weights: [S], shifted like the labels; None for equal weights.
        num_items: number of media items of each kind.
    """

    tokens: Mapping[str, torch.Tensor]
    labels: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    loss_weights: torch.Tensor | None = None
    num_items: Mapping[MediaKind, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.tokens["input_ids"].shape[-1])

    @property
    def per_token(self) -> dict[str, torch.Tensor]:
        """All tensors per token by key, labels, positions and loss weights included."""
        others = {name: getattr(self, name) for name in _TOKEN_FIELDS}
        return {**self.tokens, **{name: value for name, value in others.items() if value is not None}}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sample(_TokenTensors):
    """One encoded sample.

    Attributes:
        media: the media tensors by key, as the family's :data:`MediaLayout` declares them.
        key: names the row (``coco/812``); empty if unknown.
        role: what the document is in preference data.
    """

    media: Mapping[str, torch.Tensor] = field(default_factory=dict)
    key: str = ""
    role: DocumentRole = ""

    def with_per_token(self, tensors: Mapping[str, torch.Tensor]) -> Sample:
        """Return the sample with these tensors instead of its :attr:`per_token`."""
        tokens = {key: value for key, value in tensors.items() if key not in _TOKEN_FIELDS}
        others: Any = {name: tensors.get(name) for name in _TOKEN_FIELDS}
        return replace(self, tokens=tokens, **others)

    def cut(self, kept: slice) -> Sample:
        """Return the sample with only these tokens; media stay."""
        return self.with_per_token({key: value[..., kept] for key, value in self.per_token.items()})

    def to_dict(self) -> dict[str, torch.Tensor]:
        """Return the documented dict, with ``n_images`` and ``n_videos`` if there are media."""
        import torch

        kinds: tuple[MediaKind, ...] = ("image", "video") if any(self.num_items.values()) else ()
        counts = {f"n_{kind}s": torch.tensor(self.num_items.get(kind, 0)) for kind in kinds}
        return {**self.per_token, **self.media, **counts}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedSample(_TokenTensors):
    """Several samples joined into one sequence; ``attention_mask`` holds document numbers from 1.

    Attributes:
        media: the tensors to concatenate along axis 0, by key; the collate function copies them.
        seq_lens: tokens of each document.
        seq_lens_padded: the same, padded to ``alignment``.
        items_per_document: images and videos of each document; None if unknown.
        alignment: documents are padded to a multiple of this.
    """

    media: Mapping[str, Sequence[torch.Tensor]] = field(default_factory=dict)
    seq_lens: Sequence[int] = ()
    seq_lens_padded: Sequence[int] = ()
    items_per_document: Sequence[int] | None = None
    alignment: int = 1


@dataclass(frozen=True, slots=True)
class WorkItem:
    """The content of one batch to build.

    Attributes:
        epoch: of the loader.
        step: the micro-step of the epoch's current segment.
        packs: the samples of each pack (in padded batches: one sample each).
        media_mask: the media that any rank has in this step; the batch needs all of them.
        keep_bytes: whether pixels that are bytes stay so (``BatchInfo.pixels``).
    """

    epoch: int
    step: int
    packs: tuple[tuple[int, ...], ...]
    media_mask: MediaMask = MediaMask.NONE
    keep_bytes: bool = False

    @property
    def samples(self) -> tuple[int, ...]:
        """The samples of all packs."""
        return tuple(index for pack in self.packs for index in pack)


@dataclass(frozen=True, slots=True)
class PixelFormat:
    """How pixels that are bytes become what the processor returns: ``(byte - mean) / std``, by channel.

    Attributes:
        mean: of each channel, in units of bytes.
        std: likewise.
        channels: the axis of the channels; for rows that hold a whole patch each, ``"first"`` if all pixels
            of a channel follow each other there, ``"last"`` if all channels of a pixel do.
        repeats: how often each channel's pixels are in such a row (``"first"``): a patch of an image has as
            many frames as one of a video.
        mask: key of the tensor that is 0 where the processor pads, where pixels are 0; None without padding.
        dtype: of the result; None for float32.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    channels: int | Literal["first", "last"]
    repeats: int = 1
    mask: str | None = None
    dtype: torch.dtype | None = None

    def expand(self, pixels: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return what the processor returns; computed in float32, on the device of ``pixels``."""
        import torch

        split, axis, number = pixels, 0, len(self.mean)
        if isinstance(self.channels, int):
            axis = self.channels - pixels.dim()
        else:
            sides, axis = ((number, -1), -2) if self.channels == "first" else ((-1, number), -1)
            split = pixels.reshape(*pixels.shape[:-1], *sides)
        shape = list(split.shape)
        if self.repeats > 1:
            split, axis = split.unsqueeze(-2), axis - 1
            shape.insert(-1, self.repeats)
        values = torch.empty(shape, dtype=self.dtype or torch.float32, device=pixels.device)
        # Numbers by channel instead of tensors of them: a copy of these to a GPU would wait for it.
        pairs = list(zip(self.mean, self.std, strict=True))
        each = number if len(set(pairs)) == 1 else 1
        for channel, (mean, std) in enumerate(pairs[::each]):
            scaled = split.narrow(axis, channel, each).to(torch.float32).sub_(mean).div_(std)
            values.narrow(axis, channel, each).copy_(scaled)  # repeats them
        if isinstance(self.channels, int):
            return values if mask is None else values.masked_fill_(mask.unsqueeze(axis) == 0, 0)
        values = values.flatten(pixels.dim() - 1)
        return values if mask is None else values.masked_fill_(mask.unsqueeze(-1) == 0, 0)


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """Everything about a batch that is no input of the model; plain values, and tensors on the CPU.

    Attributes:
        epoch: of the loader.
        step: the micro-step of the epoch's current segment, from 0.
        samples: indices into ``loader.dataset`` of the samples in the batch.
        lost: indices of the samples that failed; each has a ledger entry.
        delivered: for each planned sample, in order, whether it is in the batch.
        tokens: of the samples, without padding and placeholders.
        slots: all tokens of the batch.
        supervised: tokens with a label, after the shift.
        placeholder: whether a placeholder sample was added.
        seconds: time to build the batch in its process: reading, encoding, collating, pipeline chunks.
        document_keys: for each row of the batch the key of each document; ``""`` for a placeholder.
        document_roles: likewise what each document is in preference data: ``"chosen"`` and ``"rejected"`` of
            a pair, which are next to each other, or ``"good"`` and ``"bad"``; ``""`` for any other.
        document_lengths: for each row the tokens of each document, after the shift.
        document_ids: [B, S], the number of each token's document in its row from 1, 0 for padding; None if
            every row holds one document.
        num_images: images of each row; ``num_videos`` and ``num_audios`` likewise.
        loss_weights: [B, S], the factor of each token for the loss, shifted like the labels, 1 for padding
            and placeholders; None if all are 1.
        labels: [B, S], shifted, of preference data, which has no key ``labels``: a model would train on
            rejected answers too.
        pixels: the tensors of the batch whose pixels are bytes, and how :func:`expand_pixels` converts them.
    """

    epoch: int
    step: int
    samples: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    delivered: tuple[bool, ...] = ()
    tokens: int = 0
    slots: int = 0
    supervised: int = 0
    placeholder: bool = False
    seconds: float = 0.0
    document_keys: tuple[tuple[str, ...], ...] = ()
    document_lengths: tuple[tuple[int, ...], ...] = ()
    document_ids: torch.Tensor | None = field(default=None, compare=False)
    num_images: tuple[int, ...] = ()
    num_videos: tuple[int, ...] = ()
    num_audios: tuple[int, ...] = ()
    loss_weights: torch.Tensor | None = field(default=None, compare=False)
    document_roles: tuple[tuple[DocumentRole, ...], ...] = ()
    labels: torch.Tensor | None = field(default=None, compare=False)
    pixels: Mapping[str, PixelFormat] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the samples in the batch, in the order of ``samples``."""
        keys = [key for row in self.document_keys for key in row]
        roles = [role for row in self.document_roles for role in row] or [""] * len(keys)
        # A pair is one sample of two documents.
        return tuple(key for key, role in zip(keys, roles, strict=True) if key and role != "rejected")

    @property
    def is_padding(self) -> bool:
        """Whether the batch has no sample, only placeholders, to keep the ranks in step."""
        return not self.samples

    @property
    def padding(self) -> float:
        """Share of tokens that belong to no sample."""
        return 1 - self.tokens / self.slots if self.slots else 0.0


class Batch(dict[str, Any]):
    """Model inputs: ``model(**batch).loss`` is the mean loss over the batch's supervised tokens.

    That mean has no weights: if ``info`` has ``loss_weights``, use
    :func:`~packhorse.integrations.loss.token_loss`.
    ``labels`` are shifted already; transformers takes the same tensor as ``shift_labels``. Everything else is
    in :attr:`info`. Otherwise a plain dict; ``copy``, ``|``, pickling, pinning, :meth:`to` and the device
    transfer of Accelerate and Lightning keep ``info``.

    Args:
        inputs: of the model.
        info: about the batch.
    """

    def __init__(
        self, inputs: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), info: BatchInfo | None = None
    ) -> None:
        super().__init__(inputs)
        self._info = info

    @property
    def info(self) -> BatchInfo:
        """Everything about the batch that is no model input.

        Raises:
            AttributeError: the batch was created from a plain mapping.
        """
        if self._info is None:
            raise AttributeError(
                "this Batch was created from a plain mapping and has no info: use Batch(inputs, batch.info)"
            )
        return self._info

    def copy(self) -> Batch:
        """Return a shallow copy with the same ``info``."""
        return copy.copy(self)

    def __or__(self, other: Any) -> Any:
        """``batch | {…}``: a batch with the ``info`` of this one, else of ``other``."""
        if not isinstance(other, dict):
            return NotImplemented
        # An attribute of Batch; another dict has none.
        return Batch({**self, **other}, self._info or getattr(other, "_info", None))

    def __ror__(self, other: Any) -> Any:
        """``{…} | batch``: a batch in which these inputs replace the others."""
        return Batch({**other, **self}, self._info) if isinstance(other, dict) else NotImplemented

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        """Move tensors and masks to a device and expand pixels there; Accelerate and Lightning call this."""
        moved: Batch = to_device(self, device, non_blocking)
        return moved


def _recount(batch: Batch, moved: Mapping[str, Any]) -> BatchInfo | None:
    """Return the info of a batch that moves from the CPU, where its labels may have been changed.

    Afterwards they could not be counted without waiting for the device.
    """
    info, labels = batch._info, batch.get("labels")
    if info is None or labels is None or labels.device.type != "cpu" or moved["labels"].device.type == "cpu":
        return info
    supervised = int((labels != IGNORE_INDEX).sum())
    return info if supervised == info.supervised else replace(info, supervised=supervised)


def to_device(value: Any, device: Any, non_blocking: bool | None = None) -> Any:
    """Move a batch, or a value of one, to a device: tensors, masks by layer type, block masks.

    Pixels of a batch that are bytes become what the processor returns, there (:func:`expand_pixels`).

    Args:
        value: the batch or value; a :class:`Batch` keeps its ``info``, whose tensors stay on the CPU.
        device: as for ``torch.Tensor.to``.
        non_blocking: likewise; None is True for copies from the CPU to a device that runs its work in order.
    """
    import torch

    if isinstance(value, Mapping):
        moved = {key: to_device(held, device, non_blocking) for key, held in value.items()}
        if not isinstance(value, Batch):
            return moved
        if "shift_labels" in value and value["shift_labels"] is value.get("labels"):
            moved["shift_labels"] = moved["labels"]
        return expand_pixels(Batch(moved, _recount(value, moved)))
    if isinstance(value, torch.Tensor):  # block masks do not take non_blocking
        if non_blocking is None:
            non_blocking = value.device.type == "cpu" and torch.device(device).type not in {"cpu", "mps"}
        return value.to(device, non_blocking=non_blocking)
    return value.to(device) if hasattr(value, "to") else value


def expand_tensors(batch: Mapping[str, Any], formats: Mapping[str, PixelFormat]) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch whose pixels are bytes, as the processor returns them."""
    import torch

    # A tensor that was removed, or replaced by one of floats, has no bytes.
    left = {key: one for key, one in formats.items() if key in batch and batch[key].dtype == torch.uint8}
    masks = {key: None if one.mask is None else batch[one.mask] for key, one in left.items()}
    return {key: one.expand(batch[key], masks[key]) for key, one in left.items()}


def expand_pixels(batch: Batch) -> Batch:
    """Return a batch whose pixels are what the processor returns, in the model's dtype, not bytes.

    A batch without bytes is returned itself.
    """
    if batch._info is None or not batch._info.pixels:
        return batch
    expanded = expand_tensors(batch, batch._info.pixels)
    return Batch({**batch, **expanded}, replace(batch._info, pixels={}))
