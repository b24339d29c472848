# RLightning's two images:
#
#   docker build --target operator -t rlightning-operator .
#   docker build --target trainer  -t rlightning-trainer  .
#
# Packages come from where pip is told to get them. Behind a mirror or a proxy with a certificate of its own, hand pip's
# settings to the build; nothing of them stays in the image:
#
#   docker build --secret id=pip.conf,src=$HOME/.config/pip/pip.conf --secret id=ca.crt,src=/path/to/ca.crt …
#
# A user's policy goes into an image made from the trainer's: `FROM rlightning-trainer` and `COPY my_policy.py /app/`.
ARG BASE_IMAGE=python:3.11-slim-bookworm

# ---- what both have: Python in an environment of its own, an unprivileged user
FROM ${BASE_IMAGE} AS base
LABEL org.opencontainers.image.vendor="RLightning" org.opencontainers.image.licenses="Apache-2.0"
# HOME is where programs may write when the root file system is read-only and an emptyDir is mounted at /tmp.
ENV PATH=/opt/rlightning/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 HOME=/tmp LANG=C.UTF-8
RUN groupadd --gid 10001 rlightning \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin rlightning \
 && python3 -m venv /opt/rlightning
WORKDIR /app

# ---- the project's code, the same for both images
FROM base AS wheel
COPY requirements/build.txt /requirements/
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.crt \
    PIP_CONFIG_FILE=/run/secrets/pip.conf pip install --no-cache-dir --disable-pip-version-check -r /requirements/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY rlightning ./rlightning
COPY operator ./operator
# Installed below /install as it will lie below /: what the images take from here is one small layer.
RUN pip wheel --no-deps --no-index --no-build-isolation --disable-pip-version-check --wheel-dir /dist . \
 && pip install --no-deps --no-index --disable-pip-version-check --root /install /dist/*.whl

# ---- the operator and the status service: neither torch nor ray
FROM base AS operator-dependencies
COPY requirements/operator.txt /requirements/
# Compiled here, for the root file system may be read-only later; files that are meant for another Python do not compile.
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.crt \
    PIP_CONFIG_FILE=/run/secrets/pip.conf pip install --no-cache-dir --no-compile --disable-pip-version-check -r /requirements/operator.txt \
 && { python -m compileall -qq -j 0 /opt/rlightning/lib || true; }

FROM operator-dependencies AS operator
LABEL org.opencontainers.image.title="rlightning-operator" \
      org.opencontainers.image.description="RLightning's operator for Kubernetes and its status service"
USER 10001:10001
CMD ["rlightning-operator"]
COPY --from=wheel /install/ /

# ---- drivers, members and submitters of training runs
FROM base AS trainer-dependencies
# KubeRay's probes call wget up to version 1.5, and later ones where rayVersion is not set.
RUN command -v wget >/dev/null \
 || { apt-get update -qq && apt-get install -y -qq --no-install-recommends wget && rm -rf /var/lib/apt/lists/*; }
COPY requirements/trainer.txt /requirements/
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.crt \
    PIP_CONFIG_FILE=/run/secrets/pip.conf pip install --no-cache-dir --no-compile --disable-pip-version-check -r /requirements/trainer.txt \
 && { python -m compileall -qq -j 0 /opt/rlightning/lib || true; }

FROM trainer-dependencies AS trainer
LABEL org.opencontainers.image.title="rlightning-trainer" \
      org.opencontainers.image.description="RLightning with PyTorch, Ray and MuJoCo: runs in the pods of a training job"
ENV RAY_USAGE_STATS_ENABLED=0
USER 10001:10001
CMD ["rlightning", "--help"]
COPY --from=wheel /install/ /
