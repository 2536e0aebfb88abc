"""One process of each kind for all tests, and one reference run for each configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.configs import Config
from tests.distributed.harness import RUN_LIMIT_S, Result, Zygote
from tests.versions import skip_without


@pytest.fixture(scope="session")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def reference_zygote(run_directory: Path) -> Iterator[Zygote]:
    """Megatron as it comes, on CPUs."""
    with Zygote("reference", run_directory) as zygote:
        yield zygote


@pytest.fixture(scope="session")
def zygote(run_directory: Path) -> Iterator[Zygote]:
    """Megatron with this project's adaptor."""
    with Zygote("ours", run_directory) as zygote:
        yield zygote


@pytest.fixture(scope="session")
def reference(reference_zygote: Zygote, run_directory: Path) -> Callable[[Config], Result]:
    """Megatron's own 1F1B under a configuration; run once, however often it is asked for.

    A reference that failed once is not tried again: every test that needs it fails alike.
    """
    results: dict[Config, Result | Exception] = {}

    def run(config: Config) -> Result:
        skip_without(config.flags())
        if config not in results:
            try:
                results[config] = reference_zygote.train(
                    config, run_directory / f"{len(results):03d}-reference-{config}"
                )
            except Exception as error:
                results[config] = error
        result = results[config]
        if isinstance(result, Exception):
            raise result
        return result

    return run


@pytest.fixture(scope="session")
def from_one_start(reference_zygote: Zygote, run_directory: Path) -> Callable[[Config], Config]:
    """The same configuration, but with weights that are the same whatever the placement.

    Megatron draws a rank's weights by the rank's number. So one rank trains for an iteration and
    saves, once for each shape of model; runs then load what it saved as a model to be fine-tuned.
    """
    saved: dict[Config, Path] = {}

    def prepared(config: Config) -> Config:
        start = config.start()
        if start not in saved:
            directory = run_directory / f"start{len(saved)}"
            saving = ["--save", str(directory / "checkpoint"), "--save-interval", "1"]
            saving += ["--exit-interval", "1", "--no-save-optim", "--no-save-rng"]
            reference_zygote.train(start, directory, saving)
            saved[start] = directory / "checkpoint"
        load = ("--load", str(saved[start]), "--finetune", "--no-load-optim", "--no-load-rng")
        return replace(config, extra=(*config.extra, *load))

    return prepared


@pytest.fixture(scope="session")
def train(zygote: Zygote, run_directory: Path) -> Callable[..., Result]:
    """``train(config, schedule, *flags)`` with the adaptor; each run has its own directory."""
    runs = 0

    def run(config: Config, schedule: str, *flags: str, limit_s: float = RUN_LIMIT_S) -> Result:
        nonlocal runs
        skip_without([*config.flags(), *flags])
        runs += 1
        directory = run_directory / f"{runs:03d}-{Path(schedule).name}-{config}"
        return zygote.train(config, directory, ("--pipeline-schedule", schedule, *flags), limit_s)

    return run


@pytest.fixture(scope="session")
def synchronous(train: Callable[..., Result]) -> Callable[[Config, str], Result]:
    """Our schedule with Megatron's own step, and the norm that post-validation has; run once.

    One that failed is not tried again: every test that needs it fails alike.
    """
    results: dict[tuple[Config, str], Result | Exception] = {}

    def run(config: Config, schedule: str) -> Result:
        key = config, schedule
        if key not in results:
            try:
                results[key] = train(config, schedule, "--canonical-grad-norm")
            except Exception as error:
                results[key] = error
        result = results[key]
        if isinstance(result, Exception):
            raise result
        return result

    return run
