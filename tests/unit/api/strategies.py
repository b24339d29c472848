"""Valid specs, drawn at random, as somebody would write them (camelCase, defaults left out or not)."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

FREE_FORM = st.dictionaries(
    st.text(max_size=12),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=12),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)
LABEL = st.from_regex(r"[a-z]([-a-z0-9]{0,18}[a-z0-9])?", fullmatch=True).filter(lambda name: name != "head")
DEADLINES = ("memberStart", "fragment", "acknowledgement", "lease", "collective")


QUANTITY = st.integers(0, 2**31 - 1) | st.from_regex(r"[1-9][0-9]{0,3}(\.[0-9])?(m|k|M|G|Ki|Mi|Gi)?", fullmatch=True)
RESOURCES = st.fixed_dictionaries({}, optional={"cpu": QUANTITY, "memory": QUANTITY})
SELECTOR = st.dictionaries(st.sampled_from(["disk", "kubernetes.io/hostname", "zone"]), st.text("abc", max_size=5))
TOLERATIONS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "key": st.just("nvidia.com/gpu"),
            "operator": st.sampled_from(["Exists", "Equal"]),
            "effect": st.sampled_from(["NoSchedule", "NoExecute"]),
            "tolerationSeconds": st.integers(0, 300),
        },
    ),
    max_size=2,
)
PODS = {"resources": RESOURCES, "nodeSelector": SELECTOR, "tolerations": TOLERATIONS}


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A mapping with any of the fields, or none."""
    return st.fixed_dictionaries({}, optional=fields)


def fraction(low: float, high: float, above: bool = False) -> st.SearchStrategy[float]:
    return st.floats(low, high, exclude_min=above) | (st.nothing() if above else st.just(int(low)))


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    """One valid RLJob spec."""
    shards = draw(st.integers(1, 16))
    evals = draw(st.integers(1, shards))
    environment: dict[str, Any] = draw(
        some(
            kwargs=FREE_FORM,
            maxEpisodeSteps=st.integers(1, 10**9),
            vectorization=st.sampled_from(["Auto", "Native", "Sync"]),
        )
    )
    if draw(st.booleans()):
        environment["shards"] = shards
        environment["numEnvs"] = shards * draw(st.integers(1, 8))
    else:
        environment["numEnvs"] = evals * draw(st.integers(1, 8))
    environment["id"] = draw(st.from_regex(r"[A-Za-z_:/]{1,20}-v[0-9]", fullmatch=True))
    trains = draw(st.integers(1, 16))
    training = {"totalEnvSteps": draw(st.integers(1, 10**15)), "rolloutSteps": draw(st.integers(16, 512))}
    training |= draw(some(threads=st.integers(1, 256), device=st.just("CPU")))
    if draw(st.booleans()):
        most = environment["numEnvs"] * training["rolloutSteps"] // trains
        schedule = st.sampled_from(["Constant", "Linear"])
        policy: dict[str, Any] = draw(
            some(
                hiddenSizes=st.lists(st.integers(1, 16384), min_size=1, max_size=16),
                activation=st.sampled_from(["Tanh", "ReLU"]),
                learningRate=fraction(0, 1, above=True),
                learningRateSchedule=schedule,
                gamma=fraction(0, 1),
                gaeLambda=fraction(0, 1),
                clipRange=fraction(0, 10, above=True),
                clipRangeSchedule=schedule,
                epochs=st.integers(1, 1000),
                entropyCoef=fraction(0, 100),
                valueCoef=fraction(0, 100),
                maxGradNorm=fraction(0, 1e6, above=True),
                normalizeAdvantages=st.booleans(),
                normalizeObservations=st.booleans(),
                targetKL=fraction(0, 100, above=True),
                logStdInit=st.floats(-20, 20),
            )
        )
        policy = {"simplePPO": {**policy, "minibatchSize": trains * draw(st.integers(1, most))}}
    else:
        policy = {"custom": {"class": "my_pkg.policies:Mine", **draw(some(config=FREE_FORM))}}
    roles: dict[str, Any] = {"train": {"replicas": trains}, "eval": {"replicas": evals}}
    spec: dict[str, Any] = {"environment": environment, "policy": policy, "training": training, "policyGroup": roles}
    if draw(st.booleans()):
        names = draw(st.lists(LABEL, min_size=1, max_size=7, unique=True))
        places = {"replicas": draw(st.integers(1, 4)), "membersPerReplica": 32}
        spec["pools"] = [
            {"name": name, **places, **draw(some(gpusPerReplica=st.integers(0, 64), **PODS))} for name in names
        ]
        for role in roles.values():
            role["pool"] = draw(st.sampled_from(names))
    return spec | draw(
        some(
            seed=st.integers(0, 2**31 - 1),
            evaluation=st.fixed_dictionaries(
                {"everyIterations": st.integers(1, 10**9)},
                optional={"episodes": st.integers(1, 10**6), "stopAtReturn": st.floats(-1e15, 1e15)},
            ),
            weights=some(
                strategy=st.sampled_from(["None", "Double", "Shared"]),
                onMismatch=st.sampled_from(["Warn", "Resync", "Fail"]),
            ),
            checkpoints=some(
                everyIterations=st.integers(1, 10**9),
                keep=st.integers(1, 1000),
                claimName=st.sampled_from(["runs", "a.b-c"]),
                drainSeconds=st.integers(1, 86400),
            ),
            image=st.sampled_from(["trainer", "example.com:5000/a/trainer:1"]),
            imagePullPolicy=st.sampled_from(["Always", "IfNotPresent", "Never"]),
            imagePullSecrets=st.just([{"name": "registry"}]),
            head=some(**PODS),
            runPolicy=some(
                backoffLimit=st.integers(0, 1000),
                activeDeadlineSeconds=st.integers(1, 10**15),
                schedulingDeadlineSeconds=st.integers(1, 10**15),
                progressDeadlineSeconds=st.integers(1, 10**15),
                ttlSecondsAfterFinished=st.integers(0, 10**15),
            ),
            suspend=st.booleans(),
            deadlines=some(**{f"{name}Seconds": st.integers(1, 86400) for name in DEADLINES}),
        )
    )
