"""Dataset configurations: the arguments of a dataset as plain data, and ``build()``, which loads it.

Each field is the argument of the same name of the function or class that ``build()`` calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from packhorse.formats import recipes
from packhorse.formats.meta import Meta, make_meta_dataset
from packhorse.formats.summary import MetaExamples
from packhorse.types import Rows

if TYPE_CHECKING:
    from datasets import Dataset

    from packhorse.chat import Processor
    from packhorse.encode.tokenized import PreTokenizedDatasetWrapper


def _settings(config: Any) -> dict[str, Any]:
    """Return the fields of a config; ``dataclasses.asdict`` would copy hooks and datasets."""
    return {field.name: getattr(config, field.name) for field in fields(config)}


class _RecipeConfig:
    """Settings of a recipe of :mod:`packhorse.formats.recipes`."""

    __slots__ = ()
    recipe: ClassVar[Callable[..., Any]]

    def build(self) -> Dataset:
        """Load the dataset."""
        dataset: Dataset = type(self).recipe(**_settings(self))
        return dataset


@dataclass(slots=True)
class RdrDatasetConfig(_RecipeConfig):
    """Settings of :func:`~packhorse.datasets.make_rdr_dataset`."""

    recipe = staticmethod(recipes.make_rdr_dataset)
    path_or_dataset: str = "quintend/rdr-items"
    split: str = "train"


@dataclass(slots=True)
class CordV2DatasetConfig(_RecipeConfig):
    """Settings of :func:`~packhorse.datasets.make_cord_v2_dataset`."""

    recipe = staticmethod(recipes.make_cord_v2_dataset)
    path_or_dataset: str = "naver-clova-ix/cord-v2"
    split: str = "train"
    limit_dataset_samples: int | None = None


@dataclass(slots=True)
class MedPixDatasetConfig(_RecipeConfig):
    """Settings of :func:`~packhorse.datasets.make_medpix_dataset`."""

    recipe = staticmethod(recipes.make_medpix_dataset)
    path_or_dataset: str = "medpix-dataset/medpix-dataset"
    split: str = "train"


@dataclass(slots=True)
class UnimmChatDatasetConfig(_RecipeConfig):
    """Settings of :func:`~packhorse.datasets.make_unimm_chat_dataset`."""

    recipe = staticmethod(recipes.make_unimm_chat_dataset)
    path_or_dataset: str = "Yirany/UniMM-Chat"
    split: str = "train"


@dataclass(slots=True)
class LlavaOnevisionDatasetConfig(_RecipeConfig):
    """Settings of :func:`~packhorse.datasets.make_llava_onevision_dataset`."""

    recipe = staticmethod(recipes.make_llava_onevision_dataset)
    path_or_dataset: str = "liuhaotian/LLaVA-Instruct-150K"
    split: str = "train"
    media_dir: str | None = None


@dataclass(slots=True)
class ShopifyProductCatalogueDatasetConfig(_RecipeConfig):
    """Settings of :func:`~packhorse.datasets.make_shopify_product_catalogue_dataset`."""

    recipe = staticmethod(recipes.make_shopify_product_catalogue_dataset)
    path_or_dataset: str = "Shopify/product-catalogue"
    split: str = "train"
    limit_dataset_samples: int | None = None


@dataclass(slots=True)
class Tulu3MagicoderTextMixDatasetConfig(_RecipeConfig):
    """Settings of :func:`~packhorse.datasets.make_tulu3_magicoder_text_mix_dataset`."""

    recipe = staticmethod(recipes.make_tulu3_magicoder_text_mix_dataset)
    tulu_split: str = "train"
    magicoder_split: str = "train"
    seed: int = 42
    max_turns: int = 16
    limit_total: int | None = None
    tulu_path: str = recipes.TULU3
    magicoder_path: str = recipes.MAGICODER


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
            rank: the data-parallel rank of this process; None (for both) detects it. Not used without
                ``shard_data``.
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

    def build(self, dataset: Rows, processor: Processor) -> PreTokenizedDatasetWrapper:
        """Wrap a dataset of examples; nothing is encoded yet."""
        from packhorse.encode.tokenized import PreTokenizedDatasetWrapper

        return PreTokenizedDatasetWrapper(dataset, processor, **_settings(self))
