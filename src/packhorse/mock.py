"""Mock data under its documented names; the code lives in :mod:`packhorse.formats.mock_data`."""

from packhorse.formats.mock_data import MockVlmDatasetConfig, build_mock_vlm_dataset, logger

__all__ = ["MockVlmDatasetConfig", "build_mock_vlm_dataset", "logger"]
