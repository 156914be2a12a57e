"""One process: drawn options, gradients against finite differences, graphs used twice, large vocabularies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.flatteners.vocab.budget import VocabPolicy
from steppe.flatteners.vocab.reference import plain_loss
from steppe.flatteners.vocab.ring import ring_dtp, ring_dtp_loss
from steppe.flatteners.vocab.stats import RingStats
from tests.flatteners.vocab.programs import ROW_VALUES, Spec, Tensors, check_parity, make, ours
from tests.support.exactness import assert_bitwise, assert_reordered

OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "label_smoothing": st.sampled_from([0.1, 1.0]),
        "z_loss": st.sampled_from([1e-4, 0.1]),
        "softcap": st.sampled_from([2.0, 30.0]),
        "logit_scale": st.sampled_from([0.25, -1.5]),
        "vocab_size": st.sampled_from([1, 90, 101]),
        "ignore_index": st.sampled_from([-1, 0, 1000]),
    },
)
WANT = st.one_of(
    st.sampled_from([("loss",), ("loss", "num_correct")]),
    st.lists(st.sampled_from(["loss", *ROW_VALUES]), min_size=1, unique=True).map(tuple),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    options=OPTIONS, want=WANT, bias=st.booleans(), class_weight=st.booleans(),
    dtype=st.sampled_from(["float64", "float32", "bfloat16", "float16"]),
    frozen=st.sampled_from(["", "hidden", "weight", "weight alone"]),
    tile_tokens=st.integers(4, 40), tile_vocab=st.integers(9, 110), seed=st.integers(0, 9),
)  # fmt: skip
def test_drawn_options_equal_the_whole_program(
    options: dict, want: tuple, bias: bool, class_weight: bool, dtype: str, frozen: str, tile_tokens: int,
    tile_vocab: int, seed: int,
) -> None:  # fmt: skip
    sizes = {"tile_tokens": tile_tokens, "tile_vocab": tile_vocab}
    spec = Spec(
        options=options, want=want, bias=bias, class_weight=class_weight, dtype=dtype, frozen=frozen, sizes=sizes,
        seed=seed,
    )  # fmt: skip
    check_parity(spec)


MASKED = [
    {}, {"z_loss": 0.1}, {"softcap": 30.0}, {"z_loss": 0.1, "softcap": 2.0, "reduction": "none"},
]  # fmt: skip


@pytest.mark.parametrize("mask", [float("-inf"), -1e38])
@pytest.mark.parametrize("schedule", ["local", "weights", "activations"])
def test_masked_entries_of_the_vocabulary_have_no_part_in_entropies_and_gradients(schedule: str, mask: float) -> None:
    """The first tiles are masked whole, one in part."""
    wants = [("loss",)] if schedule == "local" else [("loss",), ("loss", "entropy"), ("loss", *ROW_VALUES)]
    for want in wants:
        for options in MASKED[: 3 if schedule == "local" else 4]:
            check_parity(Spec(masked=40, mask=mask, bias=True, schedule=schedule, want=want, options=options))


def test_entropies_of_a_masked_vocabulary_are_torchs() -> None:
    tensors = make(Spec(masked=40, bias=True, ignored=0.0))
    found = ring_dtp(tensors.hidden, tensors.weight, tensors.labels, bias=tensors.bias, want=("entropy",)).entropy
    near, truth = (
        torch.distributions.Categorical(logits=torch.nn.functional.linear(t.hidden, t.weight, t.bias)).entropy()
        for t in (tensors, tensors.to(torch.float64))
    )
    assert found is not None
    assert_reordered(found, near, truth, length=101)


@pytest.mark.parametrize("schedule", ["local", "weights", "activations"])
def test_gradients_equal_finite_differences(schedule: str) -> None:
    tensors = make(Spec(rows=(4,), shards=(6,), width=3, dtype="float64", bias=True, class_weight=True))
    leaves = [t.requires_grad_() for t in (tensors.hidden, tensors.weight, tensors.bias)]
    by_row = schedule != "local"
    factors = torch.linspace(-1, 2, 4, dtype=torch.float64)

    def program(hidden, weight, bias):
        output = ring_dtp(
            hidden, weight, tensors.labels, bias=bias, class_weight=tensors.class_weight, label_smoothing=0.1,
            z_loss=0.1, softcap=4.0, logit_scale=0.7, reduction="none" if by_row else "mean",
            want=("loss", *ROW_VALUES) if by_row else ("loss",),
            policy=VocabPolicy(schedule, tile_tokens=3, tile_vocab=4),
        )  # fmt: skip
        return tuple(value * factors for value in output if value is not None)

    assert torch.autograd.gradcheck(program, leaves)


def _inputs(rows: int = 9, vocab: int = 23, width: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors = make(Spec(rows=(rows,), shards=(vocab,), width=width))
    return tensors.hidden.requires_grad_(), tensors.weight.requires_grad_(), tensors.labels


@pytest.mark.parametrize("schedule", ["local", "weights"])
def test_a_retained_graph_gives_the_same_gradients_twice_and_a_freed_one_raises(schedule: str) -> None:
    hidden, weight, labels = _inputs()
    loss = ring_dtp_loss(hidden, weight, labels, policy=VocabPolicy(schedule))
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    kept = [grad.clone() for grad in first]
    second = torch.autograd.grad(loss, (hidden, weight), torch.tensor(3.0), retain_graph=True)
    third = torch.autograd.grad(loss, (hidden, weight))
    for grads, factor in ((first, 1.0), (second, 3.0), (third, 1.0)):
        for grad, once in zip(grads, kept, strict=True):
            truth = once.double() * factor
            assert_reordered(grad, once * factor, truth, length=1)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("schedule", ["local", "weights"])
def test_double_backward_raises(schedule: str) -> None:
    hidden, weight, labels = _inputs()
    loss = ring_dtp_loss(hidden, weight, labels, policy=VocabPolicy(schedule))
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("schedule", ["auto", "local", "weights", "activations"])
def test_a_forward_without_gradients_has_the_same_bits(schedule: str) -> None:
    for spec in (Spec(schedule=schedule, want=("loss", "num_correct")), Spec(schedule=schedule, class_weight=True)):
        tensors = make(spec)
        with_grad, _ = ours(spec, tensors, 0, None)
        with torch.no_grad():
            hidden, weight = tensors.hidden.requires_grad_(), tensors.weight.requires_grad_()
            without = ring_dtp(
                hidden, weight, tensors.labels, class_weight=tensors.class_weight, want=spec.want,
                policy=VocabPolicy(schedule, **spec.sizes),
            )  # fmt: skip
        assert_bitwise(without.loss, with_grad["loss"].detach())
        with torch.inference_mode():
            found = ring_dtp(tensors.hidden, tensors.weight, tensors.labels, want=("num_correct",))
            assert found.loss is None
            assert found.num_correct == plain_loss(tensors.hidden, tensors.weight, tensors.labels)["num_correct"]
        assert not without.loss.requires_grad


def test_no_labels_at_all_give_a_zero_loss_that_is_connected() -> None:
    hidden, weight, labels = _inputs()
    for schedule in ("local", "weights", "activations"):
        for weights in (None, torch.ones(23)):
            loss = ring_dtp_loss(
                hidden, weight, torch.full_like(labels, -100), class_weight=weights, policy=VocabPolicy(schedule)
            )
            assert loss == 0
            assert all((grad == 0).all() for grad in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("schedule", ["local", "weights", "activations"])
def test_class_weights_that_sum_to_zero_over_the_labels_give_a_zero_loss(schedule: str, smoothing: float) -> None:
    hidden, weight = make(Spec(rows=(3,), width=4)).hidden, torch.eye(3, 4)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    loss = ring_dtp_loss(
        *leaves, torch.tensor([2, -100, 2]), class_weight=torch.tensor([0.848, 0, 0]), label_smoothing=smoothing,
        policy=VocabPolicy(schedule),
    )  # fmt: skip
    assert loss == 0
    assert all((grad == 0).all() for grad in torch.autograd.grad(loss, leaves))


def test_ignored_rows_cost_no_matmul() -> None:
    hidden, weight, labels = _inputs(rows=40)
    labels[:30] = -100
    for schedule, law in (("local", 3), ("weights", 4), ("activations", 4)):
        stats = RingStats()
        ring_dtp_loss(hidden, weight, labels, policy=VocabPolicy(schedule), stats=stats).backward()
        counted = int((labels != -100).sum())
        assert stats.multiply_adds == law * counted * 23 * 5
        assert stats.ignored_rows == 40 - counted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("schedule", ["local", "weights"])
def test_the_loss_of_narrow_inputs_is_as_good_as_the_float32_programs(dtype: torch.dtype, schedule: str) -> None:
    tensors = make(Spec(rows=(300,), shards=(1000,), width=64)).to(dtype)
    loss = ring_dtp_loss(tensors.hidden, tensors.weight, tensors.labels, policy=VocabPolicy(schedule))
    wide, truth = (
        plain_loss(t.hidden, t.weight, t.labels)["loss"] for t in (tensors.to(torch.float32), tensors.to(torch.float64))
    )
    assert loss.dtype == torch.float32
    assert_reordered(loss, wide, truth, length=1000)


@pytest.mark.parametrize("schedule", ["local", "weights", "activations"])
def test_narrow_hidden_states_meet_a_wide_weight(schedule: str) -> None:
    """As under FSDP2's mixed precision, which leaves an ignored head in float32."""
    made = make(Spec(rows=(50,), shards=(300,), width=32, dtype="bfloat16", ignored=0.2))
    leaves = made.hidden.requires_grad_(), made.weight.float().requires_grad_()
    policy = VocabPolicy(schedule, tile_tokens=16, tile_vocab=70)
    loss = ring_dtp_loss(*leaves, made.labels, policy=policy)
    plain = plain_loss(leaves[0].float(), leaves[1], made.labels)["loss"]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    truth = plain_loss(*wide, made.labels)["loss"]
    results = [
        (value, *torch.autograd.grad(value, ins)) for value, ins in ((loss, leaves), (plain, leaves), (truth, wide))
    ]
    for mine, near, true in zip(*results, strict=True):
        assert_reordered(mine, near, true, length=300)


def test_log_probabilities_are_never_positive() -> None:
    for tile_vocab in (8, 16):
        for vocab in (4 * tile_vocab - 1, 4 * tile_vocab, 4 * tile_vocab + 1):
            spec = Spec(shards=(vocab + 5,), options={"vocab_size": vocab}, ignored=0.0)
            tensors = make(spec)
            logprob = ring_dtp(
                tensors.hidden * 30, tensors.weight, tensors.labels, want=("logprob",), vocab_size=vocab,
                policy=VocabPolicy("weights", tile_tokens=5, tile_vocab=tile_vocab),
            ).logprob  # fmt: skip
            assert (logprob <= 0).all()
            assert (logprob.isfinite()).all()


def test_padded_rows_get_no_gradient_and_what_they_hold_does_not_matter() -> None:
    hidden, weight, labels = _inputs()
    labels.clamp_(max=19)
    losses = []
    for filler in (0.0, 1e4, float("nan")):
        with torch.no_grad():
            weight[20:] = filler
        for schedule in ("local", "weights", "activations"):
            loss = ring_dtp_loss(hidden, weight, labels, vocab_size=20, policy=VocabPolicy(schedule, tile_vocab=7))
            (grad,) = torch.autograd.grad(loss, weight)
            assert (grad[20:] == 0).all()
            losses.append(loss.detach())
    assert torch.stack(losses).isfinite().all()
    assert all(losses[i] == losses[i + 3] for i in range(6))


def test_a_vocabulary_of_262144_rows() -> None:
    for schedule in ("local", "weights"):
        check_parity(Spec(rows=(6,), shards=(262_144,), width=8, schedule=schedule, sizes={}))


def test_the_error_stays_inside_the_band_for_1_to_4096_tiles() -> None:
    """The errors are published in docs/vocab.md."""
    tensors = make(Spec(rows=(64,), shards=(4096,), width=32))

    def results(made: Tensors, tile_vocab: int | None) -> tuple[torch.Tensor, ...]:
        leaves = made.hidden.requires_grad_(), made.weight.requires_grad_()
        if tile_vocab is None:
            loss = plain_loss(*leaves, made.labels)["loss"]
        else:
            policy = VocabPolicy("weights", tile_tokens=64, tile_vocab=tile_vocab)
            loss = ring_dtp_loss(*leaves, made.labels, policy=policy)
        return loss, *torch.autograd.grad(loss, leaves)

    truth, plain = results(tensors.to(torch.float64), None), results(tensors, None)
    for num_tiles in (1, 16, 256, 4096):
        found = results(tensors, 4096 // num_tiles)
        for mine, near, true in zip(found, plain, truth, strict=True):
            assert_reordered(mine, near, true, length=4096, what=f"{num_tiles} tiles")


def test_labels_and_hidden_states_of_any_leading_shape() -> None:
    hidden, weight, labels = _inputs(rows=12)
    flat = ring_dtp(hidden, weight, labels, reduction="none", want=("loss", "lse"))
    shaped = ring_dtp(hidden.view(3, 4, 5), weight, labels.view(3, 4), reduction="none", want=("loss", "lse"))
    assert shaped.loss.shape == shaped.lse.shape == (3, 4)
    assert_bitwise(shaped.loss.flatten(), flat.loss)


def test_micro_batches_with_one_divisor_equal_the_whole_batch() -> None:
    """Unequal micro-batches: neither a mean of means nor a division twice."""
    hidden, weight, labels = _inputs(rows=20)
    labels[:7] = -100
    count = int((labels != -100).sum())
    whole = torch.autograd.grad(ring_dtp_loss(hidden, weight, labels), (hidden, weight))
    for part in (slice(0, 9), slice(9, 20)):
        ring_dtp_loss(hidden[part], weight, labels[part], num_items_in_batch=torch.tensor(count)).backward()
    for grad, expected in zip((hidden.grad, weight.grad), whole, strict=True):
        assert_reordered(grad, expected, expected.double(), length=20)


def test_no_tokens_and_labels_in_int32() -> None:
    hidden, weight, labels = _inputs()
    empty = ring_dtp(hidden[:0], weight, labels[:0], want=("loss", "num_correct"))
    assert empty.loss == 0
    assert empty.num_correct == 0
    empty.loss.backward()
    assert_bitwise(ring_dtp_loss(hidden, weight, labels.int()), ring_dtp_loss(hidden, weight, labels))


def test_a_hidden_state_that_is_not_a_number_is_not_hidden() -> None:
    hidden, weight, labels = _inputs()
    labels[:] = 1
    with torch.no_grad():
        hidden[3, 0] = float("nan")
    losses = ring_dtp_loss(hidden, weight, labels, reduction="none")
    assert losses.isnan().tolist() == [row == 3 for row in range(9)]


def test_precision_is_ours_under_autocast() -> None:
    hidden, weight, labels = _inputs(rows=30)
    outside = ring_dtp_loss(hidden, weight, labels)
    with torch.autocast("cpu", torch.bfloat16):
        inside = ring_dtp_loss(hidden, weight, labels)
        inside.backward()
    assert_bitwise(inside.detach(), outside.detach())


@pytest.mark.slow
def test_more_than_two_to_the_31_logits() -> None:
    """Loss and gradients, from the float64 statistics of every row; gradients of some rows at both ends and between."""
    num_rows, vocab = 8200, 262_144
    made = make(Spec(rows=(num_rows,), shards=(vocab,), width=3, ignored=0.0))
    hidden, weight = made.hidden.double(), made.weight.double()
    lse = torch.cat([torch.logsumexp(rows @ weight.T, 1) for rows in hidden.split(64)])
    truth = (lse - (hidden * weight[made.labels]).sum(1)).mean()
    leaves = made.hidden.requires_grad_(), made.weight.requires_grad_()
    loss = ring_dtp_loss(*leaves, made.labels)
    assert_reordered(loss, truth.float(), truth, length=vocab)
    grads = torch.autograd.grad(loss, leaves)
    rows, columns = torch.tensor([0, 4095, 8191, 8192, num_rows - 1]), torch.tensor([0, 131_072, vocab - 1])
    at_rows = torch.softmax(hidden[rows] @ weight.T, 1) @ weight - weight[made.labels[rows]]
    chance = torch.exp(hidden @ weight[columns].T - lse[:, None]) - (made.labels[:, None] == columns).double()
    for grad, pick, exact in zip(grads, (rows, columns), (at_rows, chance.T @ hidden), strict=True):
        exact = exact / num_rows
        assert_reordered(grad[pick], exact.float(), exact, length=vocab)
