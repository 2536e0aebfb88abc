# An image that trains on GPUs, from NVIDIA's PyTorch image: its torch, NCCL, Apex and Transformer
# Engine stay, and the rest is what requirements.txt pins.
#
#   docker build --tag zero-bubble .
#   docker run --rm --gpus all zero-bubble                       zero-bubble doctor
#   docker run --rm --gpus all --ipc host --ulimit memlock=-1 zero-bubble examples/gpt3/1.5b.sh
#   docker run --rm zero-bubble make demo                        on CPUs
#
# 25.12: Ubuntu 24.04, Python 3.12, torch 2.10.0a0, CUDA 13.1. Another release with Python >= 3.12:
#   docker build --build-arg IMAGE=nvcr.io/nvidia/pytorch:YY.MM-py3 .
ARG IMAGE=nvcr.io/nvidia/pytorch:25.12-py3
FROM ${IMAGE}

# Not pinned: they are those of the Ubuntu release that the image's tag pins.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        make python3-venv \
    && rm -rf /var/lib/apt/lists/*

# A number that the image has given already, as 1000 in Ubuntu's, is shared. Without the log of logins,
# which has room for every number up to the largest.
ARG USER_ID=10001
RUN test "${USER_ID}" -ne 0 \
    && useradd --create-home --non-unique --no-log-init --uid "${USER_ID}" trainer \
    && install --directory --owner trainer /opt/zero-bubble

USER ${USER_ID}
WORKDIR /opt/zero-bubble
ENV PIP_NO_CACHE_DIR=1
# First what a change of other files leaves as it is.
COPY --chown=trainer requirements.txt pyproject.toml setup.py ./
COPY --chown=trainer tools/setup.sh tools/
RUN SYSTEM_TORCH=1 PYTHON=/usr/bin/python3 tools/setup.sh --packages
COPY --chown=trainer . .
RUN tools/setup.sh

ENV PATH=/opt/zero-bubble/.venv/bin:${PATH}

# It imports torch and Megatron: seldom, and with time on a busy node.
HEALTHCHECK --interval=30m --timeout=5m CMD ["zero-bubble", "doctor"]
CMD ["zero-bubble", "doctor"]
