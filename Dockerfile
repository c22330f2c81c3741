# marlinq on NVIDIA GPUs whose driver runs CUDA 13. The container gets the driver from the host, and kernels are compiled
# by NVRTC, which comes as a Python package: no CUDA toolkit is installed.
#
#   docker build -t marlinq .
#   docker run --gpus all -v "$PWD:/data" marlinq quantize MODEL OUT
FROM python:3.12-slim-bookworm

ENV MARLINQ_CACHE=/home/marlinq/.cache/marlinq \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

RUN useradd --create-home --uid 1000 marlinq

COPY pyproject.toml constraints.txt LICENSE /build/
COPY docs/package-page.md /build/docs/
COPY marlinq /build/marlinq
RUN pip install --no-cache-dir --constraint /build/constraints.txt "/build[cuda13]" && rm -r /build

USER 1000
WORKDIR /data
ENTRYPOINT ["marlinq"]
CMD ["--help"]
