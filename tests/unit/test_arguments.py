"""Every wrong combination of flags stops with the flag, its value, and what would work."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.arguments import (
    _RULES,
    add_arguments,
    refuse_yaml,
    schedule_for,
    validate,
)
from megatron.zero_bubble.errors import ConfigurationError
from tests.unit.cpu_mode import checks_of
from tests.unit.megatron_checks import AUTO_UNSET, POST_VALIDATION_UNSET, RUNTIME_UNSET
from tests.unit.orders import parse
from zero_bubble.builders import BUILDERS, build
from zero_bubble.export.json_io import save_schedule
from zero_bubble.schedule import Schedule

STAGES, MICROBATCHES = 2, 4


def arguments(**changes: Any) -> argparse.Namespace:
    """What Megatron's parser gives for a job that can run: two stages, four microbatches."""
    fine = {
        "pipeline_schedule": None,
        "enable_zero_bubble": False,
        "zero_bubble_wait_limit": None,
        "pipeline_model_parallel_size": STAGES,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "world_size": STAGES,
        "micro_batch_size": 2,
        "global_batch_size": 2 * MICROBATCHES,
        "rampup_batch_size": None,
        "transformer_impl": "local",
        "num_layers": 2 * STAGES,
    }
    return argparse.Namespace(**(fine | changes))


def complaint(**changes: Any) -> str:
    """The message that such a job stops with."""
    with pytest.raises(ConfigurationError) as caught:
        validate(arguments(**changes))
    return str(caught.value)


def saved(schedule: Schedule, directory: Path) -> str:
    path = directory / "schedule.json"
    save_schedule(schedule, path)
    return str(path)


# What a rule forbids, and the value its message must show (a switch has none).
FORBIDDEN = {
    "--microbatch-group-size-per-virtual-pipeline-stage": (3, "3"),
    "--defer-embedding-wgrad-compute": (True, ""),
    "--delay-wgrad-compute": (True, ""),
    "--overlap-moe-expert-parallel-comm": (True, ""),
    "--cuda-graph-impl": ("local", "local"),
    "--enable-cuda-graph": (True, ""),
    "--use-megatron-fsdp": (True, ""),
    "--use-torch-fsdp2": (True, ""),
    "--tensor-parallel-num-weight-shards": (2, "2"),
    "--expert-tensor-parallel-num-weight-shards": (2, "2"),
    "--fine-grained-activation-offloading": (True, ""),
    "--cpu-offloading-num-layers": (4, "4"),
    "--moe-paged-stash": (True, ""),
    "--moe-expert-rank-capacity-factor": (1.5, "1.5"),
    "--hybrid-context-parallel": (True, ""),
}


NEW_IN_0_19 = {
    "--tensor-parallel-num-weight-shards",
    "--expert-tensor-parallel-num-weight-shards",
}
NEW_IN_0_18 = {"--moe-paged-stash", "--moe-expert-rank-capacity-factor"}


def test_every_rule_has_its_case() -> None:
    assert [rule.flag for rule in _RULES] == list(FORBIDDEN)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("rule", _RULES, ids=lambda rule: rule.flag)
def test_features_that_no_schedule_can_run_with(rule: Any, name: str) -> None:
    bad, shown = FORBIDDEN[rule.flag]
    message = complaint(pipeline_schedule=name, **{rule.attribute: bad})
    named = " ".join(filter(None, [rule.flag, shown]))
    assert message == f"--pipeline-schedule {name} does not work with {named}: {rule.remedy}"
    assert "leave it out" in message or "use " in message
    for good in rule.allowed:
        validate(arguments(pipeline_schedule=name, **{rule.attribute: good}))
    # Megatron's own schedule may have it.
    validate(arguments(**{rule.attribute: bad}))


def test_rules_name_megatrons_flags_and_allow_its_defaults() -> None:
    megatron = checks_of("tests.unit.megatron_checks")
    defaults = megatron("flags_of_megatron", wanted=[rule.flag for rule in _RULES])
    lacking = {rule.flag for rule in _RULES} - defaults.keys()
    assert lacking in (set(), NEW_IN_0_19, NEW_IN_0_18 | NEW_IN_0_19)
    for rule in (one for one in _RULES if one.flag not in lacking):
        attribute, default = defaults[rule.flag]
        assert attribute == rule.attribute
        assert default in rule.allowed


@pytest.mark.parametrize("name", BUILDERS)
def test_a_pipeline_of_one_stage(name: str) -> None:
    message = complaint(pipeline_schedule=name, pipeline_model_parallel_size=1, world_size=1)
    assert message == (
        f"--pipeline-schedule {name} needs a pipeline, but --pipeline-model-parallel-size is 1: "
        "set it to 2 or more, or leave --pipeline-schedule out"
    )


@pytest.mark.parametrize("name", ["zb-h3", "ZB-H1", "megatron2", "schedule.csv"])
def test_an_unknown_name(name: str) -> None:
    message = complaint(pipeline_schedule=name)
    assert message.startswith(f"--pipeline-schedule {name}: no such schedule; choose megatron, ")
    for known in (*BUILDERS, ".json"):
        assert known in message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    message = complaint(pipeline_schedule=str(path))
    assert message == (
        f"--pipeline-schedule {path}: there is no file {path}; `zero-bubble schedule zb-h1 "
        f"--stages {STAGES} --microbatches {MICROBATCHES} --output FILE.json` makes one"
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "field 'format': expected 'zero-bubble schedule'"),
        (
            '{"format": "zero-bubble schedule", "version": 9}',
            "field 'version': expected 1, not 9",
        ),
    ],
)
def test_a_broken_file(content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text(content)
    message = complaint(pipeline_schedule=str(path))
    assert message.startswith(f"--pipeline-schedule {path}: ")
    assert reason in message


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "binary.json"
    path.write_bytes(b"\xff\xfe\x00\x80")
    assert complaint(pipeline_schedule=str(path)).startswith(f"--pipeline-schedule {path}: ")


def test_a_file_for_another_number_of_stages(tmp_path: Path) -> None:
    path = saved(build("zb-h1", 3, MICROBATCHES), tmp_path)
    assert complaint(pipeline_schedule=path) == (
        f"--pipeline-schedule {path} is for 3 stages, --pipeline-model-parallel-size is 2: "
        "make the two equal"
    )


def test_a_file_for_another_number_of_microbatches(tmp_path: Path) -> None:
    path = saved(build("zb-h1", STAGES, 5), tmp_path)
    assert complaint(pipeline_schedule=path) == (
        f"--pipeline-schedule {path} is for 5 microbatches, a batch has 4 (--global-batch-size / "
        "(--micro-batch-size x data parallel size)): make the two equal"
    )


def test_a_file_with_an_illegal_schedule(tmp_path: Path) -> None:
    good = build("zb-h1", STAGES, MICROBATCHES)
    without_its_end = Schedule(good.placement, MICROBATCHES, (good.passes[0][:-1], good.passes[1]))
    path = saved(without_its_end, tmp_path)
    message = complaint(pipeline_schedule=path)
    assert message.startswith(f"--pipeline-schedule {path} cannot run: stage 0, ")
    assert str(good.passes[0][-1]) in message


@pytest.mark.parametrize(
    ("flag", "attribute", "value"),
    [
        ("--rampup-batch-size", "rampup_batch_size", ["2", "2", "100"]),
        ("--step-batch-size-schedule", "step_batch_size_schedule", "0:8 100:16"),
    ],
)
def test_a_file_cannot_follow_a_growing_batch(
    flag: str, attribute: str, value: Any, tmp_path: Path
) -> None:
    path = saved(build("zb-h1", STAGES, MICROBATCHES), tmp_path)
    message = complaint(pipeline_schedule=path, **{attribute: value})
    assert message.startswith(f"--pipeline-schedule {path} is for one number of microbatches, ")
    assert f"{flag} {value} changes it" in message
    assert "use a schedule by name (gpipe, 1f1b, interleaved," in message
    validate(arguments(pipeline_schedule="zb-h1", **{attribute: value}))


@pytest.mark.parametrize("limit", [0.0, -3.0, 1e8, float("inf"), float("nan")])
def test_a_wait_limit_must_be_positive_and_finite(limit: float) -> None:
    message = complaint(pipeline_schedule="zb-h1", zero_bubble_wait_limit=limit)
    assert message == (
        f"--zero-bubble-wait-limit {limit:g}: must be above 0 seconds and at most 1e+07"
    )
    validate(arguments(pipeline_schedule="zb-h1", zero_bubble_wait_limit=0.5))


@pytest.mark.parametrize("other", ["1f1b", "megatron", "schedule.json"])
def test_the_alias_and_another_schedule(other: str) -> None:
    assert complaint(enable_zero_bubble=True, pipeline_schedule=other) == (
        "--enable-zero-bubble means --pipeline-schedule zb-h1, but --pipeline-schedule is "
        f"{other}: give one of the two"
    )


@pytest.mark.parametrize("given", [None, "zb-h1"])
def test_the_alias_means_zb_h1(given: str | None) -> None:
    args = arguments(enable_zero_bubble=True, pipeline_schedule=given)
    validate(args)
    assert args.pipeline_schedule == "zb-h1"


@pytest.mark.parametrize("given", [None, "megatron"])
def test_without_a_schedule_nothing_is_asked(given: str | None) -> None:
    args = arguments(pipeline_schedule=given, pipeline_model_parallel_size=1, world_size=1)
    before = dict(vars(args))
    validate(args)
    assert vars(args) == before | {
        "pipeline_schedule": "megatron",
        "zero_bubble_delays": False,
        "zero_bubble_positions": None,
        "zero_bubble_recompute": None,
    }


@pytest.mark.parametrize("name", BUILDERS)
def test_schedules_by_name(name: str) -> None:
    schedule = build(name, STAGES, MICROBATCHES)
    assert validate(arguments(pipeline_schedule=name)) == schedule.placement
    assert schedule_for(name, STAGES, MICROBATCHES) == schedule


@pytest.mark.parametrize("name", BUILDERS)
def test_a_saved_schedule_runs_as_it_was(name: str, tmp_path: Path) -> None:
    schedule = build(name, STAGES, MICROBATCHES)
    path = saved(schedule, tmp_path)
    validate(arguments(pipeline_schedule=path))
    assert schedule_for(path, STAGES, MICROBATCHES) == schedule


def test_microbatches_are_counted_for_each_replica(tmp_path: Path) -> None:
    """16 ranks are 2 stages x 2 tensor x 2 context x 2 data parallel."""
    path = saved(build("1f1b", STAGES, 6), tmp_path)
    shape = {
        "world_size": 16,
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 2,
        "micro_batch_size": 3,
    }
    validate(arguments(pipeline_schedule=path, global_batch_size=36, **shape))
    assert "a batch has 12 " in complaint(pipeline_schedule=path, global_batch_size=72, **shape)


BUCKETS = {"zero_bubble_bucket_all_stages": True, "overlap_grad_reduce": True}


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"pipeline_schedule": "megatron"}, "choose another, or leave"),
        ({"overlap_grad_reduce": False}, "add --overlap-grad-reduce, or leave"),
        ({"overlap_param_gather_with_optimizer_step": True}, "leave one of them out"),
    ],
)
def test_buckets_without_a_use(changes: dict[str, Any], remedy: str) -> None:
    fine = {"pipeline_schedule": "zb-h1"} | BUCKETS
    validate(arguments(**fine))
    message = complaint(**(fine | changes))
    assert message.startswith("--zero-bubble-bucket-all-stages ")
    assert remedy in message


def test_a_model_that_megatron_cannot_save() -> None:
    tied = {"mtp_num_layers": 1, "untie_embeddings_and_output_weights": False, "save": "there"}
    assert complaint(pipeline_schedule="zb-h1", **tied) == (
        "--save there: Megatron cannot save a model with --mtp-num-layers 1 and tied embeddings on "
        "several stages: add --untie-embeddings-and-output-weights, or leave --save out"
    )
    untied = {"untie_embeddings_and_output_weights": True}
    for change in (untied, {"save": None}, {"mtp_num_layers": None}):
        validate(arguments(pipeline_schedule="zb-h1", **(tied | change)))


def test_an_order_that_changes_the_bits_runs_and_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = "0F0 0F1 0I0 0I1 0W1 0W0"
    path = saved(parse(build("zb-h1", 2, 2).placement, 2, f"{row}\n{row}"), tmp_path)
    validate(arguments(pipeline_schedule=path, global_batch_size=4))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    said = record.getMessage()
    assert said.startswith(
        f"--pipeline-schedule {path} is legal, but not bit-identical to 1F1B: stage 0, 0W"
    )
    caplog.clear()
    validate(arguments(pipeline_schedule="zb-h1"))
    assert caplog.records == []


@pytest.mark.parametrize("name", ["zb-v", "interleaved"])
def test_megatron_skips_iterations_with_one_chunk_only(name: str) -> None:
    assert "(--iterations-to-skip 3 5) only with one" in complaint(
        pipeline_schedule=name, iterations_to_skip=[3, 5]
    )
    validate(arguments(pipeline_schedule="zb-h1", iterations_to_skip=[3, 5]))
    validate(arguments(pipeline_schedule=name, iterations_to_skip=[]))


def test_the_flags_are_parsed() -> None:
    parser = add_arguments(argparse.ArgumentParser())
    given = "--pipeline-schedule zb-h2 --enable-zero-bubble --zero-bubble-wait-limit 7.5"
    args = parser.parse_args([*given.split(), "--zero-bubble-device", "cpu"])
    assert vars(args) == {
        "pipeline_schedule": "zb-h2",
        "enable_zero_bubble": True,
        "zero_bubble_wait_limit": 7.5,
        "zero_bubble_device": "cpu",
        **RUNTIME_UNSET,
        **AUTO_UNSET,
        **POST_VALIDATION_UNSET,
    }
    assert vars(parser.parse_args([])) == {
        "pipeline_schedule": None,
        "enable_zero_bubble": False,
        "zero_bubble_wait_limit": None,
        "zero_bubble_device": None,
        **RUNTIME_UNSET,
        **AUTO_UNSET,
        **POST_VALIDATION_UNSET,
    }
    offered = parser.format_help()
    for name in BUILDERS:
        assert (name in offered) == (name in BUILDERS)


def test_a_schedule_file_is_plain_json(tmp_path: Path) -> None:
    path = Path(saved(build("zb-h1", STAGES, 1), tmp_path))
    assert json.loads(path.read_text())["passes"] == ["0F0 0I0 0W0", "0F0 0I0 0W0"]


def test_a_yaml_file_is_refused() -> None:
    """Megatron validates what it says by other code, after which ours would come too late."""
    with pytest.raises(ConfigurationError, match=r"--yaml-cfg job.yaml does not work with"):
        refuse_yaml(arguments(pipeline_schedule="zb-h1", yaml_cfg="job.yaml"))
    refuse_yaml(arguments(pipeline_schedule="zb-h1", yaml_cfg=None))
    refuse_yaml(arguments(yaml_cfg="job.yaml"))


def test_a_file_that_is_too_deep_or_cannot_be_read(tmp_path: Path) -> None:
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    assert complaint(pipeline_schedule=str(deep)).startswith(f"--pipeline-schedule {deep}: ")


def test_weight_shards_that_megatron_fills_in_are_those_of_tensor_parallelism() -> None:
    filled = arguments(
        pipeline_schedule="zb-h1",
        tensor_model_parallel_size=2,
        tensor_parallel_num_weight_shards=2,
        world_size=2 * STAGES,
    )
    validate(filled)
    filled.tensor_parallel_num_weight_shards = 4
    with pytest.raises(ConfigurationError, match="--tensor-parallel-num-weight-shards 4"):
        validate(filled)
