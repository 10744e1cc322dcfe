"""The Trainer of transformers, fed by a loader; alone or under torchrun.

python examples/train_trainer.py /tmp/run
torchrun --nproc-per-node 2 examples/train_trainer.py /tmp/run --resume
"""

from __future__ import annotations

from typing import Any

import torch
from tiny import arguments, demo_loader, example_processor, tiny_model
from transformers import Trainer, TrainerCallback, TrainingArguments

from packhorse.integrations.transformers import TrainFromLoader, prepare


class PackedTrainer(TrainFromLoader, Trainer):
    """All there is to it."""


class Observe(TrainerCallback):
    """Notes each step, prints how feeding goes, and can stop the run as if it were interrupted."""

    def __init__(self, loader: Any, stop_after: int | None) -> None:
        self.loader, self.stop_after = loader, stop_after

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """After each step, as ``logging_steps`` is 1."""
        if logs and "loss" in logs:
            self.loader.record_step(state.global_step, logs["loss"])
            if state.is_world_process_zero:
                line = f"step {state.global_step} loss {logs['loss']:.4f} · {self.loader.metrics.summary()}"
                print(line)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An interruption."""
        control.should_training_stop |= state.global_step == self.stop_after


def main(words: list[str] | None = None) -> Any:
    """Read the options, build everything, train."""
    options = arguments(__doc__).parse_args(words)
    training = TrainingArguments(
        str(options.folder),
        num_train_epochs=options.epochs,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=options.save_every,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),  # required for several processes on CPUs
    )
    processor = example_processor(options)
    model = tiny_model(processor)
    prepare(model)
    loader = demo_loader(options, processor, model)
    observe = Observe(loader, options.stop_after)
    trainer = PackedTrainer(model, training, loader=loader, callbacks=[observe])
    trainer.train(resume_from_checkpoint=options.resume)
    return trainer


if __name__ == "__main__":
    main()
