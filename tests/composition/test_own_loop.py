"""What a loop of one's own may rely on, whichever flatteners are on: the loss, the optimizer, and clear refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from steppe.compose import flatten_peaks
from steppe.core.errors import ConfigError, ConflictError
from steppe.core.shapes import MeshShape
from steppe.flatteners import NAMES
from steppe.integrations.float64 import float64_truth
from steppe.runtime import collectives
from tests.composition.programs import LENGTH, ROWS, Seen, gradients, own, policies, tokens, whole
from tests.support.exactness import assert_bitwise, assert_reordered
from tests.support.float64 import toy_model
from tests.support.ranks import run_ranks

SUBSETS = ((), ("dispatch",), ("vocab",), NAMES)


def _model() -> Any:
    """Qwen3-MoE with its auxiliary loss on, strong enough to be seen in every router's gradient."""
    return toy_model("qwen3_moe", output_router_logits=True, router_aux_loss_coef=1.0).train()


def _labels(labelled_rows: int) -> torch.Tensor:
    """[ROWS, LENGTH] that only the first rows have: the last rank has fewer, or none."""
    labels = tokens(0).clone()
    labels[labelled_rows:] = -100
    return labels


def _one_step(model: Any, mine: tuple[slice, slice], labels: torch.Tensor) -> torch.Tensor:
    """The model's own loss, without a word about other ranks, sent backward."""
    loss: torch.Tensor = model(input_ids=tokens(0)[mine], labels=labels[mine], use_cache=False).loss
    loss.backward()
    return loss.detach().reshape(1).clone()


def _share(rank: int, world_size: int, names: tuple[str, ...], sequence: int, labelled_rows: int) -> Seen:
    mesh = MeshShape(world_size, sequence=sequence, expert=world_size, vocab=world_size)
    made = flatten_peaks(_model(), policies(names), mesh=mesh)
    loss = collectives.all_reduce(_one_step(made.model, own(mesh, rank), _labels(labelled_rows)), collectives.world())
    found = {"loss": loss} | {name: whole(p.grad) for name, p in made.model.named_parameters()}
    made.close()
    return found


@pytest.mark.parametrize(("sequence", "labelled_rows"), [(1, 3), (1, 2), (2, 3)])
@pytest.mark.parametrize("names", SUBSETS)
def test_a_loss_without_a_count_is_this_ranks_share_of_the_whole_batchs_on_any_subset(
    names: tuple[str, ...], sequence: int, labelled_rows: int
) -> None:
    ours = run_ranks(_share, 2, names, sequence, labelled_rows)[0]
    sides = []
    for model in (_model(), float64_truth(_model())):
        loss = _one_step(model, (slice(None), slice(None)), _labels(labelled_rows))
        sides.append({"loss": loss} | {name: whole(p.grad) for name, p in model.named_parameters()})
    plain, truth = sides
    for name, value in ours.items():
        assert_reordered(value, plain[name], truth[name], length=ROWS * LENGTH * 256, what=f"{names} {name}")


@pytest.mark.parametrize("names", SUBSETS)
def test_the_loss_of_hidden_states_is_the_models_own(names: tuple[str, ...]) -> None:
    made, ids = flatten_peaks(toy_model("qwen3_moe"), policies(names)), tokens(0)
    expected = made.model(input_ids=ids, labels=ids, use_cache=False)
    hidden = made.model.model(input_ids=ids, use_cache=False).last_hidden_state
    assert_bitwise(made.loss(hidden, ids).detach(), expected.loss.detach(), "loss of hidden states")
    assert made.loss(expected, ids) is expected.loss
    without = made.model(input_ids=ids, use_cache=False)
    if "vocab" in names:
        with pytest.raises(ConfigError, match="pass labels to the model"):
            made.loss(without, ids)
    else:
        assert_bitwise(made.loss(without, ids).detach(), expected.loss.detach(), "loss of logits")
    made.close()


def _sharded_units(rank: int, world_size: int, policy: MixedPrecisionPolicy | None) -> int:
    made = flatten_peaks(_model(), policies(NAMES), mesh=MeshShape(world_size), mp_policy=policy)
    units = sum(isinstance(module, FSDPModule) for module in made.model.modules())
    made.close()
    return units


def test_one_rank_holds_no_copies_of_its_own_weights_but_in_another_type() -> None:
    """FSDP2 on one rank gathers every block into a copy: of a toy it took 13% more than planned."""
    assert run_ranks(_sharded_units, 1, None) == [0]
    assert run_ranks(_sharded_units, 1, MixedPrecisionPolicy(param_dtype=torch.bfloat16))[0] > 0


def test_settings_of_a_second_optimizer_are_refused_not_forgotten() -> None:
    made = flatten_peaks(toy_model("mixtral"), policies(("optimizer",)))
    made.optimizer(1e-3)
    with pytest.raises(ConfigError, match="a second call"):
        made.optimizer(1e-4)
    made.close()
    made = flatten_peaks(toy_model("mixtral"), policies(("optimizer",)))
    made.close()
    assert type(made.optimizer(1e-3)) is torch.optim.AdamW, "what was taken off isn't attached later"


@pytest.mark.parametrize("settings", [{"foreach": False}, {"fused": True}, {"amsgrad": True}])
def test_the_plain_optimizer_takes_adamws_settings(settings: dict[str, bool]) -> None:
    made = flatten_peaks(toy_model("mixtral"), {})
    group = made.optimizer(1e-3, **settings).param_groups[0]
    assert {name: group[name] for name in settings} == settings


def test_a_precision_that_nobody_would_keep_to_is_refused() -> None:
    with pytest.raises(ConfigError, match="without ranks"):
        flatten_peaks(toy_model("mixtral"), {}, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    flatten_peaks(toy_model("mixtral"), {}, mp_policy=MixedPrecisionPolicy())


def _refused(rank: int, world_size: int) -> None:
    model = toy_model("mixtral")
    model.config.logit_scale = 2.0
    before = gradients(model, tokens(0))
    mesh = MeshShape(world_size, sequence=1, expert=world_size, vocab=world_size)
    with pytest.raises(ConflictError, match="logit_scale"):
        flatten_peaks(model, policies(NAMES), mesh=mesh)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    for name, value in gradients(model, tokens(0)).items():
        assert_bitwise(value, before[name], name)


def test_a_model_that_was_refused_is_the_model_that_it_was() -> None:
    """Conflicts are looked for before the first flattener places a parameter."""
    run_ranks(_refused, 2)


def _two_types(rank: int, world_size: int) -> None:
    model = toy_model("qwen3_moe", attention_bias=True)
    model.model.layers[1].self_attn.q_proj.bias.data = model.model.layers[1].self_attn.q_proj.bias.bfloat16()
    with pytest.raises(ConfigError, match=r"parameters of Linear: got torch.bfloat16, torch.float32"):
        flatten_peaks(model, policies(NAMES), mesh=MeshShape(world_size))
    assert not any(isinstance(p, DTensor) for p in model.parameters()), "refused while nothing is placed yet"


def test_a_module_of_two_types_is_refused_before_fsdp2_would_fail_in_a_step() -> None:
    run_ranks(_two_types, 2)
