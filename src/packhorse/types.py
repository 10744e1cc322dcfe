"""The values that pass between stages: plain, frozen, and cheap to import.

Nothing here reads a file, imports torch or knows a model. Everything above imports from here, so a field
means the same thing in every stage.
"""

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
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

# Names for annotations only, so that this module does not import numpy.
Integers: TypeAlias = "npt.NDArray[np.int64]"
Floats: TypeAlias = "npt.NDArray[np.float64]"
Flags: TypeAlias = "npt.NDArray[np.bool_]"


class Rows(Protocol):
    """Rows or samples by index: a dataset with a length, or a list."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


MediaKind = Literal["image", "video", "audio"]
MEDIA_KINDS: tuple[MediaKind, ...] = get_args(MediaKind)


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


Action = Literal["dropped", "replaced", "cut", "repaired", "kept"]
"""What became of the sample: ``dropped`` and ``replaced`` were not delivered; ``cut`` was delivered without
a part of it; ``repaired`` was delivered changed; ``kept`` was delivered as it is, with a remark."""

Stage = Literal["select", "read", "convert", "media", "encode", "collate", "plan"]
"""The stage of the flow at which the loss was noticed."""

Reason = Literal[
    "not_sampled",  # sample_ratio below 1 did not draw the row
    "left_over",  # equal shards: the rows that do not divide by the world size
    "malformed_row",  # not JSON, not UTF-8, not an object
    "row_too_large",  # more bytes, or more characters of text, than a row may have
    "wrong_format",  # an object, but not a conversation under the declared columns and tags
    "empty_conversation",
    "no_assistant_turn",
    "unknown_role",
    "surplus_placeholder",  # more <image> in the text than images in the row
    "surplus_media",  # more images in the row than <image> in the text
    "outside_media_dir",
    "missing_media",
    "unreachable_media",  # no permission or no answer: it may be there; the next run asks again
    "broken_media",
    "media_too_large",
    "unreadable_file",  # a data file of the mixture cannot be opened
    "extreme_aspect_ratio",  # an image that the processor refuses
    "special_token_in_text",  # a text holds a token that only a template may write
    "duplicate_conversation",  # the same conversation was seen before
    "same_file",  # two datasets of one mixture read the same file
    "sample_failed",  # a dataset raised for this sample; the detail names the exception
    "collate_failed",
    "too_long",  # more tokens than max_length
    "over_limit",  # more of something else than a pack may hold (visual tokens, media)
    "empty_sample",  # no token at all
    "pack_full",  # longer than it was estimated: no room for it in its pack or those beside it
    "truncated",  # cut to max_length
    "media_mismatch",  # placeholders, media tokens and media of a sample do not agree
    "nothing_supervised",  # no token of the sample is supervised
]


# Addresses may be inside JSON, where writers escape "/" as "\/" and "&" as "\u0026", and that inside a repr.
_ADDRESS = re.compile(r":\\{0,4}/\\{0,4}/")
_USER_AND_PASSWORD = re.compile(r"(:\\{0,4}/\\{0,4}/)[^/?#\s]*@")
# A name holds no delimiter, so each character is looked at once: rows may hold megabytes of anything.
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
    """A text with the passwords, tokens and signatures of the addresses in it replaced by ``***``.

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
    """Whether the value of a parameter of an address is to be masked."""
    words = [word.lower() for word in _WORD.findall(name)]
    return (
        name.lower() in _SECRET_NAMES
        or any(word in _SECRET_WORDS or word.endswith(_SECRET_ENDS) for word in words)
        or any(pair in _SECRET_PAIRS for pair in pairwise(words))
    )


@dataclass(frozen=True, slots=True)
class World:
    """Who shares the work: this process is ``rank`` of ``size`` data-parallel processes.

    It is passed in, never looked up inside a stage, so every cluster shape can be tested in one process.
    ``World.detect()`` is for the edge of a program.
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
        """This process's place: ``torch.distributed`` if initialised, else torchrun's variables, else alone.

        All processes count as data-parallel ranks; where some share a model, use :meth:`from_mesh`.

        torch is not imported for this: a process that has not imported it has no process group.
        """
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        return cls()

    @classmethod
    def from_mesh(cls, mesh: Any, dims: str | Sequence[str] | None = None) -> World:
        """This process's place along the data-parallel dimensions of a mesh.

        Ranks that differ in the other dimensions only (tensor, context or pipeline parallelism) have the same
        place, and so the same rows.

        Args:
            mesh: a ``torch.distributed.device_mesh.DeviceMesh`` with named dimensions.
            dims: the name of the data-parallel dimension, or the names of several, the slowest first, as
                ``("dp_replicate", "dp_shard")``; None for all dimensions, if ``mesh`` is a part of another.

        Raises:
            ValueError: the mesh has no names, or ``dims`` names no dimension or one of them twice.
        """
        known = mesh.mesh_dim_names
        if not known:
            raise ValueError(f"{mesh} has no named dimensions: make it with mesh_dim_names=('dp', …)")
        names = known if dims is None else (dims,) if isinstance(dims, str) else tuple(dims)
        if not names or len(set(names)) < len(names):
            raise ValueError(f"{dims=}: expected different dimensions of the mesh, which has {known}")
        rank, size = 0, 1
        for part in (mesh[name] for name in names):
            rank, size = rank * part.size() + part.get_local_rank(), size * part.size()
        return cls(rank, size)


@dataclass(frozen=True, slots=True)
class Drop:
    """One entry of the ledger: what happened to one sample (or one media item of it), where and why.

    ``detail`` holds no secrets of addresses: see :func:`mask_secrets`.

    ``key`` names the row, unique over a mixture: ``coco/812`` is row 812 (from 0) of dataset ``coco``;
    ``coco/812#1`` is its second copy where ``sample_ratio`` is above 1.
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
    def from_json(cls, entry: Mapping[str, Any]) -> Drop:
        """Read an entry of a ledger or step file; the first files had ``left_out`` for ``dropped``.

        Raises:
            KeyError: a field is missing.
        """
        values = {name: entry[name] for name in cls.__dataclass_fields__}
        if values["action"] == "left_out":
            values["action"] = "dropped"
        return cls(**values)


@dataclass(frozen=True, slots=True)
class MediaRef:
    """Where one image, video or audio clip comes from; never its pixels.

    ``source`` is what the row holds: a path, an address (``s3://…``), ``db.lmdb::key``, encoded bytes, an
    object that is already decoded (a PIL image, an array), or for a video a list of frame paths. ``options``
    are the row's own wishes beside it (``fps``, ``frame_indices``, …), passed on unread.
    """

    kind: MediaKind
    source: Any
    options: Mapping[str, Any] = field(default_factory=dict)


Owner = Literal["sample", "item", "rows"]
"""Who owns axis 0 of a media tensor: each *sample* has one entry, each media *item* has one, or each item has
several *rows* (patches, tiles, frames)."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """What one tensor of a family's processor is about.

    Args:
        kinds: the media it belongs to; where several share it, they come in the order of the text.
        owner: who owns axis 0.
        rows_from: for ``"rows"``: the key of the grid whose entry, multiplied out, is an item's number of
            rows; None where no tensor tells it and the family counts itself.
        ragged: other axes may differ from sample to sample; they are padded with zeros to the largest.
    """

    kinds: tuple[MediaKind, ...]
    owner: Owner
    rows_from: str | None = None
    ragged: bool = False


MediaLayout = Mapping[str, TensorLayout]
"""Every media tensor that a family's processor returns, by key. Packing, collating and pipeline chunking all
read this one table."""


@dataclass(frozen=True, slots=True)
class TokenCount:
    """How long one sample is when it is encoded, and what it is made of.

    Attributes:
        text: all tokens that do not stand for the content of a media item: what the template writes, brackets
            around media, timestamps, row and column tokens included.
        image: tokens that stand for the content of images; ``video`` and ``audio`` likewise.
        supervised: tokens that are supervised, before the labels are shifted.
        images: how many images there are; ``videos`` and ``audios`` likewise.
        patches: positions that the vision encoder attends over.
        exact: whether this is what the processor does; otherwise
        off_by: the total may be wrong by so many tokens, up or down; -1 where nobody can tell.
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

    @property
    def total(self) -> int:
        """The length of the sample's ``input_ids``."""
        return self.text + self.image + self.video + self.audio


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of text inside a message."""

    text: str


Part = TextPart | MediaRef


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: who speaks, and the parts in order.

    ``extras`` are the turn's other fields (``tool_calls``, ``reasoning_content``, …), passed on unread to the
    chat template, which may write them.
    """

    role: str
    parts: tuple[Part, ...]
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """All text of the turn, joined without separators."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))


@dataclass(frozen=True)
class Conversation:
    """One sample: its turns, and the key that names it in logs and in the ledger."""

    messages: tuple[Message, ...]
    key: str = ""

    @cached_property
    def media(self) -> tuple[MediaRef, ...]:
        """All media in the order in which the text mentions them."""
        return tuple(p for m in self.messages for p in m.parts if isinstance(p, MediaRef))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _TokenTensors:
    """What samples and packs share: tensors with one entry per token along their last axis, and counts.

    Attributes:
        tokens: ``input_ids``, ``attention_mask`` and further tensors per token [S], by key.
        labels: [S]; None where nothing is supervised yet.
        position_ids: [S], or [3, S] with mRoPE; None leaves positions to the collate function.
        loss_weights: [S]; None weighs all supervised tokens alike.
        num_items: how many media items there are of each kind.
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
        """Every tensor per token by its key, labels and positions included."""
        others = {"labels": self.labels, "position_ids": self.position_ids}
        return {**self.tokens, **{key: value for key, value in others.items() if value is not None}}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sample(_TokenTensors):
    """One encoded sample.

    Attributes:
        media: the media tensors by key, as the family's :data:`MediaLayout` declares them.
        key: names the row (``coco/812``); empty if unknown.
    """

    media: Mapping[str, torch.Tensor] = field(default_factory=dict)
    key: str = ""

    def with_per_token(self, tensors: Mapping[str, torch.Tensor]) -> Sample:
        """The sample with these tensors in place of its :attr:`per_token`."""
        tokens = {key: value for key, value in tensors.items() if key not in ("labels", "position_ids")}
        labels, positions = tensors.get("labels"), tensors.get("position_ids")
        return replace(self, tokens=tokens, labels=labels, position_ids=positions)

    def cut(self, kept: slice) -> Sample:
        """The sample with these tokens alone; media stay."""
        return self.with_per_token({key: value[..., kept] for key, value in self.per_token.items()})

    def to_dict(self) -> dict[str, torch.Tensor]:
        """The documented dict; ``n_images`` and ``n_videos`` are in it if there are media."""
        import torch

        kinds: tuple[MediaKind, ...] = ("image", "video") if any(self.num_items.values()) else ()
        counts = {f"n_{kind}s": torch.tensor(self.num_items.get(kind, 0)) for kind in kinds}
        return {**self.per_token, **self.media, **counts}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedSample(_TokenTensors):
    """Several samples joined into one sequence; ``attention_mask`` holds document numbers from 1.

    Attributes:
        media: the tensors to join along axis 0, by key; nothing is copied before the batch is made.
        seq_lens: tokens of each document.
        seq_lens_padded: the same with what fills it up to ``alignment``.
        items_per_document: images and videos of each document; None if unknown.
        alignment: each document takes up a multiple of this many tokens.
    """

    media: Mapping[str, Sequence[torch.Tensor]] = field(default_factory=dict)
    seq_lens: Sequence[int] = ()
    seq_lens_padded: Sequence[int] = ()
    items_per_document: Sequence[int] | None = None
    alignment: int = 1


@dataclass(frozen=True, slots=True)
class WorkItem:
    """An order for one batch.

    Attributes:
        epoch: the epoch of the loader.
        step: the micro-step of the epoch's current segment.
        packs: the samples of each pack (in padded batches: one sample each).
        media_mask: the media that any rank has in this step; the batch needs all of them.
    """

    epoch: int
    step: int
    packs: tuple[tuple[int, ...], ...]
    media_mask: MediaMask = MediaMask.NONE

    @property
    def samples(self) -> tuple[int, ...]:
        """All samples, in order."""
        return tuple(index for pack in self.packs for index in pack)


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """What a batch is made of: everything about it that is no input of the model.

    Rows are those of the batch, documents those of a row from left to right. Everything is plain and stays on
    the CPU.

    Attributes:
        epoch: the epoch of the loader.
        step: the micro-step of the epoch's current segment, from 0.
        samples: indices of the samples in the batch, into ``loader.dataset``.
        lost: indices of the samples that failed; each has an entry in the ledger.
        delivered: for each planned sample, in order, whether it is in the batch.
        tokens: tokens of the samples; padding and placeholders are not counted.
        slots: all tokens of the batch.
        supervised: tokens with a label, after the shift.
        placeholder: whether a placeholder sample was added.
        seconds: time it took to build the batch.
        document_keys: for each row the key of each document (``coco/812``); ``""`` for a placeholder.
        document_lengths: for each row the tokens of each document, after the shift.
        document_ids: [B, S], the number of each token's document from 1, and 0 for padding; None if every
            row holds one document.
        num_images: images of each row; ``num_videos`` and ``num_audios`` likewise.
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

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the samples in the batch, in the order of ``samples``."""
        return tuple(key for row in self.document_keys for key in row if key)

    @property
    def is_padding(self) -> bool:
        """Whether the batch holds no sample: it keeps the ranks in step."""
        return not self.samples

    @property
    def padding(self) -> float:
        """Share of the batch's tokens that belong to no sample."""
        return 1 - self.tokens / self.slots if self.slots else 0.0


class Batch(dict[str, Any]):
    """Inputs of a model, so that ``model(**batch).loss`` is the mean loss over the batch's supervised tokens.

    ``labels`` are shifted already; ``shift_labels`` is the same tensor and tells transformers so. What else
    is known about the batch is in :attr:`info`. It is a plain dict otherwise; ``copy``, ``|``, pickling,
    pinning, :meth:`to` and the device transfer of Accelerate and Lightning keep ``info``.

    Args:
        inputs: the model's inputs.
        info: what the batch is made of.
    """

    def __init__(
        self, inputs: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), info: BatchInfo | None = None
    ) -> None:
        super().__init__(inputs)
        self._info = info

    @property
    def info(self) -> BatchInfo:
        """What the batch is made of.

        Raises:
            AttributeError: the batch was rebuilt from a mapping, which has no such information.
        """
        if self._info is None:
            raise AttributeError(
                "this Batch was made from a plain mapping and has no info: pass Batch(inputs, batch.info)"
            )
        return self._info

    def copy(self) -> Batch:
        """A shallow copy with the same ``info``."""
        return copy.copy(self)

    def __or__(self, other: Any) -> Any:
        """``batch | {…}``: a batch with this one's ``info``, or else that of ``other``."""
        if not isinstance(other, dict):
            return NotImplemented
        return Batch({**self, **other}, self._info or getattr(other, "_info", None))

    def __ror__(self, other: Any) -> Any:
        """``{…} | batch``: the same, where this one's inputs replace the others."""
        return Batch({**other, **self}, self._info) if isinstance(other, dict) else NotImplemented

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        """The batch with its tensors and masks on a device; ``info`` stays where it is.

        Accelerate and Lightning call this to move a batch.
        """
        moved: Batch = to_device(self, device, non_blocking)
        return moved


def to_device(value: Any, device: Any, non_blocking: bool | None = None) -> Any:
    """A batch on another device: tensors in it, masks by kind of layer, block masks of flex attention.

    A :class:`Batch` keeps its ``info``.

    Args:
        value: a batch, or what may be in one.
        device: as for ``torch.Tensor.to``.
        non_blocking: the same; None does not wait for copies from the CPU to a device that runs its work in
            order, and waits for all others, which could be read before they are complete.
    """
    import torch

    if isinstance(value, Mapping):
        moved = {key: to_device(held, device, non_blocking) for key, held in value.items()}
        if not isinstance(value, Batch):
            return moved
        if "shift_labels" in value and value["shift_labels"] is value.get("labels"):
            moved["shift_labels"] = moved["labels"]
        return Batch(moved, value._info)
    if isinstance(value, torch.Tensor):  # block masks do not take non_blocking
        if non_blocking is None:
            non_blocking = value.device.type == "cpu" and torch.device(device).type not in {"cpu", "mps"}
        return value.to(device, non_blocking=non_blocking)
    return value.to(device) if hasattr(value, "to") else value
