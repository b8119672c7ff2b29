"""The plan file: what it stores, what it refuses, and how it reads."""

from __future__ import annotations

import json
import os
import stat
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from autoptd.errors import PlanError, PlanFileError
from autoptd.explain.compare import compare, comparison_data, differences, verdict
from autoptd.explain.plan import explain, headline
from autoptd.plans.data import Collectives, MeshSizes, Schedule, Splits, StagePlan
from autoptd.plans.model import ChangedPlanWarning, Plan
from autoptd.text import fold_names, fold_table, ranges
from tests.sample_plan import sample_plan


def as_data() -> dict[str, Any]:
    return json.loads(sample_plan().to_json())


def refusal(data: Any) -> str:
    with pytest.raises(PlanFileError) as caught:
        Plan.from_json(data if isinstance(data, str) else json.dumps(data), where="plan.json")
    return str(caught.value)


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    data = as_data()
    *above, last = path
    place = data
    for key in above:
        place = place[key]
    place[last] = value
    return data


# --- writing and reading ------------------------------------------------------------------------------------------


def test_a_saved_plan_loads_equal_and_saves_the_same_bytes(tmp_path: Path):
    plan = sample_plan()
    plan.save(tmp_path / "a.json")
    loaded = Plan.load(str(tmp_path / "a.json"))
    loaded.save(tmp_path / "b.json")
    assert loaded == plan
    assert hash(loaded) == hash(plan)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_equal_plans_are_the_same_bytes_however_they_were_made():
    plan = sample_plan()
    shuffled = sample_plan(
        splits=Splits(
            parameters=dict(reversed(plan.splits.parameters.items())),
            activations=dict(reversed(plan.splits.activations.items())),
        ),
        predicted=plan.predicted.model_copy(update={"tokens_per_s": 8192}),
    )
    assert shuffled == Plan.from_json(shuffled.to_json())
    loaded = Plan.from_json(shuffled.to_json().replace("8192.0", "8192"))
    assert loaded.to_json() == plan.to_json()


def test_the_text_has_sorted_keys_and_exact_floats():
    plan = sample_plan(predicted=sample_plan().predicted.model_copy(update={"mfu": 0.1 + 0.2}))
    text = plan.to_json()
    assert text == json.dumps(json.loads(text), sort_keys=True, indent=1) + "\n"
    assert Plan.from_json(text).predicted.mfu == 0.1 + 0.2


def test_a_file_that_exists_is_replaced_whole_and_keeps_no_leftovers(tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_text("old")
    sample_plan().save(path)
    assert Plan.load(path) == sample_plan()
    assert list(tmp_path.iterdir()) == [path]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_saving_where_it_cannot_be_done(tmp_path: Path):
    with pytest.raises(PlanFileError, match=r"the folder .*nowhere does not exist"):
        sample_plan().save(tmp_path / "nowhere" / "plan.json")
    with pytest.raises(PlanFileError, match="it is a folder"):
        sample_plan().save(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_saving_without_permission(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(PlanFileError, match="no permission"):
        sample_plan().save(tmp_path / "plan.json")


def test_a_plan_is_frozen():
    with pytest.raises(ValidationError):
        sample_plan().world = 4


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("{", "line 1 column 2"),
        ("[1, 2]", "not an autoptd plan"),
        ('"plan"', "not an autoptd plan"),
        ('{"weights": 1}', "no field `format`"),
        ('{"format": "other-plan"}', "its format is 'other-plan'"),
        ('{"format": "autoptd-plan"}', "version is None"),
        ('{"format": "autoptd-plan", "version": 2}', "version 2; this autoptd reads 1"),
        ('{"format": "autoptd-plan", "version": "1"}', "version is '1'"),
        ('{"format": "autoptd-plan", "version": true}', "version is True"),
        ('{"format": 1, "format": 2}', "'format' occurs twice"),
        ('{"format": "autoptd-plan", "version": NaN}', "NaN"),
        ("[" * 100_000, "not JSON"),
        ('{"format": ' + "1" * 5000 + "}", "not JSON"),
    ],
)
def test_files_that_are_no_plans(text: str, said: str):
    assert said in refusal(text)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["mesh", "tp"], 4, "mesh: dp 2 × tp 4 × pp 2 is 16 ranks, but world is 8"),
        (["mesh", "tp"], "2", "mesh.tp: input should be a valid integer, got '2'"),
        (["mesh", "tpp"], 2, "mesh.tpp: unknown key; did you mean 'tp'"),
        (["world"], 0, "world: input should be greater than or equal to 1, got 0"),
        (["world"], True, "world: input should be a valid integer, got True"),
        (["batch"], 17, "schedule.microbatches: is 4, but a batch of 17 in microbatches of dp 2 × 2 is 5"),
        (["batch"], 12, "microbatches of dp 2 × 2 is 3"),
        (["batch"], 13, "batch: is 13: some of dp 2 ranks have 6 samples, and fewer microbatches"),
        (["method", "offload"], [0.5], "method.offload: has 1 entries; one per pipeline rank is 2"),
        (["method", "offload"], [0.5, 1.5], "method.offload[1]: input should be less than or equal to 1"),
        (["sizes"], {"s": 128}, "sizes: lacks b"),
        (["stages", 1, "first"], 4, "stages[1].first: is 4; it must be 3, one after stages[0].last"),
        (["stages", 0, "first"], 1, "stages[0].first: is 1; it must be 0, the first segment"),
        (["stages", 1, "last"], 4, "stages[1].last: is 4; the last segment is 5"),
        (["stages", 1, "last"], 2, "stages[1].last: is 2, before first 3"),
        (["stages", 1, "recompute"], [5, 2], "stages[1].recompute[1]: is 2, outside 3 to 5"),
        (["stages", 1, "frist"], 4, "stages[1].frist: unknown key; did you mean 'first'"),
        (["method", "shard"], 4, "method.shard: unknown key; did you mean 'shards'"),
        (["stages"], [], "stages: "),
        (
            ["splits", "parameters", "transformer.wte.weight"],
            "S-1",
            "splits.parameters[\"transformer.wte.weight\"]: 'S-1'",
        ),
        (
            ["splits", "activations", "embed.hidden"],
            "Q",
            "splits.activations[\"embed.hidden\"]: 'Q' is not a placement",
        ),
        (["boundaries", "block"], ["S1", "b"], "boundaries[\"block\"]: 'b' is not a placement"),
        (["precision"], "bf61", "precision: input should be 'bf16', 'fp16', 'fp32' or 'fp64'"),
        (
            ["schedule", "kind"],
            "gpip",
            "schedule.kind: input should be '1f1b', 'gpipe', 'interleaved', 'zero-bubble' or",
        ),
        (["zero"], 4, "zero: input should be less than or equal to 3, got 4"),
        (["graph_hash"], "sha256:12", "graph_hash: string should match pattern"),
        (["predicted", "memory"], [{}], "predicted.memory: has 1 entries; one per stage is 2"),
        (["predicted", "memory_bytes"], 2**30, "predicted.memory_bytes: is 1073741824, but predicted.memory of the"),
        (["predicted", "memory", 0, "optimizer"], 0, "predicted.memory_bytes: is 5368709120, but predicted.memory of"),
        (["predicted", "tokens_per_s"], 9000.0, "predicted.tokens_per_s: is 9000, but 2048 tokens in a step of 0.25"),
        (["predicted", "time_s", "compute"], 0.1, "predicted.time_s: is 0.2 s in all, less than step_time_s, 0.25"),
        (
            ["predicted", "times"],
            [{"forward_s": 0.1, "backward_s": 0.1}, {"forward_s": 0.1, "backward_s": 0.1, "weight_s": 0.2}],
            "predicted.times[1].weight_s: weight_s is part of backward_s and cannot be longer",
        ),
        (["schedule", "virtual"], 2, "schedule.virtual: is 2, but 1f1b has 1 chunk per rank"),
        (["schedule", "kind"], "zero-bubble-v", "schedule.virtual: is 1, but zero-bubble-v has 2 chunks per rank"),
        (["method", "shards"], 3, "method.shards: is 3; it must divide dp × cp, 2"),
        (["method", "shards"], 4, "method.shards: is 4; it must divide dp × cp, 2"),
        (["stages", 1, "device"], "tpu", "stages[1].device: is tpu, which the cluster does not have"),
        (["stages", 0, "recompute"], [1, 1], "stages[0].recompute[1]: is 1, which has a policy already"),
        (["predicted", "mfu"], -0.1, "predicted.mfu: input should be greater than or equal to 0"),
        (["cluster", "device", "memory_bytes"], -1, "cluster.device.memory_bytes: input should be greater than 0"),
        (["colour"], "blue", "colour: unknown key"),
    ],
)
def test_a_mistake_is_named_by_its_field(path: list[Any], value: Any, said: str):
    text = refusal(changed(path, value))
    assert said in text
    assert "plan.json" in text


def test_shards_without_zero_are_refused():
    data = changed(["method", "shards"], 2)
    assert Plan.from_json(json.dumps(data)).method.shards == 2
    assert "method.shards: is 2, but zero is 0, which shards nothing" in refusal(data | {"zero": 0})


def predicted_plan() -> Plan:
    """Return the sample with the digest that the search writes."""
    plan = sample_plan()
    return sample_plan(predicted=plan.predicted.model_copy(update={"choices": plan.choices}))


def test_a_prediction_of_other_choices_is_said_wherever_it_is_shown():
    plan = predicted_plan()
    assert Plan.from_json(plan.to_json()) == plan, "without a warning"
    assert "changed since" not in explain(plan)
    with pytest.warns(ChangedPlanWarning, match=r"p\.json was changed since it was predicted"):
        other = Plan.from_json(plan.to_json().replace('"zero": 1', '"zero": 2'), where="p.json")
    assert other.was_changed and not plan.was_changed
    line = "times and memory are of other choices"
    assert line in explain(other).replace("\n", " ")
    assert line in other.to_html()
    assert compare(plan, other, width=200).count(line) == 1


def test_names_and_notes_may_be_changed():
    plan = predicted_plan()
    assert not plan.model_copy(update={"model": "mine", "notes": ("tried",), "others": ()}).was_changed
    for update in ({"precision": "fp16"}, {"optimizer": "sgd"}, {"batch": 15}, {"cluster": plan.cluster.model_copy(
        update={"name": "other"})}):  # fmt: skip
        assert plan.model_copy(update=update).was_changed, update


def test_a_plan_of_unknown_choices_has_no_such_field():
    assert "choices" not in json.loads(sample_plan().to_json())["predicted"]
    assert not sample_plan(zero=2).was_changed


def test_plans_of_other_batches_are_compared_by_throughput():
    plan = sample_plan()
    half = plan.predicted.model_copy(update={"step_time_s": 0.2, "time_s": {"compute": 0.2}})
    other = sample_plan(batch=8, schedule=Schedule(kind="1f1b", microbatches=2), predicted=half)
    first, second = compare(plan, other, width=200).splitlines()[:2]
    sizes = "their steps are of 2,048 tokens and 1,024 tokens"
    assert first == f"A is 60.0% faster than B: 8,192 tokens/s against 5,120; {sizes}"
    assert second.startswith("a step of B takes 50 ms less")
    assert comparison_data(plan, other)["verdict"] == first


def test_plans_of_other_models_are_said_to_be():
    plan = sample_plan()
    other = sample_plan(graph_hash="sha256:" + "f" * 64)
    assert verdict(plan, other) == "A and B are predicted equally fast: 250 ms a step, of different graphs"
    named = other.model_copy(update={"model": "vit", "sizes": {"b": 2}})
    said = "A and B have no common measure: their steps are of 2,048 tokens and 16 samples, of different models"
    assert verdict(plan, named) == said
    assert verdict(plan, sample_plan(zero=2)) == "A and B are predicted equally fast: 250 ms a step"


def test_a_missing_field_is_named():
    data = as_data()
    del data["stages"][1]["last"], data["mesh"]
    text = refusal(data)
    assert "stages[1].last: missing" in text
    assert "mesh: missing" in text


def test_overflowing_numbers_are_refused():
    text = sample_plan().to_json()
    assert "finite" in refusal(text.replace("0.4321", "1e999"))
    assert "finite" in refusal(text.replace("450000000000.0", "1e999"))


def test_many_mistakes_are_counted_and_the_first_shown():
    data = changed(["splits", "parameters"], {f"w{i}": "X" for i in range(50)})
    text = refusal(data)
    assert "50 mistakes" in text
    assert "and 42 more" in text


def test_a_plan_made_wrong_in_python_is_refused_as_well():
    with pytest.raises(ValidationError, match="16 ranks, but world is 8"):
        sample_plan(mesh=MeshSizes(dp=2, tp=2, pp=4))


def test_the_last_microbatch_may_be_ragged():
    assert sample_plan(batch=15).batch == 15
    with pytest.raises(ValidationError, match="is 3"):
        sample_plan(batch=12)


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(PlanFileError, match="No such file"):
        Plan.load(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanFileError, match="not UTF-8"):
        Plan.load(tmp_path / "bytes.json")


def test_another_graph_is_refused_with_both_hashes():
    plan, other = sample_plan(), "sha256:" + "f" * 64
    plan.check_graph(plan.graph_hash)
    with pytest.raises(PlanFileError) as caught:
        plan.check_graph(other)
    assert plan.graph_hash in str(caught.value)
    assert other in str(caught.value)


def test_another_world_is_refused_with_both_numbers():
    sample_plan().check_world(8)
    with pytest.raises(PlanError, match=r"world of 8 ranks .* but the world is 6"):
        sample_plan().check_world(6)


# --- fuzz: only PlanFileError comes out ---------------------------------------------------------------------------

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.sampled_from([2**63, 2**200, 10**400, 1e308, -0.0, 0.5, "", "S0", "S99999999999", "Ω", "\ud800", "a\nb"]),
    st.just([]),
    st.just({}),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.none(), max_size=2),
)


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path] * bool(path) + [found for key, value in inside for found in places(value, (*path, key))]


PLACES = places(as_data())


@given(
    st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(["set", "drop", "add"]), JUNK), min_size=1, max_size=3)
)
@settings(max_examples=400, deadline=None)
def test_a_mutated_plan_is_refused_or_still_round_trips(mutations: list[tuple[tuple[Any, ...], str, Any]]):
    data = as_data()
    for path, how, junk in mutations:
        mutate(data, path, how, deepcopy(junk))  # a second mutation may change the first one's value
    loads_or_refuses(json.dumps(data))


@given(st.integers(0, 4000), st.integers(0, 40), st.text(max_size=8))
@settings(max_examples=200, deadline=None)
def test_a_torn_plan_is_refused_or_still_round_trips(at: int, length: int, patch: str):
    text = sample_plan().to_json()
    loads_or_refuses(text[:at] + patch + text[at + length :])


def mutate(data: Any, path: tuple[Any, ...], how: str, junk: Any) -> None:
    *above, last = path
    for key in above:
        if not isinstance(data, (dict, list)) or key not in (data if isinstance(data, dict) else range(len(data))):
            return
        data = data[key]
    if how == "add" and isinstance(data, dict):
        data[f"{last}x"] = junk
    elif isinstance(data, dict) or (isinstance(data, list) and isinstance(last, int) and last < len(data)):
        if how == "drop":
            data.pop(last) if isinstance(data, list) else data.pop(last, None)
        else:
            data[last] = junk


def loads_or_refuses(text: str) -> None:
    try:
        plan = Plan.from_json(text)
    except PlanFileError:
        return
    assert Plan.from_json(plan.to_json()) == plan
    assert explain(plan)


# --- reading ------------------------------------------------------------------------------------------------------


def test_the_answer_comes_first():
    first, second, third, fourth = explain(sample_plan(), width=200).splitlines()[:4]
    assert first == "gpt2-small on 8 × test-cluster: dp 2 × tp 2 × pp 2, ZeRO-1, recompute 1 of 6 segments"
    assert second == "a step of 16 samples, s 128: 4 microbatches of 2 per dp rank, 1F1B, bf16, adamw"
    assert third == "predicted 250 ms/step, 8,192 tokens/s, MFU 43.2%"
    assert fourth == "memory 5.0 GiB on the fullest rank, with 95% confidence below 5.7 of 80.0 GiB"


@pytest.mark.parametrize(("again", "said"), [((), "recompute none"), (tuple(range(6)), "recompute full")])
def test_recompute_in_words(again: tuple[int, ...], said: str):
    stages = tuple(
        StagePlan(first=first, last=last, modules="…", recompute=tuple(i for i in again if first <= i <= last))
        for first, last in ((0, 2), (3, 5))
    )
    assert headline(sample_plan(stages=stages)).endswith(said)


def test_a_loaded_plan_reads_like_the_saved_one():
    plan = sample_plan()
    assert explain(Plan.from_json(plan.to_json())) == explain(plan) == plan.explain()


@pytest.mark.parametrize("width", [40, 80, 100])
def test_no_line_is_wider_than_the_page(width: int):
    assert max(map(len, explain(sample_plan(), width).splitlines())) <= width


def test_layers_are_folded_and_every_parameter_appears():
    text = explain(sample_plan())
    assert "transformer.h.{0..3}.attn.c_attn.weight  S1/3" in text
    assert "transformer.wte.weight                   S0" in text
    assert "transformer.h.0." not in text


def test_tensors_of_a_module_with_one_placement_are_one_line():
    parameters = {f"h.{i}.fc.{leaf}": "S0" for i in range(3) for leaf in ("weight", "bias")} | {"norm.weight": "Bp"}
    text = explain(sample_plan(splits=Splits(parameters=parameters, activations={})))
    assert "h.{0..2}.fc.{bias,weight}  S0" in text
    assert "S<dim> split along dim; Bp replicated, gradients summed over tp\n" in text


def test_pieces_of_a_layer_are_one_row_of_collectives():
    pair = {"all_gather": 1, "reduce_scatter": 1}
    pieces = {kind: Collectives(count=4, forward=pair, backward=pair) for kind in ("h.*.{ln_*,attn}", "h.*.{ln_*,mlp}")}
    head = Collectives(count=1, forward={"all_reduce": 2}, backward={})
    lines = [line.split() for line in explain(sample_plan(collectives={**pieces, "head": head})).splitlines()]
    two = ["all-gather", "2,", "reduce-scatter", "2"]
    assert ["h.*", "4", *two, *two] in lines
    assert ["head", "1", "all-reduce", "2", "none"] in lines


def test_the_page_is_short_and_the_whole_is_there_for_the_asking():
    plan = sample_plan()
    assert "c_proj" not in explain(plan).split("Parameters on the tp axis")[0]
    assert "Strategies in block" not in plan.explain()
    assert "Strategies in block" in plan.explain(all=True)
    assert "embed.hidden" in plan.explain(all=True)
    many = sample_plan(
        world=80,
        mesh=MeshSizes(dp=2, tp=2, pp=20),
        segments=tuple(f"h.{i}" for i in range(20)),
        stages=tuple(StagePlan(first=i, last=i, modules=f"h.{i}") for i in range(20)),
        predicted=plan.predicted.model_copy(update={"memory": tuple({"parameters": i * 2**30} for i in range(1, 21))}),
    )
    rows = [line.split() for line in many.explain().splitlines()]
    assert ["14", "1", "-", "h.14"] in rows
    assert ["15", "1", "-", "h.15"] not in rows
    assert rows.count(["…"]) == 2
    assert ["19", "1", "-", "h.19"] in [line.split() for line in many.explain(all=True).splitlines()]


def test_time_is_sorted_and_has_shares():
    lines = explain(sample_plan()).splitlines()
    rows = lines[lines.index("Time of one step") + 2 :][:4]
    assert [row.split()[0] for row in rows] == ["compute", "bubble", "tp", "dp"]
    assert "60.0%" in rows[0]


def test_a_notebook_gets_escaped_text():
    page = sample_plan(model="<b>")._repr_html_()
    assert page.startswith("<iframe ")
    assert "&lt;h1&gt;&amp;lt;b&amp;gt; on 8" in page


def test_fold_names():
    assert fold_names(["h.10.w", "h.2.w", "h.1.w", "a.w", "h.0.w"]) == ["a.w", "h.{0..2,10}.w"]
    assert fold_names(f"l.{i}.e.{j}.w" for i in range(3) for j in range(4)) == ["l.{0..2}.e.{0..3}.w"]
    assert fold_names(["l.0.e.0.w", "l.0.e.1.w", "l.1.e.0.w"]) == ["l.0.e.{0..1}.w", "l.1.e.0.w"]
    assert fold_table([("h.0.w", "S0"), ("h.1.w", "S1"), ("h.2.w", "S0")]) == [("h.{0,2}.w", "S0"), ("h.1.w", "S1")]
    assert ranges([]) == ""


@given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1))
def test_folded_names_unfold_to_the_same_set(indices: set[tuple[int, int]]):
    names = {f"l.{i}.e.{j}.w" for i, j in indices}
    assert {name for line in fold_names(names) for name in unfolded(line)} == names


def unfolded(line: str) -> list[str]:
    before, brace, rest = line.partition("{")
    if not brace:
        return [line]
    inside, _, after = rest.partition("}")
    numbers = [n for run in inside.split(",") for n in range(int(run.split("..")[0]), int(run.split("..")[-1]) + 1)]
    return [name for n in numbers for name in unfolded(f"{before}{n}{after}")]


def test_comparing_a_plan_with_itself():
    assert "same plan" in sample_plan().compare(sample_plan())
    assert differences(sample_plan(), sample_plan()) == {}


def test_comparing_says_who_wins_and_why():
    a = sample_plan()
    slow = a.predicted.model_copy(update={"step_time_s": 0.3, "time_s": {**a.predicted.time_s, "bubble": 0.1}})
    parameters = {name: "B" if "c_fc" in name else text for name, text in a.splits.parameters.items()}
    b = sample_plan(predicted=slow, splits=Splits(parameters=parameters, activations={}), zero=0, batch=14, notes=())
    text = compare(a, b)
    assert text.startswith("A is 37.1% faster than B: 8,192 tokens/s against 5,973; their steps are of 2,048 tokens")
    assert "+50 ms (+100.0%)" in text
    assert "transformer.h.{0..3}.mlp.c_fc.weight  S1  B" in text
    assert ["ZeRO", "1", "0"] in [line.split() for line in text.splitlines()]
    found = differences(a, b)
    assert found["batch"] == [16, 14]
    assert found["predicted.time_s.bubble"] == [0.05, 0.1]
    assert found["splits.activations.embed.hidden"] == ["S1", None]


def test_schedule_microbatches_reads_well():
    plan = sample_plan(batch=4, schedule=Schedule(kind="1f1b", microbatches=1))
    assert "1 microbatch of 2 per dp rank, 1F1B" in explain(plan)


def test_a_plan_is_one_line_in_a_console():
    plan = sample_plan()
    assert repr(plan) == "<Plan gpt2-small on 8 × test-cluster: dp 2 × tp 2 × pp 2, 250 ms/step, 8,192 tokens/s>"
    assert str(plan) == repr(plan)
