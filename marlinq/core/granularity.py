"""Granularity: which weights of a matrix share one scale.

A weight has K input channels and N output channels. Its scales are [G, P] in neutral order: G groups of input
channels times P groups of output channels.

    granularity    channels   outputs   scales
    tensor         all        all       [1, 1]
    channel        all        1         [1, N]
    group(g)       g          1         [ceil(K/g), N]
    block(r, c)    c          r         [ceil(K/c), ceil(N/r)]

Configs and kernels write the same facts as numbers (``group_size`` of -1 for one scale per output channel).
They are converted where they are read or written, with :meth:`Granularity.from_group_size` and
:attr:`Granularity.group_size`; all other code uses this type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GranularityKind = Literal["tensor", "channel", "group", "block"]

_PER_CHANNEL = -1
"""``group_size`` of one scale per output channel, as configs and kernels write it."""


@dataclass(frozen=True, order=True)
class Granularity:
    """The tile of a weight that shares one scale.

    Make one with :meth:`tensor`, :meth:`channel`, :meth:`group`, :meth:`block` or :meth:`from_group_size`.

    Attributes:
        channels: input channels (K) of a tile; 0 for all of them.
        outputs: output channels (N) of a tile; 0 for all of them.

    Raises:
        ValueError: an extent is negative, or 0 where no granularity of the table above has it.
    """

    channels: int
    outputs: int

    def __post_init__(self) -> None:
        tile = (self.channels, self.outputs)
        if min(tile) < 1 and tile not in ((0, 0), (0, 1)):
            raise ValueError(
                f"no granularity has tiles of {self.channels} input and {self.outputs} output channels"
            )

    @classmethod
    def tensor(cls) -> Granularity:
        """One scale for the whole weight."""
        return cls(0, 0)

    @classmethod
    def channel(cls) -> Granularity:
        """One scale per output channel."""
        return cls(0, 1)

    @classmethod
    def group(cls, channels: int) -> Granularity:
        """One scale per output channel and ``channels`` (at least 1) neighbouring input channels."""
        if channels < 1:
            raise ValueError(f"a group has at least one input channel, not {channels}")
        return cls(channels, 1)

    @classmethod
    def block(cls, outputs: int, channels: int) -> Granularity:
        """One scale per block of ``outputs`` x ``channels`` weights, in the order [N, K] of checkpoints.

        Blocks of one output channel are groups.
        """
        if outputs < 1 or channels < 1:
            raise ValueError(f"a block has at least one weight, not {outputs} x {channels}")
        return cls(channels, outputs)

    @classmethod
    def from_group_size(cls, group_size: int) -> Granularity:
        """A group size as configs and kernels write it: -1 for one scale per output channel.

        Raises:
            ValueError: 0, or negative but not -1.
        """
        return cls.channel() if group_size == _PER_CHANNEL else cls.group(group_size)

    @property
    def group_size(self) -> int:
        """The number that configs and kernels write for a group (g) or a channel (-1).

        Raises:
            ValueError: a tensor or a block, which is no group size.
        """
        if self.outputs != 1:
            raise ValueError(f"{self.describe()} can't be written as a group size")
        return self.channels or _PER_CHANNEL

    @property
    def size(self) -> int | str:
        """The value that reports show: :attr:`group_size` of a group or channel, else ``tensor`` or
        ``128x128``."""
        if self.outputs == 1:
            return self.group_size
        return f"{self.outputs}x{self.channels}" if self.channels else "tensor"

    @property
    def kind(self) -> GranularityKind:
        """``tensor``, ``channel``, ``group`` or ``block``."""
        if self.channels == 0:
            return "channel" if self.outputs else "tensor"
        return "group" if self.outputs == 1 else "block"

    def channels_per_group(self, in_features: int) -> int:
        """Input channels of a tile in a weight of K = ``in_features``, at most K."""
        return min(self.channels, in_features) or in_features

    def outputs_per_group(self, out_features: int) -> int:
        """Output channels of a tile in a weight of N = ``out_features``, at most N."""
        return min(self.outputs, out_features) or out_features

    def groups(self, in_features: int) -> int:
        """G: tiles along K = ``in_features``; the last may be short."""
        return -(-in_features // self.channels_per_group(in_features))

    def scales_shape(self, in_features: int, out_features: int) -> tuple[int, int]:
        """The shape [G, P] of the scales of a weight of K = ``in_features`` and N = ``out_features``."""
        return self.groups(in_features), -(-out_features // self.outputs_per_group(out_features))

    def divides(self, in_features: int) -> bool:
        """Whether K = ``in_features`` has whole groups only."""
        return in_features % self.channels_per_group(in_features) == 0

    def for_channels(self, in_features: int) -> Granularity:
        """The same granularity of a weight of K = ``in_features``: a group of K or more is a channel."""
        return Granularity.channel() if self.kind == "group" and self.channels >= in_features else self

    def describe(self) -> str:
        """Text for messages: ``groups of 128``, ``one scale per channel``, ``blocks of 128 x 128``."""
        return {
            "tensor": "one scale per tensor",
            "channel": "one scale per channel",
            "group": f"groups of {self.channels}",
            "block": f"blocks of {self.outputs} x {self.channels}",
        }[self.kind]
