# An image that trains, evaluates and names images; like scripts/anp_jax.def.
# Build in the checkout's root, on any machine: the GPU is needed only to run.
#   docker build --build-arg ACCELERATOR=cuda12 -t anp_jax .
# Run with the data and the results mounted:
#   docker run --gpus all --user "$(id -u):$(id -g)" -v /data:/data \
#     -v "$PWD/runs:/work/runs" anp_jax --config=configs/resnet_anp.py:demo \
#     --workdir=runs/demo
# The other commands: --entrypoint=anp-predict, anp-prepare, anp-study, ...
# JAX's wheels bring NVIDIA's libraries; the host has the driver.
FROM python:3.12-slim

ARG ACCELERATOR=cuda13

COPY main.py pyproject.toml setup.py requirements.txt LICENSE /opt/anp_jax/
COPY anp_jax /opt/anp_jax/anp_jax
COPY configs /opt/anp_jax/configs
COPY scripts /opt/anp_jax/scripts

# A user need not be able to write there: compile the byte code now.
RUN PIP_NO_CACHE_DIR=1 python3 /opt/anp_jax/scripts/setup.py --no-dev \
      --accelerator=${ACCELERATOR} && \
    /opt/anp_jax/.venv/bin/python -m compileall -q /opt/anp_jax/anp_jax \
      /opt/anp_jax/configs && \
    useradd --create-home anp && \
    mkdir /work && chown anp /work

ENV PATH=/opt/anp_jax/.venv/bin:$PATH PYTHONNOUSERSITE=1
USER anp
WORKDIR /work
ENTRYPOINT ["anp-train"]
CMD ["--help"]
