"""The draft head of a checkpoint (multi-token prediction, MTP): one more decoder block behind the model's.

Behind token t with the model's final hidden state h, and the next token known, it predicts the one after::

    x = projection([token_norm(embedding(next)), hidden_norm(h)]);   h' = final_norm(block(x))

The model's own head makes logits of h', and h' takes the place of h for the token after that. (DeepSeek-AI,
"DeepSeek-V3 Technical Report", 2024, section 2.2.) transformers' model classes leave its tensors out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

_BLOCK = re.compile(r"\.layers\.(\d+)$")
BLOCK_NUMBER = re.compile(r"\.(\d{1,9})\.")
"""A number in a dotted name; the first is that of a block."""
_BLOCK_COUNTS = ("num_hidden_layers", "n_layer", "num_layers")


@dataclass(frozen=True)
class DraftHead:
    """Names of a draft head's parts in a checkpoint.

    Attributes:
        block: prefix of the tensors of its decoder block, with the dot at its end.
        projection: linear from the normed embedding and the normed hidden state to the block's input.
        token_norm, hidden_norm: norms of the embedding and of the hidden state.
        final_norm: norm behind the block.
        layer: number of the block where its name is that of a layer of the model; else None.
    """

    block: str
    projection: str
    token_norm: str
    hidden_norm: str
    final_norm: str
    layer: int | None = None

    @property
    def outside(self) -> tuple[str, ...]:
        """Modules besides the block; some have names inside it. The last two are copies of the model's
        embedding and head, which are not read."""
        inner = (f"{self.block}{name}" for name in ("embed_tokens", "shared_head"))
        return self.projection, self.token_norm, self.hidden_norm, self.final_norm, *inner


def find_draft_head(names: Collection[str]) -> DraftHead | None:
    """The first draft head among the tensors ``names``, or None.

    Two spellings are known: ``mtp.fc``, ``mtp.layers.0`` and so on (Qwen3-Next, Qwen3.5), and the parts
    beside the block's own in a layer behind the model's last, ``model.layers.61.eh_proj`` (DeepSeek-V3,
    GLM-4.5).
    """
    modules = {name.rpartition(".")[0] for name in names}
    for root in sorted(module.removesuffix(".fc") for module in modules if module.endswith("mtp.fc")):
        norms = (f"{root}.pre_fc_norm_embedding", f"{root}.pre_fc_norm_hidden", f"{root}.norm")
        return DraftHead(f"{root}.layers.0.", f"{root}.fc", *norms)
    layers = [module.removesuffix(".eh_proj") for module in modules if module.endswith(".eh_proj")]
    numbered = sorted((int(found[1]), layer) for layer in layers if (found := _BLOCK.search(layer)))
    if not numbered:
        return None
    number, layer = numbered[0]
    norms = (f"{layer}.enorm", f"{layer}.hnorm", f"{layer}.shared_head.norm")
    return DraftHead(f"{layer}.", f"{layer}.eh_proj", *norms, number)


def is_of_draft_head(name: str, config: Mapping[str, Any]) -> bool:
    """Whether ``name``, of a tensor, is one of a draft head, given the number of blocks in ``config``."""
    return "mtp" in name.split(".") or beyond_blocks(name, config)


def beyond_blocks(name: str, config: Mapping[str, Any]) -> bool:
    """Whether the number in ``name`` is of no block that ``config`` counts: a draft head lies behind the
    last."""
    inner = config.get("text_config")
    levels = (config, inner if isinstance(inner, dict) else {})
    block_counts = (level.get(key) for level in levels for key in _BLOCK_COUNTS)
    counts = [count for count in block_counts if isinstance(count, int)]
    block = BLOCK_NUMBER.search(name)
    return bool(counts) and block is not None and int(block[1]) >= max(counts)
