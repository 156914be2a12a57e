"""What a run is, in integers: model, batch, mesh and machine.

The letters of the design are the field names' meaning: W ranks in the job, D ranks of the sequence (Ulysses) group,
E_p ranks of the expert group, P ranks of the vocabulary group, N tokens on one rank = batch * S / D.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from steppe.core.errors import ConfigError

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True)
class ModelShape:
    """Widths and counts of one model, as its `config.json` gives them."""

    model_type: str
    hidden: int  # H
    num_layers: int  # L
    vocab: int  # V
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dense_width: int  # width of a dense block's MLP
    num_experts: int = 0  # E, 0 for a dense model
    experts_per_token: int = 0  # k
    expert_width: int = 0  # I
    num_shared_experts: int = 0
    shared_expert_width: int = 0
    num_dense_layers: int = 0  # leading blocks without experts
    tied: bool = False
    value_head_dim: int = 0  # differs from head_dim under MLA
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    sliding_window: int = 0
    has_attention_bias: bool = False
    has_expert_bias: bool = False
    has_attention_sinks: bool = False  # no fused backward in eager stacks: scores are materialised
    has_qk_norm: bool = False
    qk_norm_over_heads: bool = False  # one norm over all heads together (OLMoE) instead of one head's width
    has_router_loss: bool = False  # the auxiliary loss is on
    has_router_one_hot: bool = False  # and built over a one-hot of all layers, as transformers before 5.16 does
    has_float32_routes: bool = False  # the model's own code weighs narrow rows of experts by float32 route weights
    extra_parameters: int = 0  # dense parameters that the config doesn't describe (a vision tower, adapters)

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers if self.num_experts else 0


@dataclass(frozen=True)
class BatchShape:
    """Sequences of `seq_len` tokens (S), `batch` of them on one data-parallel rank and micro-batch."""

    seq_len: int
    batch: int = 1
    micro_batches: int = 1


@dataclass(frozen=True)
class MeshShape:
    """Group sizes over the W ranks of a job."""

    world: int = 1  # W
    sequence: int = 1  # D
    expert: int = 1  # E_p
    vocab: int = 1  # P
    tensor: int = 1  # TP and PP only describe other stacks' runs; steppe itself leaves them at 1
    pipeline: int = 1
    ranks_per_node: int = 8
    zero: int = 3  # 3 as FSDP2; 2 keeps whole weights on every rank, 1 whole gradients too, 0 shards nothing

    def __post_init__(self) -> None:
        for name, size in (("D", self.sequence), ("E_p", self.expert), ("P", self.vocab)):
            if size < 1 or self.world % size:
                divisors = ", ".join(str(n) for n in range(1, min(self.world, 2**12) + 1) if self.world % n == 0)
                raise ConfigError(
                    f"group size {name}", got=size, allowed=f"a divisor of the {self.world} ranks ({divisors})",
                    remedy=f"choose {name} among these",
                )  # fmt: skip

    @property
    def num_nodes(self) -> int:
        return -(-self.world // self.ranks_per_node)


@dataclass(frozen=True)
class MachineShape:
    """Rates and capacities of one device and its share of the host. Rates are bytes or operations per second."""

    device_memory_bytes: int = 80 * 10**9
    host_memory_bytes: int = 10**12  # per node
    to_host_rate: float = 16e9  # the prior: PCIe gen4 x8 each way
    to_device_rate: float = 16e9
    host_memory_rate: float = 100e9  # per node
    network_rate: float = 25e9  # per rank
    matmul_rate: float = 400e12
    adamw_rate: float = 1e9  # parameters per second of one node's host
    numa_nodes: int = 1
    page_lock_bytes: int | None = None  # None: unlimited
    device: str = "accelerator"  # or "cpu": tiles are smaller there, 16-bit operands are cast, nothing overlaps

    @property
    def on_accelerator(self) -> bool:
        return self.device != "cpu"


@dataclass(frozen=True)
class Dtypes:
    """Storage types of a run."""

    weight: str = "bfloat16"
    gradient: str = "bfloat16"
    state: str = "float32"
    activation: str = "bfloat16"

    @property
    def weight_bytes(self) -> int:
        return DTYPE_BYTES[self.weight]

    @property
    def gradient_bytes(self) -> int:
        return DTYPE_BYTES[self.gradient]

    @property
    def state_bytes(self) -> int:
        return DTYPE_BYTES[self.state]

    @property
    def activation_bytes(self) -> int:
        return DTYPE_BYTES[self.activation]


@dataclass(frozen=True)
class RunShape:
    """Everything that memory depends on; `tokens_per_rank` is N."""

    model: ModelShape
    batch: BatchShape
    mesh: MeshShape = field(default_factory=MeshShape)
    machine: MachineShape = field(default_factory=MachineShape)
    dtypes: Dtypes = field(default_factory=Dtypes)
    attention: str = "auto"  # "fused", "materialised" (scores are built), or what the model's code can do
    keeps_outputs: bool | None = None  # the caller holds the model's outputs, its logits, until the backward is over

    def __post_init__(self) -> None:
        if self.attention not in ("auto", "fused", "materialised"):
            raise ConfigError(
                "attention", got=repr(self.attention), allowed="auto, fused or materialised",
                remedy="fused where the kernel has a backward for this model",
            )  # fmt: skip
        if self.batch.seq_len % self.mesh.sequence:
            raise ConfigError(
                "sequence length", got=f"S {self.batch.seq_len} over D {self.mesh.sequence} ranks",
                allowed="a multiple of D", remedy="pad the sequences or choose another D",
            )  # fmt: skip

    @property
    def holds_logits(self) -> bool:
        """Whether `out = model(...)` keeps the logits through the backward: unless told, 16-bit programs are taken to
        (2 bytes an element beside the float32 tensors of the loss), float32 ones not to, as the published one."""
        return self.dtypes.activation_bytes < 4 if self.keeps_outputs is None else self.keeps_outputs

    @property
    def tokens_per_rank(self) -> int:
        return self.batch.batch * self.batch.seq_len // self.mesh.sequence


def shard_bounds(length: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Start and end of each part under DTensor's Shard rule: ceil-sized chunks, later ones shorter or empty."""
    step = -(-length // parts) if length else 0
    return tuple((min(i * step, length), min((i + 1) * step, length)) for i in range(parts))
