"""Hugging Face checkpoint folders: untrusted input, planned output, quantization_config."""

from __future__ import annotations

from marlinq.checkpoint.ahead import ReadAhead, lock_ring_early
from marlinq.checkpoint.behind import CopyBehind, WriteBehind
from marlinq.checkpoint.derived import TRANSPOSED_WEIGHTS, DerivedCheckpoint, dequantized, model_dtype
from marlinq.checkpoint.header import TensorInfo, TensorPlan
from marlinq.checkpoint.quantization_config import (
    read_quantization_config,
    replace_quantization_config,
    without_quantization_config,
)
from marlinq.checkpoint.quantized import QuantizedCheckpoint, floating_linears, misplaced
from marlinq.checkpoint.reader import EVALUATION, MANIFEST, Checkpoint
from marlinq.checkpoint.tying import says_tied, untied_config
from marlinq.checkpoint.writer import DEFAULT_MAX_SHARD_BYTES, CheckpointWriter, check_place

__all__ = [
    "DEFAULT_MAX_SHARD_BYTES",
    "EVALUATION",
    "MANIFEST",
    "TRANSPOSED_WEIGHTS",
    "Checkpoint",
    "CheckpointWriter",
    "CopyBehind",
    "DerivedCheckpoint",
    "QuantizedCheckpoint",
    "ReadAhead",
    "TensorInfo",
    "TensorPlan",
    "WriteBehind",
    "check_place",
    "dequantized",
    "floating_linears",
    "lock_ring_early",
    "misplaced",
    "model_dtype",
    "read_quantization_config",
    "replace_quantization_config",
    "says_tied",
    "untied_config",
    "without_quantization_config",
]
