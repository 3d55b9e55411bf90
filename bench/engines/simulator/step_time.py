"""Step times: how long one step of a server takes, from a card's bandwidth and compute and a model's shape.

A roofline with the launch costs of an eager or captured step. Its constants are fitted to what SGLang 0.5.15 printed
for the 27B hybrid on one H200 (``gen throughput`` of steady decode batches; ``python -m benchmarks.simulator`` prints
the fit):

    no speculation, float32 state   1, 8, 16, 24, 32, 40 requests   within 1.3 %
    no speculation, bfloat16 state  1, 8, 16, 32, 64 requests       within 1.3 %
    1 draft step, float32 state     1, 16 requests                  within 3 %

What no run has shown is marked as an assumption below.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.engines.sglang.model_shape import ModelShape
from bench.engines.sglang.settings import Settings
from bench.experiment import HardwareSpec

# Share of a card's nominal bandwidth that reading weights and state reaches (H200: 4.2 and 3.5 of 4.8 TB/s).
WEIGHT_BANDWIDTH_SHARE = 0.88
STATE_BANDWIDTH_SHARE = 0.737
# Share of the nominal compute that a large prefill reaches (8,192 tokens in 0.95 s on the H200).
PREFILL_COMPUTE_SHARE = 0.47
# Of a token's matrix time at nominal compute, what is not hidden behind reading weights (0.021 ms a token, H200).
EXPOSED_COMPUTE_SHARE = 0.4
# More time for weights once several tokens share a step, as a share of the time for one (0.9 of 12.1 ms).
SEVERAL_TOKENS_COST = 0.075
# Per layer: gaps between kernels of a captured step (2.37 ms of 64 layers); launches of an eager step (assumption, as
# 8B models without graphs need about 14 ms for 32 layers); of an eager prefill.
GRAPH_LAYER_S = 0.037e-3
EAGER_LAYER_S = 0.45e-3
PREFILL_LAYER_S = 0.3e-3
# Speculation: per step, and per request for building trees and checking them.
SPECULATION_STEP_S = 0.9e-3
SPECULATION_REQUEST_S = 0.14e-3
# Scheduling on the CPU that overlaps with the GPU unless it is switched off (assumption).
NO_OVERLAP_S = 1.5e-3
# Reading keys and values, as a share of nominal bandwidth, by attention backend (assumptions).
KV_BANDWIDTH_SHARE = {"triton": 0.6, "flashinfer": 0.75, "fa3": 0.8, "fa4": 0.8, "trtllm_mha": 0.8, "torch_native": 0.1}
DEFAULT_BACKEND = {
    "sm90": "fa3",
    "sm100": "trtllm_mha",
    "sm120": "flashinfer",
    "sm89": "flashinfer",
    "sm80": "flashinfer",
}
FP8_KV_SHARE = 0.9  # of it that conversion leaves (assumption)
# Copying to the hierarchical cache takes this share of a step, by write policy (assumption).
HICACHE_COST = {"write_through": 0.01, "write_through_selective": 0.005, "write_back": 0.002}


@dataclass(frozen=True)
class StepTimes:
    """Times of one server, in seconds; ``scale`` multiplies them all (a disturbance).

    Attributes:
        tokens_per_request: that a decode or verify step computes for each request.
        largest_graph: requests up to which a step is captured.
    """

    layers: int
    weights_s: float
    expert_s: float
    experts: int
    experts_per_token: int
    token_s: float
    kv_token_s: float
    state_request_s: float
    draft_s: float
    draft_token_s: float
    tokens_per_request: int
    request_s: float
    fixed_s: float
    largest_graph: int
    attention_pair_s: float
    scale: float = 1.0

    @classmethod
    def of(
        cls,
        settings: Settings,
        shape: ModelShape,
        hardware: HardwareSpec,
        *,
        largest_graph: int,
        write_policy: str = "write_through",
        scale: float = 1.0,
    ) -> StepTimes:
        """Step times of a configuration.

        Args:
            shape: of what one GPU holds.
            largest_graph: largest batch that was captured, 0 where none was.
        """
        weight_rate = hardware.bandwidth_bytes_per_s * WEIGHT_BANDWIDTH_SHARE
        state_rate = hardware.bandwidth_bytes_per_s * STATE_BANDWIDTH_SHARE
        quantized = shape.dense_bytes + shape.expert_bytes < 1.5 * shape.parameters
        flops = hardware.flops_fp8 if quantized else hardware.flops_bf16
        state = shape.state_bytes(settings.ssm_dtype) if shape.linear_layers else 0
        recurrent = state - 2 * shape.conv_elements if state else 0
        verified = settings.draft_tokens if settings.speculative else 1
        # A decode step reads and writes a state; a verify step reads it and writes one for each draft token,
        # unless ReplaySSM keeps only what it takes to redo them.
        moved = 2 * state if verified == 1 or settings.replay_ssm else recurrent * (1 + verified)
        draft = shape.draft if settings.has_draft_model else None
        draft_steps = settings.steps if draft else 0
        backend = settings.attention_backend
        if backend == "auto":
            backend = DEFAULT_BACKEND.get(hardware.architecture, "triton")
        kv_rate = hardware.bandwidth_bytes_per_s * KV_BANDWIDTH_SHARE.get(backend, 0.6)
        if settings.kv_cache_dtype.startswith("fp8"):
            kv_rate *= FP8_KV_SHARE
        hicache = HICACHE_COST.get(write_policy, 0.01) if settings.hierarchical else 0.0
        return cls(
            layers=shape.layers,
            weights_s=shape.dense_bytes / weight_rate,
            expert_s=shape.expert_bytes / weight_rate,
            experts=shape.experts,
            experts_per_token=shape.experts_per_token,
            token_s=2 * shape.active_parameters / flops,
            kv_token_s=shape.kv_bytes_per_token(settings.kv_cache_dtype) / kv_rate,
            state_request_s=moved / state_rate,
            draft_s=draft_steps * (draft.step_bytes / weight_rate) if draft else 0.0,
            draft_token_s=draft_steps * settings.topk * 2 * draft.step_parameters / flops if draft else 0.0,
            tokens_per_request=verified,
            request_s=SPECULATION_REQUEST_S if settings.speculative else 0.0,
            fixed_s=(SPECULATION_STEP_S if settings.speculative else 0.0) + (0.0 if settings.overlap else NO_OVERLAP_S),
            largest_graph=largest_graph,
            attention_pair_s=shape.attention_flops_per_key / (flops * PREFILL_COMPUTE_SHARE),
            scale=scale * (1 + hicache),
        )

    def decode_s(self, requests: int, context_tokens: int) -> float:
        """One decode step (with speculation: draft steps and verification) of a batch.

        Args:
            context_tokens: of all its requests together.
        """
        tokens = requests * self.tokens_per_request
        gpu = self.matrices_s(tokens)
        gpu += context_tokens * self.kv_token_s + requests * self.state_request_s
        gpu += self.draft_s + requests * self.draft_token_s * EXPOSED_COMPUTE_SHARE
        if requests <= self.largest_graph:
            gpu += self.layers * GRAPH_LAYER_S
        else:
            gpu = max(gpu + self.layers * GRAPH_LAYER_S, self.layers * EAGER_LAYER_S)
        return self.scale * (gpu + requests * self.request_s + self.fixed_s)

    def prefill_s(self, tokens: int, pairs: float) -> float:
        """One prefill batch.

        Args:
            tokens: computed in it, cached ones left out.
            pairs: of a token and one that it attends to, summed over the batch.
        """
        return self.scale * (self.matrices_s(tokens) + self.layers * PREFILL_LAYER_S + pairs * self.attention_pair_s)

    def matrices_s(self, tokens: int) -> float:
        """All matrix products of a step with so many tokens: bound by weights, or by compute."""
        weights = self.weights_s
        if self.experts:
            # Each token chooses its experts; the share of all experts that some token chose must be read.
            weights += self.expert_s * (1 - (1 - self.experts_per_token / self.experts) ** tokens)
        compute = tokens * self.token_s
        weights *= 1 + SEVERAL_TOKENS_COST * (1 - 1 / max(1, tokens))
        return max(weights + EXPOSED_COMPUTE_SHARE * compute, compute / PREFILL_COMPUTE_SHARE)
