"""The training loop: one Trainer is one model, its data and its optimizer; `step()` is its three phases."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from steppe.compose import attach_all
from steppe.core.errors import ConfigError, SteppeError
from steppe.core.policy import OFF
from steppe.integrations import transformers as hf
from steppe.runtime import collectives, scopes
from steppe.runtime.mesh import make_meshes
from steppe.training import tokens
from steppe.training.config import RunConfig
from steppe.training.data import Batch, RowSource, WorkingSet
from steppe.training.declared import judged, working_set
from steppe.training.model import fill, join_sequences, load_model_config, make_skeleton, shard
from steppe.training.optimizer import clip_gradients, gradient_norm, parameter_groups, plain_adamw
from steppe.training.schedule import dropout_seed, learning_rate

# Fields of a transformers configuration that say how it runs or who wrote it, not what it computes.
_NOT_THE_MODEL = ("transformers_version", "dtype", "torch_dtype", "_name_or_path", "use_cache", "architectures")


@dataclass(frozen=True)
class StepResult:
    """What a step reports; the same on all ranks, save `ms`."""

    step: int  # 0 is the first
    loss: float  # cross-entropy a valid token, over all ranks and micro-batches
    aux_loss: float  # the router's, unweighted; 0 where the model has none
    grad_norm: float  # before clipping
    lr: float
    num_tokens: int
    num_valid: int
    ms: float
    token_losses: tuple[torch.Tensor, ...] = ()  # of this rank, one a micro-batch, when asked for


class Trainer:
    """A run's live objects, made deterministically from its config; several may alternate in one process group.

    Peak: that of the plain program, or of what the config's flatteners leave of it.
    Exactness: two Trainers of one config are bitwise equal, step for step.
    Raises: ConfigError, DataError, and WorkingSetError for what is predicted not to fit, before anything is built;
        ConflictError from the flatteners.
    """

    def __init__(
        self, config: RunConfig, group: collectives.Group = None, *, device: torch.device | None = None,
        cache: Path | None = None,
    ) -> None:  # fmt: skip
        self.config, self.group = config, group if group is not None else collectives.world()
        self.rank, self.world = collectives.rank(self.group), collectives.size(self.group)
        self.device = device or torch.device("cpu")
        config.launch.mesh(self.world)
        self.model_config = load_model_config(config)
        self.declared = working_set(config, self.model_config, self.world, self.device)
        if self.declared is not None:
            self.declared.launch()
        self.store = tokens.prepare(
            config.data, cache or Path(config.output.dir) / "data", self.model_config.vocab_size, self.group
        )
        self.data = RowSource(config, self.store, rank=self.rank, world=self.world)
        self.working_set = WorkingSet(config.tokens_per_rank)
        self.next_step = 0
        self.before_update: Callable[[], None] | None = None  # called when all gradients are there, before clipping
        self._make()

    def _make(self) -> None:
        """Model, flatteners, shards, weights, optimizer: in this order, since flatteners place parameters of their own
        and nobody holds a weight that another rank will have."""
        config = self.config
        self.meshes = make_meshes(config.launch.mesh(self.world), self.device, copies=config.computes_in_copies)
        made = make_skeleton(config, self.model_config)
        self.model = made.model
        self.ulysses = join_sequences(self.model, config)
        self.flattened = attach_all(self.model, self._policies(), self.meshes)
        if config.flatten["boundary"] == OFF and config.train.checkpointing:
            hf.checkpoint_blocks(self.model)
        if config.flatten["vocab"] == OFF:
            hf.PlainLoss(self.model)
        shard(self.flattened, config, self.device)
        fill(made, config, self.device)
        with scopes.label("optimizer"):
            self.optimizer = self._make_optimizer()
        if config.train.router_bias_rate and self.flattened.offers("update_router_bias") is None:
            raise ConfigError(
                "train.router_bias_rate", got=config.train.router_bias_rate, allowed="0 where nobody counts routes",
                remedy='set dispatch = "on" under [flatten], or router_bias_rate = 0',
            )  # fmt: skip

    def _policies(self) -> dict[str, Any]:
        """The config's, with the run's clipping handed to the optimizer that clips by itself."""
        policies, clip = dict(self.config.flatten), self.config.train.clip
        if policies["optimizer"] != OFF and policies["optimizer"].max_norm is None:
            policies["optimizer"] = dataclasses.replace(policies["optimizer"], max_norm=clip or math.inf)
        return policies

    def _make_optimizer(self) -> Any:
        train = self.config.train
        if self.config.flatten["optimizer"] == OFF:
            return plain_adamw(self.model, train)
        groups = parameter_groups(self.model, train.weight_decay)
        return self.flattened.optimizer(train.lr, groups=groups, betas=train.betas, eps=train.eps)

    def step(self, batches: Sequence[Batch] | None = None, *, keep_token_losses: bool = False) -> StepResult:
        """One optimizer step over this rank's micro-batches: its own next ones, or those given.

        Raises: WorkingSetError on all ranks, with nothing changed, where any rank's micro-batch is longer than N.
        """
        started = time.perf_counter()
        batches, num_tokens, num_valid = self._fetch(batches)
        with judged(self.declared, self.next_step + 1, self.model, self.optimizer, tell=self.rank == 0):
            losses, kept = self._accumulate(batches, num_tokens, num_valid, keep_token_losses)
            norm, rate = self._update()
        self.next_step += 1
        ms = (time.perf_counter() - started) * 1e3
        return StepResult(self.next_step - 1, *losses, norm, rate, num_tokens, num_valid, ms, kept)

    def _fetch(self, given: Sequence[Batch] | None) -> tuple[Sequence[Batch], int, int]:
        """This step's micro-batches and the global counts of tokens and labels, agreed on by all ranks."""
        batches = given if given is not None else self.data.batches(self.next_step)
        sizes, refusal = [(b.num_tokens, b.num_valid) for b in batches], None
        try:
            self.working_set.admit(max(n for n, _ in sizes), f"micro-batch of step {self.next_step}")
        except SteppeError as failure:
            refusal = failure
        own = [sum(n for n, _ in sizes), sum(v for _, v in sizes), int(refusal is not None)]
        total, valid, refused = collectives.all_reduce(torch.tensor(own, device=self.device), self.group).tolist()
        if refused:
            raise next(r for r in collectives.all_gather_object(refusal, self.group) if r is not None)
        return batches, total, valid

    def _accumulate(
        self, batches: Sequence[Batch], num_tokens: int, num_valid: int, keep: bool
    ) -> tuple[list[float], tuple[torch.Tensor, ...]]:
        """Forward and backward of every micro-batch; gradients add up in the shards."""
        sums, kept = torch.zeros(2, dtype=torch.float64, device=self.device), []
        for micro in range(len(batches)):
            batch = batches[micro].to(self.device)
            share = batch.num_tokens / num_tokens
            torch.manual_seed(dropout_seed(self.config.train.seed, self.next_step, micro, self.rank))
            if self.config.flatten["optimizer"] != OFF:
                self.optimizer.set_is_last_backward(micro == len(batches) - 1)
            loss = hf.loss_of(
                self.model, batch.input_ids, batch.position_ids, batch.labels,
                num_valid=max(1, num_valid), share=share, keep_tokens=keep,
            )  # fmt: skip
            if loss.tokens is not None:
                kept.append(loss.tokens)
            loss.total.backward()
            sums += torch.stack([loss.cross_entropy.double(), share * loss.auxiliary.double()])
            del batch, loss
        return collectives.all_reduce(sums, self.group).tolist(), tuple(kept)

    def identity(self) -> dict[str, Any]:
        """What a checkpoint and a run that resumes it must share: everything that decides data, weights and sums."""
        config = self.config
        loaded = self.model_config.to_dict()
        model = {key: value for key, value in loaded.items() if key not in _NOT_THE_MODEL}
        return json.loads(json.dumps({
            "model": model,
            "model.dtype": config.model.dtype,
            "train": {key: getattr(config.train, key) for key in ("batch", "micro_batches", "seed", "dtype")},
            "data": {"seq_len": config.data.seq_len, "packing": config.data.packing, "tokens": self.store.digest},
        }, default=str))  # fmt: skip

    def rows_read(self) -> int:
        """Rows that all ranks have read so far."""
        return self.data.rows_read(self.next_step)

    def resume(self, step: int, rows_read: int) -> None:
        """Go on with update number `step`."""
        self.next_step = step
        self.data.resume(step, rows_read)

    def _update(self) -> tuple[float, float]:
        """Clip, update, and take the gradients off."""
        optimizer, clip = self.optimizer, self.config.train.clip
        if self.before_update is not None:
            self.before_update()
        rate = learning_rate(self.next_step, self.config.train)
        for group in optimizer.param_groups:
            group["lr"] = rate
        norm = None
        if self.config.flatten["optimizer"] == OFF:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            norm = gradient_norm(parameters, self.group)
            if clip:
                clip_gradients(parameters, norm, clip)
        with scopes.label("optimizer"):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if self.config.train.router_bias_rate:
            self.flattened.offers("update_router_bias")(self.config.train.router_bias_rate, group=self.group)
        return float(optimizer.grad_norm if norm is None else norm), rate
