"""Models that the experiments share; nothing in the library depends on them."""

from spmdtrain.models.generation import (
    GenerationOptions,
    NewTokens,
    completion_log_probs,
    generate,
    in_order,
    stream,
)
from spmdtrain.models.layers import MLP, MLP_RULES, RoutedExperts, Routing, mlp_rules, peak_load
from spmdtrain.models.llama import (
    LLAMA_AXIS_RULES,
    LinearRopeScaling,
    Llama,
    Llama3RopeScaling,
    LlamaConfig,
)
from spmdtrain.models.mobilenet import MobileNetV2
from spmdtrain.models.transformer import (
    GPT2_RULES,
    TRANSFORMER_RULES,
    Transformer,
    TransformerConfig,
)
from spmdtrain.models.vit import VIT_AXIS_RULES, ViT, ViTConfig

__all__ = [
    "GPT2_RULES",
    "LLAMA_AXIS_RULES",
    "MLP",
    "MLP_RULES",
    "TRANSFORMER_RULES",
    "VIT_AXIS_RULES",
    "GenerationOptions",
    "LinearRopeScaling",
    "Llama",
    "Llama3RopeScaling",
    "LlamaConfig",
    "MobileNetV2",
    "NewTokens",
    "RoutedExperts",
    "Routing",
    "Transformer",
    "TransformerConfig",
    "ViT",
    "ViTConfig",
    "completion_log_probs",
    "generate",
    "in_order",
    "mlp_rules",
    "peak_load",
    "stream",
]
