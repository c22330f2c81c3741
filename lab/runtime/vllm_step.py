"""The kernels of a decode step of vLLM, with its own kernels and with marlinq's plugin.

    python lab/runtime/vllm_step.py CKPT --batch 1,64 --gpus 2 --json step.json

Prints, for each engine and batch, the time from one sampled token to the next and what runs in it: kernels by
class, and the time in which no kernel runs, on the first GPU. torch's profiler sees one process only, so it
runs in vLLM's workers (:class:`KernelProfile`). A token's step goes from one kernel of the sampler's arg-max
to the next.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from marlinq.core.errors import EnvironmentProblem
from marlinq.operations.bench.serve import ENGINES, run_alone

# Class -> words in its kernels' names; the first class that fits.
CLASSES = {
    "sums over GPUs": ("nccl", "cross_device_reduce", "allreduce", "all_reduce"),
    "norms, rotary, activation": ("triton_", "act_and_mul", "rms_norm", "rotary"),
    "routed experts": ("experts_", "moe_wna16", "moe_align", "moe_sum", "count_and_sort"),
    "linear layers": ("a16_", "machete", "marlin", "device_kernel<cutlass::gemm", "humming"),
    "attention": ("flash", "reshape_and_cache", "prepare_varlen"),
    "dense products: head, router": ("nvjet", "gemmsn", "splitkreduce", "gemv"),
    "router's top-k": ("topk",),
}
OTHERS = "sampling and the rest"
PROMPT, NEW, MEASURED = 48, 40, 24  # tokens of prompts, new ones, and those whose steps are added up
TIMED = 96  # steps of a run without the profiler


class Ran(NamedTuple):
    """One kernel: when it began and ended, in microseconds, and its name."""

    start: float
    end: float
    name: str


@dataclass(frozen=True)
class Step:
    """A decode step.

    Attributes:
        milliseconds: median time of a step without the profiler.
        profiled_us: microseconds of a step with it.
        idle_us: microseconds of those in which no kernel runs.
        classes: class of kernels -> microseconds and launches a step, the longest first.
    """

    milliseconds: float
    profiled_us: float
    idle_us: float
    classes: dict[str, tuple[float, float]]


def class_of(name: str) -> str:
    """The class of a kernel's name."""
    low = name.lower()
    return next((found for found, words in CLASSES.items() if any(word in low for word in words)), OTHERS)


def dissect(ran: Iterable[Ran], milliseconds: float) -> Step:
    """Time of the last :data:`MEASURED` steps of a run, by class of kernels.

    Time in which kernels overlap counts once, for the kernel that began first.
    """
    kernels = sorted(ran)
    marks = [kernel.start for kernel in kernels if "argmax" in kernel.name.lower()][-MEASURED - 1 :]
    times, launches = defaultdict[str, float](float), Counter[str]()
    reached = marks[0]
    for start, end, name in kernels:
        if marks[0] <= start < marks[-1]:
            times[class_of(name)] += max(0.0, end - max(start, reached))
            launches[class_of(name)] += 1
            reached = max(reached, end)
    steps = len(marks) - 1
    whole = (marks[-1] - marks[0]) / steps
    longest = sorted(times, key=times.__getitem__, reverse=True)
    classes = {name: (times[name] / steps, launches[name] / steps) for name in longest}
    return Step(milliseconds, whole, whole - sum(times.values()) / steps, classes)


class KernelProfile:
    """Methods that vLLM adds to each of its workers (``worker_extension_cls``)."""

    def start_kernel_profile(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self.kernel_profile = profile(activities=[ProfilerActivity.CUDA])
        self.kernel_profile.__enter__()

    def end_kernel_profile(self, milliseconds: float) -> dict[str, Any]:
        """The fields of a :class:`Step` of ``milliseconds`` without the profiler."""
        import torch

        torch.cuda.synchronize()
        self.kernel_profile.__exit__(None, None, None)
        ran = [
            Ran(event.time_range.start, event.time_range.end, event.name)
            for event in self.kernel_profile.events()
            if event.device_type.name == "CUDA"
        ]
        return asdict(dissect(ran, milliseconds))


def measure(checkpoint: str, batches: Sequence[int], gpus: int, out: Path) -> None:
    """Run one engine from this process and write its steps by batch to ``out`` as JSON."""
    import vllm

    engine = vllm.LLM(
        model=checkpoint,
        skip_tokenizer_init=True,
        tensor_parallel_size=gpus,
        worker_extension_cls=f"{Path(__file__).stem}.{KernelProfile.__name__}",
        max_model_len=512,
        max_num_seqs=max(batches),
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        seed=0,
        compilation_config={"cudagraph_capture_sizes": list(batches)},
    )
    draw, vocabulary = random.Random(0), engine.llm_engine.model_config.get_vocab_size()

    def run(batch: int, new: int) -> float:
        prompts = [
            {"prompt_token_ids": [draw.randrange(vocabulary) for _ in range(PROMPT)]} for _ in range(batch)
        ]
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    steps = {}
    for batch in batches:
        run(batch, 16)
        seconds = statistics.median((run(batch, 16 + TIMED) - run(batch, 16)) / TIMED for _ in range(3))
        engine.collective_rpc("start_kernel_profile")
        run(batch, NEW)
        steps[str(batch)] = engine.collective_rpc("end_kernel_profile", args=(1e3 * seconds,))[0]
    out.write_text(json.dumps(steps), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # the engine's clean-up may hang


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--batch", default="1,64")
    parser.add_argument("--gpus", type=int, default=1, help="tensor parallelism")
    parser.add_argument("--json", type=Path, help="also write the steps to this file")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    batches = [int(batch) for batch in given.batch.split(",")]
    if given.out:
        measure(given.checkpoint, batches, given.gpus, given.out)
    found: dict[str, Any] = {}
    for engine, mode in ENGINES.items():
        with tempfile.TemporaryDirectory() as folder:
            out, log = Path(folder) / "steps.json", Path(folder) / "log"
            options = ["--batch", given.batch, "--gpus", str(given.gpus), "--out", str(out)]
            command = [sys.executable, __file__, given.checkpoint, *options]
            # Workers import this file.
            paths = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
            environment = {"MARLINQ_VLLM": mode, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
            if run_alone(command, environment, log) != 0 or not out.is_file():
                raise EnvironmentProblem(
                    f"{engine}: no steps; the end of its log:\n{log.read_text()[-3000:]}"
                )
            found[engine] = json.loads(out.read_text(encoding="utf-8"))
        for batch, step in found[engine].items():
            print(f"{engine}, batch {batch}: {step['milliseconds']:.3f} ms a step", end="; ")
            print(f"with the profiler {step['profiled_us'] / 1e3:.3f} ms, in microseconds and launches:")
            for name, (time_us, launches) in step["classes"].items():
                print(f"  {time_us:9.1f} {launches:7.1f}  {name}")
            print(f"  {step['idle_us']:9.1f}          no kernel", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
