"""Vision-language models of transformers as stages of ``torch.distributed.pipelining``.

:func:`split_vlm` cuts a Qwen-VL model into stage modules. :class:`VlmPipeline` runs batches of
:func:`packhorse.pp_media.wrap_vlm_collate_for_pp` through them: each microbatch's forward on stage 0 takes
its own media, and every stage gets its rows of positions and masks. Loss and gradients are those of the whole
model on the whole batch.
"""

from packhorse.integrations.pipelining.microbatches import PipelineInputs, pipeline_inputs
from packhorse.integrations.pipelining.pipeline import VlmPipeline
from packhorse.integrations.pipelining.stages import SPLITTABLE, VlmStage, split_vlm

__all__ = [
    "SPLITTABLE",
    "PipelineInputs",
    "VlmPipeline",
    "VlmStage",
    "pipeline_inputs",
    "split_vlm",
]
