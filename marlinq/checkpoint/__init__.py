"""Hugging Face checkpoint folders: reading untrusted ones, writing planned ones, their
quantization_config."""

from __future__ import annotations

from marlinq.checkpoint.bitmasks import BITMASK_FORMAT, with_dense_weights
from marlinq.checkpoint.dequantized import TRANSPOSED_WEIGHTS, dequantized
from marlinq.checkpoint.derived import DerivedCheckpoint, dtype_contradiction, model_dtype
from marlinq.checkpoint.draft_head import DraftHead, find_draft_head
from marlinq.checkpoint.header import TensorInfo, TensorPlan
from marlinq.checkpoint.quantization_config import (
    parse_quantization_config,
    read_quantization_config,
    replace_quantization_config,
    without_quantization_config,
)
from marlinq.checkpoint.quantized import QuantizedCheckpoint, doubtful_tensors, floating_linears, misplaced
from marlinq.checkpoint.read_ahead import ReadAhead, lock_ring_early
from marlinq.checkpoint.reader import EVALUATION, MANIFEST, Checkpoint
from marlinq.checkpoint.stacked import StackingWriter, check_stacks
from marlinq.checkpoint.tying import own_head, same_values, says_tied, says_untied, untied_config
from marlinq.checkpoint.undeclared import UndeclaredError, damaged_draft
from marlinq.checkpoint.write_behind import CopyBehind, WriteBehind
from marlinq.checkpoint.writer import DEFAULT_MAX_SHARD_BYTES, CheckpointWriter, check_place, kept_json

__all__ = [
    "BITMASK_FORMAT",
    "DEFAULT_MAX_SHARD_BYTES",
    "EVALUATION",
    "MANIFEST",
    "TRANSPOSED_WEIGHTS",
    "Checkpoint",
    "CheckpointWriter",
    "CopyBehind",
    "DerivedCheckpoint",
    "DraftHead",
    "QuantizedCheckpoint",
    "ReadAhead",
    "StackingWriter",
    "TensorInfo",
    "TensorPlan",
    "UndeclaredError",
    "WriteBehind",
    "check_place",
    "check_stacks",
    "damaged_draft",
    "dequantized",
    "doubtful_tensors",
    "dtype_contradiction",
    "find_draft_head",
    "floating_linears",
    "kept_json",
    "lock_ring_early",
    "misplaced",
    "model_dtype",
    "own_head",
    "parse_quantization_config",
    "read_quantization_config",
    "replace_quantization_config",
    "same_values",
    "says_tied",
    "says_untied",
    "untied_config",
    "with_dense_weights",
    "without_quantization_config",
]
