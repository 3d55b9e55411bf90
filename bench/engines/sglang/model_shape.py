"""Model shape: what a Hugging Face config.json says of sizes that decide memory and speed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "bf16": 2.0,
    "float16": 2.0,
    "half": 2.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "mxfp8": 1.0 + 1 / 32,  # one scale byte per 32 values
    "nvfp4": 0.5 + 1 / 16,  # one fp8 scale per 16 values
    "fp4_e2m1": 0.5 + 1 / 16,
    "fp4_mx_block16": 0.5 + 1 / 16,
}

# Bytes per weight of the quantised matrices of decoder layers; embedding, head, norms and vision stay as they are.
QUANTIZED_BYTES = {
    "fp8": 1.0 + 4 / 128**2,  # one float32 scale per block of 128 x 128
    "w8a8_fp8": 1.0,
    "w8a8_int8": 1.0,
    "modelopt": 1.0,
    "modelopt_fp8": 1.0,
    "mxfp8": 1.0 + 1 / 32,
    "awq": 0.5 + 2.5 / 128,  # groups of 128: a 16 bit scale and a 4 bit zero point each
    "awq_marlin": 0.5 + 2.5 / 128,
    "gptq": 0.5 + 2.5 / 128,
    "gptq_marlin": 0.5 + 2.5 / 128,
    "modelopt_fp4": 0.5 + 1 / 16,  # groups of 16: one fp8 scale each
    "nvfp4": 0.5 + 1 / 16,
    "nvfp4_online": 0.5 + 1 / 16,
    "petit_nvfp4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
}

# Architectures whose checkpoint holds one MTP layer without a key in config.json that says so.
MTP_WITHOUT_KEY = ("Qwen3NextForCausalLM", "Qwen3_5", "MiMoForCausalLM")


class ShapeError(ValueError):
    """The config lacks something, or describes a kind of layer that is not known here; the message says what."""


@dataclass(frozen=True)
class DraftShape:
    """A draft model of speculative decoding.

    Attributes:
        weight_bytes: as loaded. An MTP layer loads its own embedding and head beside the target's (5.53 GiB seen
            for Qwen3.6-27B on SGLang 0.5.15).
        shared_bytes: the part of it that is freed once embedding and head are shared, after the pools were sized.
        step_bytes: read for one draft step (its layers and the head).
        step_parameters: multiplied with per token and draft step.
        kv_elements: keys and values per token over its layers.
        from_path: it is a model of its own (``--speculative-draft-model-path``), not an MTP layer of the checkpoint.
    """

    layers: int
    weight_bytes: float
    shared_bytes: float
    step_bytes: float
    step_parameters: float
    kv_elements: int
    from_path: bool = False


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model on one GPU (see ``sharded``).

    Attributes:
        layers: decoder layers; ``full_layers`` of them keep keys and values, ``linear_layers`` a state.
        parameters: of the target model, vision tower included, MTP layers not.
        weight_bytes: of the target as loaded, with its rotary cache.
        dense_bytes: of it what every decode step reads: no embedding table, no vision tower, no routed experts.
        expert_bytes: of all routed experts; a step reads the share that its tokens choose.
        experts, experts_per_token: 0 where the model is dense.
        active_parameters: multiplied with per token (head and chosen experts included, embedding not).
        kv_elements: keys and values per token over all full-attention layers.
        ssm_elements, conv_elements: of one request's state over all linear layers; the convolution keeps the last
            ``conv_taps`` columns.
        ssm_dtype: of the state where no flag says otherwise.
        attention_flops_per_key: of one query token against one earlier token, over all full-attention layers.
        activation_bytes_per_token: the largest intermediates of one layer, a lower bound of what prefill needs.
    """

    architecture: str
    layers: int
    full_layers: int
    linear_layers: int
    hidden_size: int
    vocabulary_size: int
    context_length: int
    parameters: float
    weight_bytes: float
    dense_bytes: float
    expert_bytes: float
    experts: int
    experts_per_token: int
    active_parameters: float
    kv_elements: int
    ssm_elements: int
    conv_elements: int
    conv_taps: int
    ssm_dtype: str
    attention_flops_per_key: float
    activation_bytes_per_token: float
    vision_layers: int
    vision_hidden_size: int
    draft: DraftShape | None = None

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        *,
        quantization: str | None = None,
        draft_config: Mapping[str, Any] | None = None,
    ) -> ModelShape:
        """Read a config.json, flat or with a ``text_config``.

        Dense Llama- and Qwen-like models, mixtures of experts, hybrids with gated delta nets (Qwen3-Next, 3.5, 3.6).

        Args:
            quantization: as ``--quantization``; None takes the config's ``quantization_config``.
            draft_config: config.json of a draft model, where it is not the checkpoint's own MTP layers.

        Raises:
            ShapeError: a size is missing, or a layer is of a kind that is not known here.
        """
        return _Reader(config, quantization).shape(draft_config)

    @property
    def multimodal(self) -> bool:
        return self.vision_layers > 0

    def kv_bytes_per_token(self, dtype: str = "auto") -> float:
        """Bytes of one token's keys and values (a cell) over all full-attention layers."""
        return self.kv_elements * kv_dtype_bytes(dtype)

    def state_bytes(self, ssm_dtype: str | None = None) -> int:
        """Bytes of one state slot: recurrent state and convolution window of all linear layers."""
        return int(self.ssm_elements * DTYPE_BYTES[ssm_dtype or self.ssm_dtype] + self.conv_elements * 2)

    def sharded(self, gpus: int) -> ModelShape:
        """What one GPU of ``gpus`` holds under tensor parallelism: everything divided, which leaves out the few
        tensors that are replicated."""
        if gpus == 1:
            return self
        weights = ("parameters", "weight_bytes", "dense_bytes", "expert_bytes", "active_parameters")
        caches = ("kv_elements", "ssm_elements", "conv_elements", "attention_flops_per_key")
        divided = (*weights, *caches)
        draft = self.draft and dataclasses.replace(
            self.draft,
            weight_bytes=self.draft.weight_bytes / gpus,
            shared_bytes=self.draft.shared_bytes / gpus,
            step_bytes=self.draft.step_bytes / gpus,
            step_parameters=self.draft.step_parameters / gpus,
            kv_elements=self.draft.kv_elements // gpus,
        )
        values: dict[str, Any] = {name: type(getattr(self, name))(getattr(self, name) / gpus) for name in divided}
        return dataclasses.replace(self, draft=draft, **values)


def kv_dtype_bytes(dtype: str) -> float:
    """Bytes of one key or value; ``auto`` is taken for 16 bit, as every checkpoint here computes in it."""
    if dtype == "auto":
        return 2.0
    try:
        return DTYPE_BYTES[dtype]
    except KeyError:
        raise ShapeError(f"KV cache dtype {dtype!r} is not known; known are auto, {', '.join(DTYPE_BYTES)}") from None


@dataclass(frozen=True)
class _Layer:
    """Parameters of one decoder layer: quantisable matrices, small tensors, and routed experts apart."""

    matrices: float
    small: float
    experts: float
    active_experts: float

    def bytes(self, quantized: float, dtype: float) -> tuple[float, float]:
        return self.matrices * quantized + self.small * dtype, self.experts * quantized


class _Reader:
    """Reads one config.json."""

    def __init__(self, config: Mapping[str, Any], quantization: str | None) -> None:
        self.config = config
        self.text: Mapping[str, Any] = config.get("text_config") or config
        names = config.get("architectures") or self.text.get("architectures") or ["unknown"]
        self.architecture = str(names[0])
        self.hidden = self.size("hidden_size")
        self.vocabulary = self.size("vocab_size")
        self.layers = self.size("num_hidden_layers")
        self.query_heads = self.size("num_attention_heads")
        self.kv_heads = int(self.text.get("num_key_value_heads") or self.query_heads)
        self.head_dim = int(self.text.get("head_dim") or self.hidden // self.query_heads)
        if self.text.get("kv_lora_rank"):
            raise ShapeError(
                f"{self.architecture}: multi-head latent attention (kv_lora_rank) is not described here; "
                "search it with search.forecast=off"
            )
        dtype = str(self.text.get("dtype") or self.text.get("torch_dtype") or config.get("torch_dtype") or "bfloat16")
        self.dtype_bytes = DTYPE_BYTES.get(dtype.removeprefix("torch."), 2.0)
        self.quantized_bytes = self.weight_width(quantization)

    def size(self, name: str) -> int:
        value = self.text.get(name)
        if not isinstance(value, int):
            raise ShapeError(f"config.json of {self.config.get('architectures')} has no {name}; seen {value!r}")
        return value

    def weight_width(self, quantization: str | None) -> float:
        described = self.config.get("quantization_config") or self.text.get("quantization_config") or {}
        method = str(quantization or described.get("quant_method") or "")
        if not method:
            return self.dtype_bytes
        if method == "compressed-tensors":
            groups = described.get("config_groups") or {}
            bits = [float((group.get("weights") or {}).get("num_bits") or 16) for group in groups.values()]
            return max(bits, default=16.0) / 8 * (1 + 1 / 32)
        if method in ("gptq", "awq", "gptq_marlin", "awq_marlin") and described.get("bits"):
            return float(described["bits"]) / 8 + 2.5 / float(described.get("group_size") or 128)
        if method == "modelopt" and "FP4" in str(described.get("quant_algo")):
            method = "modelopt_fp4"
        try:
            return QUANTIZED_BYTES[method]
        except KeyError:
            known = ", ".join(QUANTIZED_BYTES)
            raise ShapeError(f"quantization {method!r} is not known here; known are {known}") from None

    def layer_kinds(self) -> list[str]:
        kinds = self.text.get("layer_types")
        if not kinds:
            interval = self.text.get("full_attention_interval") or self.text.get("full_attn_interval")
            if interval and self.text.get("linear_num_value_heads"):
                kinds = [
                    "full_attention" if (index + 1) % interval == 0 else "linear_attention"
                    for index in range(self.layers)
                ]
            else:
                kinds = ["full_attention"] * self.layers
        unknown = set(kinds) - {"full_attention", "sliding_attention", "chunked_attention", "linear_attention"}
        if unknown:
            raise ShapeError(f"{self.architecture}: layers of kind {sorted(unknown)} are not described here")
        return list(kinds)

    def full_attention(self) -> tuple[float, float]:
        query = self.query_heads * self.head_dim
        gate = 2 if self.text.get("attn_output_gate") or "Qwen3Next" in self.architecture else 1
        matrices = self.hidden * (gate * query + 2 * self.kv_heads * self.head_dim) + query * self.hidden
        return matrices, 2 * self.head_dim

    def linear_attention(self) -> tuple[float, float]:
        """Gated delta net: q, k, v and gate projections, output projection; beta, decay and convolution are small."""
        keys, values = self.linear_widths()
        heads = self.size("linear_num_value_heads")
        matrices = self.hidden * (2 * keys + 2 * values) + values * self.hidden
        small = self.hidden * 2 * heads + (2 * keys + values) * self.convolution + 2 * heads
        return matrices, small + self.size("linear_value_head_dim")

    def linear_widths(self) -> tuple[int, int]:
        keys = self.size("linear_num_key_heads") * self.size("linear_key_head_dim")
        return keys, self.size("linear_num_value_heads") * self.size("linear_value_head_dim")

    @property
    def convolution(self) -> int:
        return int(self.text.get("linear_conv_kernel_dim") or 4)

    @property
    def experts(self) -> int:
        for name in ("num_experts", "n_routed_experts", "num_local_experts"):
            if self.text.get(name):
                return int(self.text[name])
        return 0

    def expert_layer(self, index: int) -> bool:
        """Whether a layer has experts: Qwen's sparse step and dense list, DeepSeek's first dense layers."""
        if not self.experts or index in (self.text.get("mlp_only_layers") or ()):
            return False
        if index < int(self.text.get("first_k_dense_replace") or 0):
            return False
        return (index + 1) % int(self.text.get("decoder_sparse_step") or 1) == 0

    def layer(self, kind: str, index: int) -> _Layer:
        matrices, small = self.linear_attention() if kind == "linear_attention" else self.full_attention()
        small += 2 * self.hidden
        if not self.expert_layer(index):
            return _Layer(matrices + 3 * self.hidden * self.size("intermediate_size"), small, 0, 0)
        expert = 3 * self.hidden * int(self.text.get("moe_intermediate_size") or self.size("intermediate_size"))
        shared = self.text.get("shared_expert_intermediate_size")
        if shared is None:
            shared = int(self.text.get("n_shared_experts") or 0) * int(self.text.get("moe_intermediate_size") or 0)
        matrices += 3 * self.hidden * int(shared)
        small += self.hidden * self.experts
        return _Layer(matrices, small, expert * self.experts, expert * self.experts_per_token)

    @property
    def experts_per_token(self) -> int:
        return int(self.text.get("num_experts_per_tok") or self.text.get("num_experts_per_token") or 1)

    def vision(self) -> tuple[float, int, int]:
        """Parameters, layers and width of a ViT: attention, MLP, patches, positions, merger."""
        vision: Mapping[str, Any] = self.config.get("vision_config") or {}
        layers = int(vision.get("depth") or vision.get("num_hidden_layers") or 0)
        if not layers:
            return 0.0, 0, 0
        width = int(vision.get("hidden_size") or vision.get("embed_dim") or 1024)
        inner = int(vision.get("intermediate_size") or 4 * width)
        merged = width * int(vision.get("spatial_merge_size") or 1) ** 2
        patch = int(vision.get("patch_size") or 14) ** 2 * int(vision.get("temporal_patch_size") or 1)
        parameters = layers * (4 * width * width + 2 * width * inner)
        parameters += width * patch * int(vision.get("in_channels") or vision.get("num_channels") or 3)
        parameters += width * int(vision.get("num_position_embeddings") or 0)
        parameters += merged * merged + merged * int(vision.get("out_hidden_size") or self.hidden)
        return float(parameters), layers, width

    def rotary_bytes(self) -> float:
        """SGLang keeps a float32 table of sines and cosines for every position and rotated dimension."""
        ropes = self.text.get("rope_parameters") or {}
        factor = float(self.text.get("partial_rotary_factor") or ropes.get("partial_rotary_factor") or 1.0)
        return int(self.text.get("max_position_embeddings") or 0) * self.head_dim * factor * 4

    def shape(self, draft_config: Mapping[str, Any] | None) -> ModelShape:
        kinds = self.layer_kinds()
        layers = [self.layer(kind, index) for index, kind in enumerate(kinds)]
        linear, full = kinds.count("linear_attention"), len(kinds) - kinds.count("linear_attention")
        sizes = [layer.bytes(self.quantized_bytes, self.dtype_bytes) for layer in layers]
        embedding = float(self.vocabulary * self.hidden)
        tied = bool(self.config.get("tie_word_embeddings", self.text.get("tie_word_embeddings", False)))
        vision_parameters, vision_layers, vision_hidden = self.vision()
        dense_bytes = sum(dense for dense, _ in sizes) + embedding * self.dtype_bytes
        expert_bytes = sum(experts for _, experts in sizes)
        unread = (0.0 if tied else embedding) + vision_parameters
        ssm = conv = 0
        if linear:
            keys, values = self.linear_widths()
            ssm = linear * values * self.size("linear_key_head_dim")
            conv = linear * (values + 2 * keys) * (self.convolution - 1)
        return ModelShape(
            architecture=self.architecture,
            layers=len(kinds),
            full_layers=full,
            linear_layers=linear,
            hidden_size=self.hidden,
            vocabulary_size=self.vocabulary,
            context_length=int(self.text.get("max_position_embeddings") or 4096),
            parameters=sum(layer.matrices + layer.small + layer.experts for layer in layers) + embedding + unread,
            weight_bytes=dense_bytes + expert_bytes + unread * self.dtype_bytes + self.rotary_bytes(),
            dense_bytes=dense_bytes,
            expert_bytes=expert_bytes,
            experts=self.experts,
            experts_per_token=self.experts_per_token if self.experts else 0,
            active_parameters=sum(layer.matrices + layer.small + layer.active_experts for layer in layers) + embedding,
            kv_elements=full * self.kv_heads * 2 * self.head_dim,
            ssm_elements=ssm,
            conv_elements=conv,
            conv_taps=self.convolution - 1,
            ssm_dtype=str(self.text.get("mamba_ssm_dtype") or "float32"),
            attention_flops_per_key=4.0 * full * self.query_heads * self.head_dim,
            activation_bytes_per_token=2.0 * (2 * self.widest() + 4 * self.hidden),
            vision_layers=vision_layers,
            vision_hidden_size=vision_hidden,
            draft=self.draft(draft_config),
        )

    def widest(self) -> int:
        inner = int(self.text.get("intermediate_size") or 0)
        if self.experts:
            inner = int(self.text.get("moe_intermediate_size") or inner) * self.experts_per_token
        return max(inner, self.query_heads * self.head_dim)

    def draft(self, draft_config: Mapping[str, Any] | None) -> DraftShape | None:
        if draft_config is not None:
            return _external_draft(draft_config)
        layers = int(self.text.get("mtp_num_hidden_layers") or self.text.get("num_nextn_predict_layers") or 0)
        if not layers and self.architecture.startswith(MTP_WITHOUT_KEY):
            layers = 1
        if not layers:
            return None
        layer = self.layer("full_attention", self.layers)
        dense, experts = layer.bytes(self.quantized_bytes, self.dtype_bytes)
        joined = 2 * self.hidden * self.hidden * self.dtype_bytes  # of the embedding and the hidden state
        embedding = self.vocabulary * self.hidden * self.dtype_bytes
        used = self.experts_per_token / self.experts if self.experts else 0.0
        return DraftShape(
            layers=layers,
            weight_bytes=layers * (dense + experts) + joined + 2 * embedding,
            shared_bytes=2 * embedding,
            step_bytes=dense + experts * used + joined + embedding,
            step_parameters=layer.matrices
            + layer.small
            + layer.active_experts
            + (joined + embedding) / self.dtype_bytes,
            kv_elements=layers * self.kv_heads * 2 * self.head_dim,
        )


def _external_draft(config: Mapping[str, Any]) -> DraftShape:
    """A draft model with its own config.json (EAGLE3, DFLASH, STANDALONE): its embedding counts, nothing is shared."""
    shape = _Reader(config, None).shape(None)
    return DraftShape(
        layers=shape.layers,
        weight_bytes=shape.weight_bytes,
        shared_bytes=0.0,
        step_bytes=shape.dense_bytes + shape.expert_bytes * (shape.experts_per_token / max(1, shape.experts)),
        step_parameters=shape.active_parameters,
        kv_elements=shape.kv_elements,
        from_path=True,
    )
