"""Whether an operator may bypass torch's dispatcher, which takes as long as the driver's launch."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

try:
    from torch._C import _get_tracing_state as _trace
    from torch._C import _is_torch_function_mode_enabled as _function_mode
    from torch._C import _len_torch_dispatch_stack as _dispatch_modes
    from torch._C._autograd import _profiler_enabled as _profiler
    from torch._C._functorch import peek_interpreter_stack as _transform

    _complete = True
except ImportError:
    _complete = False

_grad = torch.is_grad_enabled


def _nobody_watches() -> bool:
    watched = _grad() or _dispatch_modes() or _function_mode() or _profiler() or _trace()
    return not watched and _transform() is None


def _always_dispatched() -> bool:
    return False


nobody_watches: Callable[[], bool] = _nobody_watches if _complete else _always_dispatched
"""Whether the current thread has nothing active that intercepts operators through torch's dispatcher.

Such are gradients, function and dispatch modes (fake tensors, exports, counters), profilers, ``vmap`` and
other transforms, and traces. ``torch.compile`` is not covered: ask ``torch.compiler.is_dynamo_compiling``.
"""

if not _complete:
    warnings.warn(
        f"torch {torch.__version__} does not tell what intercepts its operators; every call goes through its "
        "dispatcher, and products of small batches cost the host some microseconds more",
        stacklevel=2,
    )
