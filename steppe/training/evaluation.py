"""The loss on text that is never trained on, in the middle of a run and without a trace in it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule

from steppe.core.errors import DataError
from steppe.integrations import transformers as hf
from steppe.runtime import collectives
from steppe.training import tokens
from steppe.training.agreement import together
from steppe.training.data import RowSource
from steppe.training.loop import Trainer


class Evaluation:
    """`data.validation` under the run's own tokenizer: the same rows at every evaluation, in the declared shape.

    Raises: DataError, ConfigError.
    """

    def __init__(self, trainer: Trainer) -> None:
        config, self._trainer = trainer.config, trainer
        if not Path(config.data.validation).exists():
            raise DataError("data.validation", got=f"{config.data.validation}, which is not there",
                            allowed="a file or directory", remedy="check the path")  # fmt: skip
        held_out = config.replace(
            "data", path=config.data.validation, tokenizer=trainer.store.tokenizer_file or config.data.tokenizer
        ).replace("train", micro_batches=config.train.evaluate_batches)
        cache = Path(config.output.dir) / "data"
        store = tokens.prepare(held_out.data, cache, trainer.model_config.vocab_size, trainer.group)
        self._rows = RowSource(held_out, store, rank=trainer.rank, world=trainer.world)

    @torch.no_grad()
    def loss(self) -> float:
        """Cross-entropy a valid token over all ranks' rows; all ranks call it.

        Peak: one forward of the declared N. Raises: WorkingSetError on all ranks for a row longer than N.
        """
        trainer, batches = self._trainer, self._rows.batches(0)
        together(lambda: [trainer.working_set.admit(b.num_tokens, "data.validation") for b in batches], trainer.group)
        valid = torch.tensor(sum(b.num_valid for b in batches), device=trainer.device)
        num_valid = max(1, int(collectives.all_reduce(valid, trainer.group)))
        total = torch.zeros((), dtype=torch.float64, device=trainer.device)
        trainer.model.eval()
        try:
            for batch in batches:
                own = batch.to(trainer.device)
                part = hf.loss_of(
                    trainer.model, own.input_ids, own.position_ids, own.labels, num_valid=num_valid, share=0.0
                )
                total += part.cross_entropy.double()
        finally:
            trainer.model.train()
            if isinstance(trainer.model, FSDPModule):
                trainer.model.reshard()
        return collectives.all_reduce(total, trainer.group).item()
