"""Samplers under their documented names; the code lives in :mod:`packhorse.plan`."""

from packhorse.media.images import resize_image as _smart_resize_image
from packhorse.media.images import resize_video as _smart_resize_video
from packhorse.plan.length_grouped import LengthGroupedSampler, logger

__all__ = ["LengthGroupedSampler", "_smart_resize_image", "_smart_resize_video", "logger"]
