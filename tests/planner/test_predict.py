"""The predicted ledger against traces, field measurements and published increments, tensor by tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.core.errors import ConfigError
from steppe.core.ledger import OWNERS, PEAKS, STEP, Entry, Ledger, Moment
from steppe.core.policy import OFF
from steppe.core.shapes import BatchShape, Dtypes, MachineShape, MeshShape, ModelShape, RunShape
from steppe.core.units import GiB, MiB
from steppe.flatteners import NAMES
from steppe.flatteners.vocab.budget import PLAIN_IN_FLOAT32
from steppe.planner.models import load_model, shipped_models, with_router_loss
from steppe.planner.predict import PLAIN, forecast, predict, program_entries, subsets
from steppe.planner.search import policies_of

ALL_ON = {name: policies_of(name)[0] for name in NAMES}
FLOAT32 = Dtypes("float32", "float32", "float32", "bfloat16")


def held(shape: RunShape, moment: Moment, *, without: tuple[str, ...] = ()) -> dict[str, int]:
    """Bytes by tensor at one moment of the plain program, owners in `without` left out."""
    entries = [e for e in program_entries(shape) if moment in e.during and e.place == "device"]
    return {e.tensor: e.num_bytes for e in entries if e.owner not in without}


def test_the_traced_48_layers_are_reproduced_tensor_by_tensor() -> None:
    """FSDP2, checkpointing and stock experts on fake tensors, bf16, N 8192, 64 ranks, no optimizer: 21,635.6 MiB."""
    shape = RunShape(load_model("qwen3-30b-a3b"), BatchShape(8192), MeshShape(64))
    tensors = {name: size / MiB for name, size in held(shape, Moment.LOSS, without=("optimizer",)).items()}
    assert sum(tensors[name] for name in (*PLAIN_IN_FLOAT32, "logits, held by the caller")) == 16_618
    assert tensors["head, gathered"] + tensors["embedding, gathered"] == 1187
    assert tensors["next block, gathered early"] + tensors["next block's experts, gathered early"] == pytest.approx(
        1188.5, rel=1e-5
    )
    assert tensors["weights of the shards"] == pytest.approx(909.9, rel=1e-4)
    assert tensors["block inputs"] == 48 * 32
    assert tensors["final norm"] == 128
    without_tables = sum(tensors.values()) - tensors["rotary tables"] - tensors["token ids and labels"]
    assert round(without_tables) == 21_567
    assert sum(tensors.values()) == pytest.approx(21_635.6, rel=0.02)


def test_a_layer_more_costs_its_shard_and_its_gradient_shard() -> None:
    """Traced with V 1024 on 8 ranks: 297.1 MiB a layer from three layers on."""
    model = replace(load_model("qwen3-30b-a3b"), vocab=1024)

    def peak(layers: int) -> int:
        shape = RunShape(replace(model, num_layers=layers), BatchShape(8192), MeshShape(8))
        entries = [e for e in program_entries(shape) if e.owner != "optimizer" and Moment.UPDATE not in e.during]
        weights = [e for e in program_entries(shape) if e.owner == "weights"]
        return Ledger.from_entries((*entries, *weights)).device_peak_bytes

    assert (peak(4) - peak(3)) / MiB == pytest.approx(297.1, rel=0.01)
    assert (peak(5) - peak(4)) / MiB == pytest.approx(297.1, rel=0.01)


@pytest.mark.parametrize(("tokens", "gib"), [(16_384, 36.6), (32_768, 73.2)])
def test_the_published_vocabulary_increments_are_three_float32_tensors(tokens: int, gib: float) -> None:
    model = replace(load_model("paper-120b"), hidden=7168, vocab=200_000)
    dtypes = Dtypes("float32", "float32", "float32", "float32")
    shape = RunShape(model, BatchShape(tokens), MeshShape(8, vocab=8), dtypes=dtypes)
    assert predict(shape).peaks["vocab"] == 3 * 4 * tokens * 200_000
    assert round(predict(shape).peaks["vocab"] / GiB, 1) == gib


def test_plain_bf16_logits_cost_14_bytes_an_element() -> None:
    shape = RunShape(load_model("qwen3-30b-a3b"), BatchShape(8192), MeshShape(8))
    assert predict(shape).peaks["vocab"] == 14 * 8192 * 151_936


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_llama_8b_at_32k_a_rank_peaks_alike_for_any_context_parallelism(ranks: int) -> None:
    """pytorch/torchtitan benchmarks: 83.9..84.5 GiB on 8 GPUs, float32 state, gradients accumulated."""
    batch = BatchShape(32_768 * ranks, micro_batches=2)
    shape = RunShape(load_model("llama-3.1-8b"), batch, MeshShape(8, sequence=ranks), dtypes=FLOAT32)
    ledger = predict(shape)
    assert ledger.device_peak_bytes / GiB == pytest.approx(84.2, rel=0.05)
    state = sum(ledger.holders[owner] for owner in ("weights", "gradients", "optimizer"))
    assert state / GiB == pytest.approx(15.0, rel=0.05)
    assert ledger.holders["boundary"] / GiB == 8.0
    assert max(PEAKS, key=lambda name: ledger.holders.get(name, 0)) == "vocab"


def test_the_optimizer_on_the_host_saves_15_gb_a_rank() -> None:
    """NVIDIA-NeMo/Megatron-Bridge documentation: 15.3 GB a rank on Qwen3-30B-A3B over 16 GPUs, both moments."""
    shape = RunShape(load_model("qwen3-30b-a3b"), BatchShape(4096), MeshShape(16))
    moments = held(shape, Moment.UPDATE)["exp_avg"] + held(shape, Moment.UPDATE)["exp_avg_sq"]
    assert moments / 1e9 == pytest.approx(15.3, rel=0.05)
    assert predict(shape, {**PLAIN, "optimizer": ALL_ON["optimizer"]}).peaks["optimizer"] == 0


MUST_BE_REFUSED = {
    "simplescaling/s1#106": (
        RunShape(load_model("qwen2.5-32b"), BatchShape(32_768), MeshShape(8), dtypes=FLOAT32), 141e9, "vocab",
    ),
    "hiyouga/LlamaFactory#6755": (
        RunShape(load_model("qwen2.5-32b"), BatchShape(2048), MeshShape(1)), 80 * GiB, "optimizer",
    ),
    "modelscope/ms-swift, Qwen3-30B-A3B with ZeRO-2 on 16 x 80 GB": (
        RunShape(load_model("qwen3-30b-a3b"), BatchShape(4096), MeshShape(16, zero=2)), 80e9, "weights",
    ),
    "QwenLM/Qwen3-VL#2053": (
        RunShape(load_model("qwen3-30b-a3b"), BatchShape(4096), MeshShape(32, zero=2)), 80e9, "weights",
    ),
}  # fmt: skip


@pytest.mark.parametrize("where", MUST_BE_REFUSED)
def test_a_run_that_failed_in_the_field_is_refused_with_its_peak_named(where: str) -> None:
    from steppe.planner.context import top_peak
    from steppe.planner.search import candidate

    shape, device_bytes, peak = MUST_BE_REFUSED[where]
    machine = MachineShape(device_memory_bytes=int(device_bytes))
    seen = candidate(replace(shape, machine=machine), PLAIN)
    assert seen.device_missing > 0
    assert top_peak(seen) == peak


def test_s1_state_alone_is_61_gib() -> None:
    shape = MUST_BE_REFUSED["simplescaling/s1#106"][0]
    tensors = held(shape, Moment.UPDATE)
    state = ("weights of the shards", "gradients of the shards", "exp_avg", "exp_avg_sq")
    assert round(sum(tensors[name] for name in state) / GiB) == 61


def test_zero_2_keeps_57_gib_of_weights_on_every_rank() -> None:
    shape = MUST_BE_REFUSED["QwenLM/Qwen3-VL#2053"][0]
    assert held(shape, Moment.UPDATE)["weights of the shards"] / GiB == pytest.approx(57.9, rel=0.05)


@pytest.mark.parametrize("name", shipped_models())
def test_every_shipped_model_has_a_ledger_under_all_sixteen_programs(name: str) -> None:
    shape = RunShape(load_model(name), BatchShape(8192), MeshShape(16, sequence=2, expert=1, vocab=8))
    programs = list(subsets(ALL_ON))
    assert len(programs) == 16
    for policies in programs:
        seen = forecast(shape, policies)
        assert seen.device_peak_bytes > 0
        assert set(PEAKS) <= set(seen.ledger.peaks)
        assert seen.reserved_bytes >= seen.ledger.device_peak_bytes


def test_a_flattened_peak_is_flat_in_what_it_grew_with() -> None:
    model, mesh = load_model("paper-120b"), MeshShape(16, sequence=16, expert=16, vocab=16)
    short, long = (predict(RunShape(model, BatchShape(s), mesh), ALL_ON).peaks for s in (2**20, 2**22))
    assert long["vocab"] - short["vocab"] <= 2 * (2**18 - 2**16) * model.hidden * 4  # the hidden gradients alone
    assert long["boundary"] == 4 * short["boundary"]  # two boundaries, whatever the depth
    assert long["optimizer"] == short["optimizer"]


def test_one_rank_gathers_copies_in_another_type_only() -> None:
    shape = RunShape(load_model("qwen3-30b-a3b"), BatchShape(8192), MeshShape(1))
    copied = replace(shape, dtypes=Dtypes("float32", "float32"))
    assert predict(shape).peaks["gathered"] < predict(copied).peaks["gathered"]
    assert "block at work, gathered" not in held(shape, Moment.BACKWARD)
    two = held(replace(shape, mesh=MeshShape(2)), Moment.BACKWARD)
    assert held(copied, Moment.BACKWARD)["block at work, gathered"] == two["block at work, gathered"]


def test_expert_layers_count_among_the_gathered() -> None:
    """With experts spread over all ranks nothing of them is gathered; without, a whole block is, twice."""
    model = load_model("qwen3-30b-a3b")
    alone, spread = (
        predict(RunShape(model, BatchShape(8192), MeshShape(8, expert=e))).peaks["gathered"] for e in (1, 8)
    )
    experts = 128 * 3 * 2048 * 768 * 2
    assert alone - spread >= 2 * experts


def test_the_router_loss_before_5_16_is_plains_one_hot_and_nobody_elses() -> None:
    """huggingface/transformers#48131: 48.00 GiB at 131,072 tokens; the function's whole peak was measured at 81.2 GB
    for 128K and 20.5 GB for 32K tokens, and 0.25 GB once it counts layer by layer."""
    model = with_router_loss(load_model("qwen3-30b-a3b"), "5.15.1")
    for tokens, measured in ((131_072, 81.2e9), (32_768, 20.5e9)):
        seen = held(RunShape(model, BatchShape(tokens), MeshShape(8)), Moment.LOSS)
        names = ("one-hot of the chosen experts", "its float32 copy", "router logits of all blocks", "their softmax")
        assert sum(seen[name] for name in names) == pytest.approx(measured, rel=0.05)
    shape = RunShape(model, BatchShape(131_072), MeshShape(8))
    assert held(shape, Moment.LOSS)["one-hot of the chosen experts"] == 48 * GiB
    assert "one-hot of the chosen experts" not in {e.tensor for e in program_entries(shape, ALL_ON)}


@pytest.mark.parametrize(
    ("version", "one_hot"), [("4.57.6", True), ("5.15.1", True), ("5.16.0", False), ("5.24.0", False)]
)
def test_transformers_since_5_16_builds_no_one_hot(version: str, one_hot: bool) -> None:
    shape = RunShape(with_router_loss(load_model("qwen3-30b-a3b"), version), BatchShape(8192), MeshShape(8))
    seen = held(shape, Moment.LOSS)
    assert ("one-hot of the chosen experts" in seen) == one_hot
    assert seen["router logits of all blocks"] == 48 * 8192 * 128 * 2


def test_a_version_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"5\.15 or 4\.57\.1"):
        with_router_loss(load_model("qwen3-30b-a3b"), "main")


def test_scores_are_counted_where_no_fused_kernel_knows_the_sinks() -> None:
    shape = RunShape(load_model("gpt-oss-20b"), BatchShape(1024, batch=4), MeshShape(8))
    scores = 4 * 64 * 1024**2 * 2
    assert held(shape, Moment.BACKWARD)["scores, materialised"] == scores
    assert held(shape, Moment.ATTENTION)["scores' gradients"] == 2 * scores
    fused = replace(shape, attention="fused")
    assert "scores, materialised" not in held(fused, Moment.BACKWARD)


def test_attentions_backward_shares_its_outputs_gradient_with_the_residual() -> None:
    shape = RunShape(load_model("qwen3-30b-a3b"), BatchShape(8192), MeshShape(8))
    one = 8192 * 2048 * 2
    assert held(shape, Moment.ATTENTION)["gradients of the hidden state"] == one
    assert held(shape, Moment.BACKWARD)["gradients of the hidden state"] == one
    assert held(shape, Moment.BACKWARD)["gradient through the router"] == one


def test_latent_attention_holds_its_latents_and_expanded_keys() -> None:
    shape = RunShape(load_model("deepseek-v3"), BatchShape(4096), MeshShape(64))
    kept = held(shape, Moment.ATTENTION)
    assert kept["queries, keys, values, output"] == 4096 * 2 * 128 * (192 + 192 + 128 + 128)
    assert kept["projections before them"] == 4096 * (8 * (1536 + 512) + 2 * 128 * 128)


def test_ulysses_repeats_keys_up_to_one_head_a_rank() -> None:
    model = load_model("qwen3-30b-a3b")
    two, thirty_two = (
        held(RunShape(model, BatchShape(8192 * d), MeshShape(32, sequence=d)), Moment.ATTENTION) for d in (2, 32)
    )
    more = thirty_two["queries, keys, values, output"] - two["queries, keys, values, output"]
    assert more == 8192 * 2 * 2 * (32 - 4) * 128


def test_the_first_step_has_no_optimizer_state_before_its_update() -> None:
    shape = RunShape(load_model("llama-3.1-8b"), BatchShape(32_768), MeshShape(8), dtypes=FLOAT32)
    phases = forecast(shape).phases
    assert phases["steady step"] - phases["first step"] == 8 * -(-8_030_261_248 // 8)
    assert phases["load"] < phases["evaluation"] < phases["steady step"]


def test_host_memory_is_told_per_node_too() -> None:
    shape = RunShape(load_model("qwen3-30b-a3b"), BatchShape(8192), MeshShape(16, ranks_per_node=8))
    seen = forecast(shape, ALL_ON)
    assert seen.ledger.host_bytes > 12 * 30.5e9 / 16
    assert seen.host_bytes_per_node == 8 * seen.ledger.host_bytes


def test_a_head_cut_over_fewer_ranks_weighs_more_on_each() -> None:
    model = load_model("qwen3-30b-a3b")
    vocab_on = {**PLAIN, "vocab": ALL_ON["vocab"]}
    weights = {
        p: predict(RunShape(model, BatchShape(8192), MeshShape(64, vocab=p)), vocab_on).peaks["weights"]
        for p in (8, 64)
    }
    table = model.vocab * model.hidden * 2
    assert weights[8] - weights[64] == pytest.approx(table / 8 - table / 64, rel=1e-6)


_entries = st.builds(
    Entry,
    st.sampled_from(OWNERS),
    st.just("t"),
    st.integers(0, 2**40),
    st.frozensets(st.sampled_from(sorted(STEP)), min_size=1),
    st.sampled_from(["device", "host"]),
)


@settings(deadline=None)
@given(st.lists(_entries, max_size=8), _entries)
def test_the_peak_never_falls_when_an_entry_is_added(entries: list[Entry], more: Entry) -> None:
    before, after = Ledger.from_entries(entries), Ledger.from_entries([*entries, more])
    assert after.device_peak_bytes >= before.device_peak_bytes
    assert after.host_bytes >= before.host_bytes
    assert all(after.peaks[owner] >= size for owner, size in before.peaks.items())


@settings(deadline=None, max_examples=200)
@given(
    tokens=st.sampled_from([1024, 4096, 16_384, 65_536]),
    layers=st.integers(1, 8),
    world=st.sampled_from([1, 2, 8]),
    on=st.sets(st.sampled_from(NAMES)),
)
def test_the_peak_grows_with_tokens_and_layers(tokens: int, layers: int, world: int, on: set[str]) -> None:
    model: ModelShape = replace(load_model("olmoe-1b-7b"), num_layers=layers)
    policies = {name: ALL_ON[name] if name in on else OFF for name in NAMES}

    def peak(model: ModelShape, tokens: int) -> int:
        return predict(RunShape(model, BatchShape(tokens), MeshShape(world)), policies).device_peak_bytes

    assert peak(model, 2 * tokens) >= peak(model, tokens)
    assert peak(replace(model, num_layers=layers + 1), tokens) >= peak(model, tokens)


def _logits(tokens: int, model: ModelShape, bytes_an_element: int, tensor: int = 1) -> float:
    return tokens * model.vocab * bytes_an_element / tensor / GiB


def test_qwen3_32b_under_tensor_parallelism_grows_as_counted() -> None:
    """pytorch/torchtitan#1690: 43.45 GiB at 16 sequences of 4,096, 70.79 GiB at 32, FSDP 4 x TP 8, full recompute.

    torch's loss-parallel backward holds bf16 logits (2), the log-softmax, the one-hot gradient, their sum and its
    product with the upstream factor (4 x 4); sequence parallelism divides the block inputs.
    """
    model, tokens = load_model("qwen3-32b"), 16 * 4096
    boundaries = model.num_layers * tokens * model.hidden * 2 / 8 / GiB
    gathered_hidden = 2 * tokens * model.hidden * 2 / GiB  # into the head, and its gradient
    slope = _logits(tokens, model, 2 + 4 * 4, tensor=8) + boundaries + gathered_hidden
    assert slope == pytest.approx(70.79 - 43.45, rel=0.05)


@pytest.mark.parametrize(("measured", "logits_in_bf16"), [(16.8, 0), (18.2, 2)])
def test_measured_bytes_of_plain_cross_entropy_are_counted_tensors(measured: float, logits_in_bf16: int) -> None:
    """PrimeIntellect-ai/prime-rl, reserved bytes x N x V: the float32 copy is held by the caller, and at the upper
    end the bf16 logits that it was made of too. transformers frees the copy, which makes 14, or 12 without outputs."""
    shape = RunShape(load_model("qwen3-0.6b"), BatchShape(65_536))
    elements = 65_536 * shape.model.vocab
    copied = replace(shape, dtypes=Dtypes("float32", "float32", "float32", "float32"), keeps_outputs=True)
    assert predict(copied).peaks["vocab"] / elements + logits_in_bf16 == pytest.approx(measured, rel=0.05)
    assert predict(shape).peaks["vocab"] == 14 * elements
    assert predict(replace(shape, keeps_outputs=False)).peaks["vocab"] == 12 * elements
