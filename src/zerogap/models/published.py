"""Facts of published models that recipes name: the keys of their `config.json` that decide tensors and arithmetic.

They let a recipe be planned, shrunk and tested on a machine that has none of the model's files. Where there are files,
those count; a run never computes with a model that it did not read. Sources: the `config.json` of each model on the
hub, in its spelling.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_LLAMA_3_1_8B = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
_QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_MOONLIGHT_16B_A3B = {
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.446,
    "num_nextn_predict_layers": 0,
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
}

PUBLISHED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_3_1_8B,
        "Qwen/Qwen3-30B-A3B": _QWEN3_30B_A3B,
        "Qwen/Qwen3-30B-A3B-Instruct-2507": {
            **_QWEN3_30B_A3B,
            "rope_theta": 10000000.0,
            "max_position_embeddings": 262144,
        },
        "moonshotai/Moonlight-16B-A3B-Instruct": _MOONLIGHT_16B_A3B,
    }
)
"""`config.json` by hub id."""
