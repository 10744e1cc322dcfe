"""QLoRA as the LoRA page describes it: a model in 4 bits, with trained adapters, on packs with images."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import packhorse
from contract.processors import processor
from contract.tiny_models import tiny_model
from contract.torchvision_ops import make_torchvision_importable

make_torchvision_importable()

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "lora.md"


def block(fence: str) -> str:
    """The first block of the page under a fence."""
    return re.findall(rf"^```{re.escape(fence)}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0]


@pytest.mark.needs_bitsandbytes
def test_the_script_of_the_page_trains_adapters_of_a_model_in_4_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_model("qwen2_5_vl").save_pretrained("checkpoint")
    processor("qwen2_5_vl").save_pretrained("checkpoint")
    exec(block("python"), {})  # writes train.jsonl
    script = block('python title="qlora.py"').replace("Qwen/Qwen2.5-VL-3B-Instruct", "checkpoint")
    found: dict[str, Any] = {}
    exec(script, found)

    from bitsandbytes.nn import Linear4bit

    model, trainer = found["model"], found["trainer"]
    quantized = {name for name, module in model.named_modules() if isinstance(module, Linear4bit)}
    assert quantized
    assert all("language_model" in name for name in quantized)
    assert trainer.loader.epoch_stats.delivered == 24
    adapters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert all("lora_" in name for name in adapters)
    assert any(weight.abs().max() > 0 for name, weight in adapters.items() if "lora_B" in name)
    assert Path("qlora-adapter/adapter_model.safetensors").exists()

    # The adapter on the model in 4 bits has the loss that training ended with.
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    base = AutoModelForImageTextToText.from_pretrained(
        "checkpoint", quantization_config=found["quantization"]
    )
    packhorse.prepare(base)
    loaded = PeftModel.from_pretrained(base, "qlora-adapter")
    losses = [packhorse.evaluate(made, trainer.loader).loss for made in (model, loaded)]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)  # computed in bfloat16
    assert torch.isfinite(torch.tensor(losses)).all()
