"""Test predictions and their comparison with measurements."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.base.fields import decode, encode
from pipeedge.observe.metrics import StageStats
from pipeedge.plan.prediction import Prediction, StagePrediction, compare

seconds = st.floats(0.001, 10)
stages = st.builds(
    StagePrediction,
    busy_s=seconds,
    link_s=st.floats(0, 10),
    threads=st.none() | st.integers(1, 64),
    tokens=st.lists(st.integers(1, 512), max_size=3, unique=True).map(sorted).map(tuple),
)


def prediction_of(*stages: StagePrediction, size: int = 8, tokens: int | None = None) -> Prediction:
    """Return the prediction of a pipeline that consists of these stages and the links behind them."""
    period_s = max(max(stage.busy_s, stage.link_s) for stage in stages)
    latency_s = sum(stage.busy_s + stage.link_s for stage in stages)
    return Prediction(stages, size, period_s, latency_s, "stage 0", tokens)


predictions = st.builds(
    lambda stages, size, tokens: prediction_of(*stages, size=size, tokens=tokens),
    st.lists(stages, min_size=1, max_size=4),
    st.integers(1, 16),
    st.none() | st.integers(1, 512),
)


def stats(**changed: float | None) -> StageStats:
    values = {
        "stage": 0,
        "rank": 3,
        "microbatches": 9,
        "compute_s_mean": 1.0,
        "send_s_mean": 0.5,
        "send_s_best": 0.001,
        "link_s": 0.1,
        "recv_wait_s_mean": 0.0,
        "bytes_out_mean": 1e6,
        "busy_fraction": 0.9,
        "rss_peak_mb": 300.0,
        "parameters": 10,
        "compute_cpu_s_mean": 1.0,
        "threads": 1,
    }
    return StageStats(**{**values, **changed})  # type: ignore[arg-type]


def simulated_s(prediction: Prediction, microbatches: int) -> float:
    """Return when the last of ``microbatches`` leaves, if every stage and link takes one at a time."""
    free = [0.0] * (2 * len(prediction.stages))
    now = 0.0
    for _ in range(microbatches):
        now = 0.0
        for index, stage in enumerate(prediction.stages):
            for place, needed in ((2 * index, stage.busy_s), (2 * index + 1, stage.link_s)):
                now = max(now, free[place]) + needed
                free[place] = now
    return now


@settings(max_examples=60)
@given(prediction=predictions, microbatches=st.integers(1, 12))
def test_a_prediction_equals_a_simulated_run(prediction: Prediction, microbatches: int) -> None:
    items = microbatches * prediction.microbatch_size
    assert prediction.run_items_per_s(items) == pytest.approx(items / simulated_s(prediction, microbatches))


@settings(max_examples=30)
@given(prediction=predictions)
def test_prediction_survives_encoding(prediction: Prediction) -> None:
    assert decode(encode(prediction), Prediction) == prediction


def test_a_prediction_without_time_has_no_throughput() -> None:
    assert prediction_of(StagePrediction(0.0, 0.0, None)).throughput_items_per_s is None


PROMISE = prediction_of(StagePrediction(busy_s=1.0, link_s=0.1, threads=1))


def remarks(measured: StageStats, promise: Prediction = PROMISE) -> list[str]:
    compared = compare(promise, [measured], items=80, run_items_per_s=7.0, steady_items_per_s=7.5)
    return list(compared.remarks)


def test_errors_are_parts_of_what_was_promised() -> None:
    compared = compare(
        PROMISE, [stats(compute_s_mean=1.1)], items=80, run_items_per_s=7.0, steady_items_per_s=7.6
    )
    assert compared.steady is not None
    assert compared.steady.error == pytest.approx(-0.05)
    assert compared.stages[0].compute.error == pytest.approx(0.1)
    assert compared.stages[0].link is not None
    assert compared.stages[0].link.error == pytest.approx(0.0)
    assert not list(compared.remarks)


def test_an_unmeasured_link_is_not_compared() -> None:
    compared = compare(PROMISE, [stats(link_s=None)], items=80, run_items_per_s=7.0, steady_items_per_s=7.6)
    assert compared.stages[0].link is None
    assert not list(compared.remarks)


def test_one_microbatch_has_no_steady_throughput() -> None:
    compared = compare(PROMISE, [stats()], items=8, run_items_per_s=7.0, steady_items_per_s=None)
    assert compared.steady is None
    assert compared.run is not None


@pytest.mark.parametrize(
    ("measured", "why"),
    [
        ({"compute_s_mean": 1.5, "compute_cpu_s_mean": 1.5, "threads": 2}, "OMP_NUM_THREADS=1"),
        ({"compute_s_mean": 1.5, "compute_cpu_s_mean": 0.9}, "kept from its processor for 40%"),
        ({"compute_s_mean": 1.5, "compute_cpu_s_mean": 1.5}, "throttling"),
        ({"compute_s_mean": 0.5, "compute_cpu_s_mean": 0.5}, "profile this device again"),
        ({"link_s": 0.3}, "the link from stage 0 (rank 3) is off by +200%"),
    ],
)
def test_a_deviation_gets_one_line_with_its_cause(measured: dict[str, float], why: str) -> None:
    (line,) = remarks(stats(**measured))
    assert why in line
    assert "rank 3" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("profiled", "used", "said"),
    [
        ("onednn", "torch", True),
        ("torch", "onednn", True),
        ("onednn", "onednn", False),
        (None, "onednn", False),
        ("onednn", "", False),
    ],
)
def test_a_run_with_other_kernels_than_the_profile_says_so(
    profiled: str | None, used: str, said: bool
) -> None:
    promise = dataclasses.replace(PROMISE, stages=(dataclasses.replace(PROMISE.stages[0], kernels=profiled),))
    found = remarks(dataclasses.replace(stats(), kernels=used), promise)
    line = (
        f"stage 0 (rank 3) computes with the kernels {used} and was profiled with {profiled}; use --kernels "
        f"{profiled}, or profile as it runs"
    )
    assert found == ([line] if said else [])


@pytest.mark.parametrize(
    ("profiled", "tokens", "named"),
    [
        ((512,), 128, "with 512 tokens and the longest sentence here has 128"),
        ((), 128, "with an unknown number of tokens and the longest sentence here has 128"),
        ((512,), 512, "its times are those of the longest sentence, 512 tokens"),
        ((32, 512), 128, "its times are those of the longest sentence, 128 tokens"),
        ((), None, None),
    ],
)
def test_a_profile_of_another_length_is_named(
    profiled: tuple[int, ...], tokens: int | None, named: str | None
) -> None:
    stage = dataclasses.replace(PROMISE.stages[0], tokens=profiled)
    promise = dataclasses.replace(PROMISE, stages=(stage,), tokens=tokens)
    (line,) = remarks(stats(compute_s_mean=0.25, compute_cpu_s_mean=0.25), promise)
    assert promise.scaled == (tokens is None or tokens in profiled or len(profiled) > 1)
    if named is None:
        assert "tokens" not in line
    else:
        assert named in line
        assert "hardware" not in line


@pytest.mark.parametrize("compute_s", [0.86, 1.14])
def test_deviations_up_to_fifteen_percent_are_not_remarked(compute_s: float) -> None:
    assert not remarks(stats(compute_s_mean=compute_s, compute_cpu_s_mean=compute_s))


def test_a_slow_link_with_a_short_prediction_is_not_remarked() -> None:
    quick = dataclasses.replace(PROMISE.stages[0], link_s=0.001)
    assert not remarks(stats(link_s=0.1), dataclasses.replace(PROMISE, stages=(quick,)))
