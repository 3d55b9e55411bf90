"""What a config.json says of weights, KV cells and state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.engines.sglang.model_shape import ModelShape, ShapeError

MODELS = Path(__file__).parents[1] / "fixtures" / "models"
GIB = 1 << 30
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_attention_heads": 32,
    "head_dim": 128,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


def shape(name: str, **options: str) -> ModelShape:
    return ModelShape.from_config(json.loads((MODELS / f"{name}.json").read_text()), **options)


def test_weights_of_the_27b_shape_are_what_the_h200_loaded() -> None:
    read = shape("qwen27b")
    assert read.weight_bytes / GIB == pytest.approx(50.33, rel=0.002)
    assert read.draft is not None
    assert read.draft.weight_bytes / GIB == pytest.approx(5.53, abs=0.01)
    # 25.35 GiB were free after the draft's pool, 29.97 when capture began, 0.13 of it taken by then.
    assert read.draft.shared_bytes / GIB == pytest.approx(29.97 - 25.35 + 0.13, abs=0.03)


def test_weights_of_the_tiny_shape_are_what_the_h200_loaded() -> None:
    read = shape("qwentiny")
    assert read.weight_bytes / GIB == pytest.approx(1.36, rel=0.02)
    assert read.draft is not None
    assert read.draft.weight_bytes / GIB == pytest.approx(0.98, rel=0.01)


def test_state_and_cell_are_what_sglang_computes() -> None:
    read = shape("qwen27b")
    assert read.state_bytes() == 153_944_064
    assert read.state_bytes("bfloat16") == 78_446_592
    assert read.kv_bytes_per_token() == 65_536
    assert read.kv_bytes_per_token("fp8_e4m3") == 32_768
    assert (read.linear_layers, read.full_layers) == (48, 16)


def test_a_vision_tower_of_27_layers_costs_what_the_card_says() -> None:
    more = shape("qwen3.6-27b").weight_bytes - shape("qwen27b").weight_bytes
    assert more / GIB == pytest.approx(0.7, abs=0.15)


def test_dense_model_has_the_parameters_of_its_card() -> None:
    read = ModelShape.from_config(LLAMA_8B)
    assert read.parameters == pytest.approx(8.03e9, rel=0.001)
    assert read.state_bytes() == 0
    assert read.kv_bytes_per_token() == 32 * 8 * 128 * 2 * 2
    assert read.draft is None


def test_mixture_of_experts_reads_only_its_active_parameters() -> None:
    read = ModelShape.from_config(QWEN3_30B_A3B)
    assert read.parameters == pytest.approx(30.5e9, rel=0.01)
    assert read.active_parameters == pytest.approx(3.3e9 - 151936 * 2048, rel=0.05)
    assert read.expert_bytes > 0.9 * read.weight_bytes


@pytest.mark.parametrize(("method", "share"), [("fp8", 0.5), ("awq", 0.26), ("gptq", 0.26), ("modelopt_fp4", 0.28)])
def test_quantisation_shrinks_the_matrices_and_leaves_embedding_and_head(method: str, share: float) -> None:
    plain, quantized = ModelShape.from_config(LLAMA_8B), ModelShape.from_config(LLAMA_8B, quantization=method)
    matrices = plain.weight_bytes - 2 * 2 * 128256 * 4096 - 131072 * 128 * 4
    saved = plain.weight_bytes - quantized.weight_bytes
    assert saved / matrices == pytest.approx(1 - share, abs=0.01)


def test_quantisation_of_the_checkpoint_is_read_from_its_config() -> None:
    described = {**LLAMA_8B, "quantization_config": {"quant_method": "fp8"}}
    assert ModelShape.from_config(described) == ModelShape.from_config(LLAMA_8B, quantization="fp8")


def test_two_gpus_hold_half_each() -> None:
    whole, half = shape("qwen27b"), shape("qwen27b").sharded(2)
    assert half.weight_bytes * 2 == whole.weight_bytes
    assert half.kv_bytes_per_token() * 2 == whole.kv_bytes_per_token()
    assert half.state_bytes() * 2 == whole.state_bytes()


def test_what_cannot_be_read_is_named() -> None:
    with pytest.raises(ShapeError, match="hidden_size"):
        ModelShape.from_config({"architectures": ["X"], "vocab_size": 3})
    with pytest.raises(ShapeError, match="mamba"):
        ModelShape.from_config({**LLAMA_8B, "layer_types": ["mamba"] * 32})
    with pytest.raises(ShapeError, match="quantization 'q9' is not known"):
        ModelShape.from_config(LLAMA_8B, quantization="q9")
