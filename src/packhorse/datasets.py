"""Datasets under their documented names.

The code lives in :mod:`packhorse.formats`, :mod:`packhorse.rows` and :mod:`packhorse.encode`. The wrappers
are torch datasets and load on first use, so importing this does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from packhorse.encode.dataset_configs import (
    CordV2DatasetConfig,
    LlavaOnevisionDatasetConfig,
    MedPixDatasetConfig,
    MetaDatasetConfig,
    PreTokenizedDatasetWrapperConfig,
    RdrDatasetConfig,
    ShopifyProductCatalogueDatasetConfig,
    Tulu3MagicoderTextMixDatasetConfig,
    UnimmChatDatasetConfig,
)
from packhorse.formats.convert import convert_sharegpt_to_conversation
from packhorse.formats.convert import convert_sharegpt_to_conversation as _convert_sharegpt_to_conversation
from packhorse.formats.meta import MetaDataset, make_meta_dataset, open_meta_dataset
from packhorse.formats.recipes import (
    json2token,
    make_cord_v2_dataset,
    make_cv17_dataset,
    make_llava_onevision_dataset,
    make_medpix_dataset,
    make_rdr_dataset,
    make_shopify_product_catalogue_dataset,
    make_tulu3_dataset,
    make_tulu3_magicoder_text_mix_dataset,
    make_unimm_chat_dataset,
)
from packhorse.formats.summary import _ExamplesWithStats, logger
from packhorse.formats.summary import collect_sample_stats as _collect_sample_stats
from packhorse.formats.summary import log_dataset_loading_summary as _log_dataset_loading_summary
from packhorse.rows.row_files import RowFile, open_rows
from packhorse.rows.row_files import load_json_or_jsonl as _load_json_or_jsonl
from packhorse.rows.row_files import load_jsonl_for_rank as _load_jsonl_for_rank

if TYPE_CHECKING:
    from packhorse.encode.robust import RobustDatasetWrapper, make_robust_collate
    from packhorse.encode.tokenized import PreTokenizedDatasetWrapper


__all__ = [
    "CordV2DatasetConfig",
    "LlavaOnevisionDatasetConfig",
    "MedPixDatasetConfig",
    "MetaDataset",
    "MetaDatasetConfig",
    "PreTokenizedDatasetWrapper",
    "PreTokenizedDatasetWrapperConfig",
    "RdrDatasetConfig",
    "RobustDatasetWrapper",
    "RowFile",
    "ShopifyProductCatalogueDatasetConfig",
    "Tulu3MagicoderTextMixDatasetConfig",
    "UnimmChatDatasetConfig",
    "_ExamplesWithStats",
    "_collect_sample_stats",
    "_convert_sharegpt_to_conversation",
    "_load_json_or_jsonl",
    "_load_jsonl_for_rank",
    "_log_dataset_loading_summary",
    "convert_sharegpt_to_conversation",
    "json2token",
    "logger",
    "make_cord_v2_dataset",
    "make_cv17_dataset",
    "make_llava_onevision_dataset",
    "make_medpix_dataset",
    "make_meta_dataset",
    "make_rdr_dataset",
    "make_robust_collate",
    "make_shopify_product_catalogue_dataset",
    "make_tulu3_dataset",
    "make_tulu3_magicoder_text_mix_dataset",
    "make_unimm_chat_dataset",
    "open_meta_dataset",
    "open_rows",
]

_NEED_TORCH = {
    "PreTokenizedDatasetWrapper": "encode.tokenized",
    "RobustDatasetWrapper": "encode.robust",
    "make_robust_collate": "encode.robust",
}


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        return getattr(import_module(f"packhorse.{_NEED_TORCH[name]}"), name)
    raise AttributeError(f"module 'packhorse.datasets' has no attribute {name!r}")
