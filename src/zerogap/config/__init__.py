"""The run recipe: every setting of a training run, checked before anything is loaded.

A recipe is a short YAML file; `a.b=c` words on the command line override single keys. Unknown keys are refused, a value
that cannot be honoured is refused with the valid ones, and what a run used is stored complete (`RunConfig.to_yaml`), so
that nothing depends on a default that may change. Leaf names are those of TRL where TRL has the setting.

This module imports neither torch nor a model library, so that a recipe can be checked in an instant.
"""

from zerogap.config.algorithm import ALGORITHMS, AlgorithmConfig
from zerogap.config.correction import CorrectionConfig
from zerogap.config.course import CheckpointConfig, EvalConfig, LoggingConfig, OptimizerConfig, ParityConfig
from zerogap.config.data import DataConfig, DataSource, RewardConfig, RewardEntry
from zerogap.config.moe import MoEConfig
from zerogap.config.reading import apply_overrides, iter_fields, load_config
from zerogap.config.recipe import RunConfig, contract_of
from zerogap.config.rollout import RolloutConfig
from zerogap.config.section import Section

__all__ = [
    "ALGORITHMS",
    "AlgorithmConfig",
    "CheckpointConfig",
    "CorrectionConfig",
    "DataConfig",
    "DataSource",
    "EvalConfig",
    "LoggingConfig",
    "MoEConfig",
    "OptimizerConfig",
    "ParityConfig",
    "RewardConfig",
    "RewardEntry",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "apply_overrides",
    "contract_of",
    "iter_fields",
    "load_config",
]
