"""Dataset configurations: the arguments of a dataset as plain data, and ``build()``, which makes it.

Recipes name these classes where they want settings that can be checked and stored before anything is loaded.
Each field is the argument of the same name of the function or class that ``build()`` calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from packhorse.formats import recipes
from packhorse.formats.meta import make_meta_dataset
from packhorse.formats.meta_file import Meta
from packhorse.formats.summary import MetaExamples

if TYPE_CHECKING:
    from datasets import Dataset

    from packhorse.encode.tokenized import PreTokenizedDatasetWrapper


@dataclass(slots=True)
class RdrDatasetConfig:
    """Settings of :func:`~packhorse.datasets.make_rdr_dataset`."""

    path_or_dataset: str = "quintend/rdr-items"
    split: str = "train"

    def build(self) -> Dataset:
        """Load the dataset."""
        return recipes.make_rdr_dataset(self.path_or_dataset, self.split)


@dataclass(slots=True)
class CordV2DatasetConfig:
    """Settings of :func:`~packhorse.datasets.make_cord_v2_dataset`."""

    path_or_dataset: str = "naver-clova-ix/cord-v2"
    split: str = "train"
    limit_dataset_samples: int | None = None

    def build(self) -> Dataset:
        """Load the dataset."""
        return recipes.make_cord_v2_dataset(
            self.path_or_dataset, self.split, limit_dataset_samples=self.limit_dataset_samples
        )


@dataclass(slots=True)
class MedPixDatasetConfig:
    """Settings of :func:`~packhorse.datasets.make_medpix_dataset`."""

    path_or_dataset: str = "medpix-dataset/medpix-dataset"
    split: str = "train"

    def build(self) -> Dataset:
        """Load the dataset."""
        return recipes.make_medpix_dataset(self.path_or_dataset, self.split)


@dataclass(slots=True)
class UnimmChatDatasetConfig:
    """Settings of :func:`~packhorse.datasets.make_unimm_chat_dataset`."""

    path_or_dataset: str = "Yirany/UniMM-Chat"
    split: str = "train"

    def build(self) -> Dataset:
        """Load the dataset."""
        return recipes.make_unimm_chat_dataset(self.path_or_dataset, self.split)


@dataclass(slots=True)
class LlavaOnevisionDatasetConfig:
    """Settings of :func:`~packhorse.datasets.make_llava_onevision_dataset`."""

    path_or_dataset: str = "liuhaotian/LLaVA-Instruct-150K"
    split: str = "train"
    media_dir: str | None = None

    def build(self) -> Dataset:
        """Load the dataset."""
        return recipes.make_llava_onevision_dataset(
            self.path_or_dataset, self.split, media_dir=self.media_dir
        )


@dataclass(slots=True)
class ShopifyProductCatalogueDatasetConfig:
    """Settings of :func:`~packhorse.datasets.make_shopify_product_catalogue_dataset`."""

    path_or_dataset: str = "Shopify/product-catalogue"
    split: str = "train"
    limit_dataset_samples: int | None = None

    def build(self) -> Dataset:
        """Load the dataset."""
        return recipes.make_shopify_product_catalogue_dataset(
            self.path_or_dataset, self.split, self.limit_dataset_samples
        )


@dataclass(slots=True)
class Tulu3MagicoderTextMixDatasetConfig:
    """Settings of :func:`~packhorse.datasets.make_tulu3_magicoder_text_mix_dataset`."""

    tulu_split: str = "train"
    magicoder_split: str = "train"
    seed: int = 42
    max_turns: int = 16
    limit_total: int | None = None
    tulu_path: str = recipes.TULU3
    magicoder_path: str = recipes.MAGICODER

    def build(self) -> Dataset:
        """Load and interleave both datasets."""
        return recipes.make_tulu3_magicoder_text_mix_dataset(
            self.tulu_split,
            self.magicoder_split,
            self.seed,
            self.max_turns,
            self.limit_total,
            tulu_path=self.tulu_path,
            magicoder_path=self.magicoder_path,
        )


@dataclass(slots=True)
class MetaDatasetConfig:
    """Settings of :func:`~packhorse.datasets.make_meta_dataset`."""

    path_or_dataset: Meta
    dataset_names: Sequence[str] | None = None
    split: str = "train"
    shard_data: bool = False

    builds_with_data_parallel_rank: ClassVar[bool] = True
    """``build`` takes the data-parallel rank, which is not the global one with tensor, context or pipeline
    parallelism."""

    def build(self, *, rank: int | None = None, world_size: int | None = None) -> MetaExamples:
        """Load the datasets.

        Args:
            rank: the data-parallel rank of this process; None (both) asks the process group or the
                environment. Without ``shard_data`` every rank loads all rows, and neither is used.
            world_size: the data-parallel size.
        """
        return make_meta_dataset(
            self.path_or_dataset,
            self.dataset_names,
            self.split,
            self.shard_data,
            rank=rank if self.shard_data else None,
            world_size=world_size if self.shard_data else None,
        )


@dataclass(slots=True)
class PreTokenizedDatasetWrapperConfig:
    """Settings of :class:`~packhorse.datasets.PreTokenizedDatasetWrapper`."""

    max_length: int | None = None
    max_retries: int = 10
    truncate: bool = False
    inject_fake_images: bool = True
    post_tokenize_hook: Callable[[dict[str, Any], Any], dict[str, Any]] | None = None

    def build(self, dataset: Any, processor: Any) -> PreTokenizedDatasetWrapper:
        """Wrap a dataset of examples; nothing is encoded yet."""
        from packhorse.encode.tokenized import PreTokenizedDatasetWrapper

        return PreTokenizedDatasetWrapper(
            dataset,
            processor,
            self.max_length,
            self.max_retries,
            truncate=self.truncate,
            inject_fake_images=self.inject_fake_images,
            post_tokenize_hook=self.post_tokenize_hook,
        )
