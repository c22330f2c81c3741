"""The operation behind ``marlinq recommend``: the best type of weights for a model, a GPU and a load."""

from __future__ import annotations

from marlinq.operations.recommend.gpus import gpus
from marlinq.operations.recommend.plot import save_plot
from marlinq.operations.recommend.recommend_weights import recommend
from marlinq.operations.recommend.recommendation import Recommendation, WeightsCandidate

__all__ = ["Recommendation", "WeightsCandidate", "gpus", "recommend", "save_plot"]
