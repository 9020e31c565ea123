# syntax=docker/dockerfile:1
# Training: engines, proxies, router and trainer of one machine.
#
#   docker build -f deploy/docker/train.Dockerfile -t any-agent-train .
#
# From SGLang's own image, which has the CUDA toolkit that its kernels are built with. We have an
# environment of our own beside SGLang's, as the two want other versions of the same packages.
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23
FROM ${SGLANG_IMAGE}

# SGLang's interpreter, wherever the image has it.
RUN printf '#!/bin/sh\nexec %s "$@"\n' "$(command -v python3)" > /usr/local/bin/sglang-python \
    && chmod 755 /usr/local/bin/sglang-python \
    && sglang-python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("sglang") is None)'

RUN python3 -m venv /opt/any-agent
WORKDIR /opt/any-agent/source
COPY pyproject.toml constraints.txt README.md LICENSE ./
# Torch first: it is large, and changes less often than we do.
RUN /opt/any-agent/bin/pip install --no-cache-dir -c constraints.txt torch
COPY any_agent any_agent
COPY proxy_ext proxy_ext
COPY router router
COPY trainer trainer
RUN /opt/any-agent/bin/pip install --no-cache-dir -c constraints.txt '.[train,lora,redis]'

RUN useradd --uid 10001 --create-home agent \
    && mkdir -p /runs /models /config \
    && chown agent /runs /models
USER agent
WORKDIR /home/agent

# Keys come with the container's environment, never with the image.
ENV ANY_AGENT_ROOT=/runs \
    ANY_AGENT_SERVER__HOST=0.0.0.0 \
    ANY_AGENT_SERVER__PORT=8000 \
    ANY_AGENT_ENGINE__KIND=sglang \
    ANY_AGENT_ENGINE__PYTHON=/usr/local/bin/sglang-python \
    HF_HOME=/models/huggingface
VOLUME ["/runs", "/models"]
EXPOSE 8000
# Ready once a rank serves; a large model is loaded and compiled for minutes.
HEALTHCHECK --interval=30s --timeout=10s --start-period=30m --retries=3 \
    CMD ["/opt/any-agent/bin/python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/readyz', timeout=8)"]
# It is asked to end by SIGTERM, and ends what is under way first.
STOPSIGNAL SIGTERM
ENTRYPOINT ["/opt/any-agent/bin/any-agent"]
CMD ["train", "--config", "/config/my.yaml"]
