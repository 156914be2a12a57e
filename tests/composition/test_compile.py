"""torch.compile of the dense parts, inside the checkpoint, with all four on: counted graphs, breaks and recompiles.

Backend aot_eager: the same graphs without code generation.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from steppe.compose import Flattened, flatten_peaks
from steppe.core.shapes import MeshShape
from steppe.flatteners import NAMES
from steppe.integrations.float64 import float64_truth
from tests.composition.programs import policies
from tests.support.exactness import assert_reordered
from tests.support.float64 import toy_model
from tests.support.ranks import run_ranks

FIXED, VARYING = (24, 24, 24, 24), (24, 20, 22, 18)
COMPILED = {"compile": "parts", "compile_backend": "aot_eager"}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


def _compiled(layers: int = 2, **boundary: Any) -> Flattened:
    model = toy_model("qwen3_moe", num_hidden_layers=layers).train()
    return flatten_peaks(model, policies(NAMES, boundary={**COMPILED, **boundary}))


def _losses(model: Any, optimizer: Any, lengths: tuple[int, ...], after: Any = lambda: None) -> torch.Tensor:
    """Each step's loss; `after` is called behind every step."""
    losses = []
    for step, length in enumerate(lengths):
        ids = torch.randint(256, (2, length), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids, num_items_in_batch=2 * (length - 1), use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        after()
    return torch.stack(losses)


def _graphs_by_step(made: Flattened, lengths: tuple[int, ...]) -> tuple[list[int], torch.Tensor]:
    graphs: list[int] = []
    optimizer = made.optimizer(0.01, weight_decay=0.1)
    losses = _losses(made.model, optimizer, lengths, lambda: graphs.append(made.stats()["boundary"].compiled_graphs))
    assert not [line for line in made.diagnose() if "compile" in line]
    made.close()
    return graphs, losses


def _breaks() -> dict[str, int]:
    return dict(torch._dynamo.utils.counters["graph_break"])


@pytest.mark.parametrize(
    ("lengths", "varying", "last_compile"),
    [(FIXED, False, 1), (VARYING, False, 2), (VARYING, True, 1)],
    ids=["one length", "lengths unmarked", "lengths marked"],
)
def test_parts_compile_once_with_no_graph_break_and_the_losses_are_the_plain_ones(
    lengths: tuple[int, ...], varying: bool, last_compile: int
) -> None:
    graphs, losses = _graphs_by_step(_compiled(compile_varying=varying), lengths)
    assert _breaks() == {}
    assert graphs[0] > 0
    assert graphs[last_compile - 1 :] == [graphs[-1]] * (len(graphs) - last_compile + 1), graphs
    if last_compile == 2:
        assert graphs[1] > graphs[0], "a second length is a recompile to dynamic shapes, unless it was announced"
    sides = []
    for model in (toy_model("qwen3_moe").train(), float64_truth(toy_model("qwen3_moe")).train()):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        sides.append(_losses(model, optimizer, lengths))
    assert_reordered(losses, *sides, length=2 * max(lengths) * 256, what="losses")


def test_a_deep_model_is_compiled_to_its_last_block() -> None:
    """Dynamo gives up a function silently after `recompile_limit` graphs: equal blocks have to share theirs."""
    graphs, _ = _graphs_by_step(_compiled(), FIXED[:2])
    torch._dynamo.reset()
    limit = torch._dynamo.config.recompile_limit
    made = _compiled(layers=limit + 2)
    deep, _ = _graphs_by_step(made, FIXED[:2])
    assert deep in (graphs, [each * (limit + 2) // 2 for each in graphs]), "some blocks' parts were left out"
    assert _breaks() == {}


def test_a_run_that_compiled_nothing_says_so() -> None:
    made = _compiled()
    with torch.compiler.set_stance("force_eager"):
        _losses(made.model, made.optimizer(0.01), FIXED[:1])
    assert any("nothing was compiled" in line for line in made.diagnose())
    made.close()


def _over_a_sequence(
    rank: int, world_size: int, layers: int, boundary: dict[str, Any]
) -> tuple[torch.Tensor, list[str], int]:
    """Losses, the reason of every graph break, and the number of graphs, with D = W."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    mesh = MeshShape(world_size, sequence=world_size, expert=world_size, vocab=world_size)
    model = toy_model("qwen3_moe", num_hidden_layers=layers).train()
    made = flatten_peaks(model, policies(NAMES, boundary=boundary), mesh=mesh)
    losses = _losses(made.model, made.optimizer(0.01, weight_decay=0.1), FIXED)
    graphs = made.stats()["boundary"].compiled_graphs
    breaks = torch._dynamo.utils.counters["graph_break"]
    made.close()
    torch._dynamo.reset()
    return losses, [reason for reason, count in breaks.items() for _ in range(count)], graphs


def test_attention_over_a_sequences_ranks_breaks_the_graph_only_where_it_is_joined() -> None:
    layers = torch._dynamo.config.recompile_limit + 2
    losses, breaks, graphs = run_ranks(_over_a_sequence, 2, 2, COMPILED)[0]
    plain, _, _ = run_ranks(_over_a_sequence, 2, 2, {})[0]
    assert breaks and all("Ulysses.attend" in reason for reason in breaks), breaks
    assert_reordered(losses, plain, plain.double(), length=2**17, what="losses")
    _, more, deep = run_ranks(_over_a_sequence, 2, layers, COMPILED)[0]
    assert (len(more), deep) == (len(breaks), graphs), "a deep model shares the graphs: no block is left out"
