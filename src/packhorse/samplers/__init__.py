"""Samplers: in which order a rank goes through its rows."""

from packhorse.samplers.length_grouped import LengthGroupedSampler, logger
from packhorse.tokens.resize import resize_image as _smart_resize_image
from packhorse.tokens.resize import resize_video as _smart_resize_video

__all__ = ["LengthGroupedSampler", "_smart_resize_image", "_smart_resize_video", "logger"]
