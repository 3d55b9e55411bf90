"""What a search may visit: conditions, constraints, and what is wrong with a space."""

from __future__ import annotations

import itertools

import optuna
import pytest

from bench.engines.protocol import Candidate
from bench.experiment import Condition, Parameter, SpaceSpec
from bench.search import space
from bench.search.space import Constraint, ConstraintError, Space

optuna.logging.set_verbosity(optuna.logging.WARNING)

FRACTION = Parameter("mem_fraction_static", "float", low=0.7, high=0.9, step=0.05)
ALGORITHM = Parameter("speculative_algorithm", "categorical", choices=(None, "NEXTN"))
STEPS = Parameter("steps", "int", low=1, high=3, when=(Condition("speculative_algorithm", ("NEXTN",)),))
TOPK = Parameter("topk", "categorical", choices=(1, 2), when=(Condition("speculative_algorithm", ("NEXTN",)),))
DRAFT = Parameter("draft", "int", low=2, high=8, when=(Condition("topk", (2,)),))
RADIX = Parameter("disable_radix_cache", "flag")
RATIO = Parameter("ratio", "categorical", choices=(None, 2.0), when=(Condition("disable_radix_cache", (False,)),))
GRAPHS = Parameter("cuda_graph_bs", "categorical", choices=(None, [1, 2, 4], [1, 8]))
TREE = ("draft <= steps * topk + 1",)


def spec(*parameters: Parameter, constraints: tuple[str, ...] = ()) -> SpaceSpec:
    return SpaceSpec("test", parameters, constraints)


def mtp() -> Space:
    return Space(spec(DRAFT, TOPK, FRACTION, STEPS, ALGORITHM, RATIO, RADIX, GRAPHS, constraints=TREE))


def texts(*parameters: Parameter, constraints: tuple[str, ...] = ()) -> list[str]:
    return [problem.text for problem in space.problems(spec(*parameters, constraints=constraints))]


def test_the_mtp_space_has_no_problems() -> None:
    assert texts(DRAFT, TOPK, FRACTION, STEPS, ALGORITHM, RATIO, RADIX, GRAPHS, constraints=TREE) == []


def test_enumeration_has_every_point_once_and_agrees_with_the_size() -> None:
    points = list(mtp().enumerate())
    keys = {tuple(sorted((name, str(value)) for name, value in point.values.items())) for point in points}
    # speculation off: 1; on: topk 1: 3 steps; topk 2: draft 2..3, 2..5, 2..7
    assert len(points) == len(keys) == mtp().size == 5 * (1 + 3 + 2 + 4 + 6) * 3 * 3


def test_a_parameter_exists_only_when_its_conditions_hold_through_every_generation() -> None:
    for point in mtp().enumerate():
        assert ("steps" in point.values) == (point.values.get("speculative_algorithm") == "NEXTN")
        assert ("draft" in point.values) == (point.values.get("topk") == 2)
        if point.values["disable_radix_cache"]:
            assert "ratio" not in point.values


def test_every_enumerated_point_is_contained_and_can_be_given_to_optuna() -> None:
    searched = mtp()
    study = optuna.create_study()
    for point in itertools.islice(searched.enumerate(), 0, None, 37):
        assert searched.contains(point)
        study.enqueue_trial(searched.parameters_of(point))
        trial = study.ask()
        assert searched.suggest(trial) == point
        assert set(trial.params) <= set(searched.distributions)


def test_suggestions_are_points_but_for_constraints() -> None:
    searched = mtp()
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    seen = [searched.suggest(study.ask()) for _ in range(200)]
    assert all(searched.contains(point) != bool(searched.violated(point)) for point in seen)
    assert any(searched.violated(point) for point in seen)


def test_floats_of_a_grid_are_written_short() -> None:
    assert sorted({point.values["mem_fraction_static"] for point in mtp().enumerate()}) == [0.7, 0.75, 0.8, 0.85, 0.9]
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    for _ in range(20):
        assert len(str(Space(spec(FRACTION)).suggest(study.ask()).values["mem_fraction_static"])) <= 4


def test_sampling_is_reproducible_and_meets_constraints() -> None:
    first = list(mtp().sample(100, seed=3))
    assert first == list(mtp().sample(100, seed=3))
    assert first != list(mtp().sample(100, seed=4))
    assert all(mtp().contains(point) for point in first)


@pytest.mark.parametrize(
    "values",
    [
        {"mem_fraction_static": 0.72},
        {"mem_fraction_static": 0.95},
        {"mem_fraction_static": 0.8, "steps": 1},
        {"mem_fraction_static": 0.8, "speculative_algorithm": "NEXTN", "topk": 1},
        {"mem_fraction_static": 0.8, "speculative_algorithm": "NEXTN", "topk": 1, "steps": 4},
        {"mem_fraction_static": 0.8, "speculative_algorithm": "NEXTN", "topk": 2, "steps": 1, "draft": 8},
        {"mem_fraction_static": 0.8, "unknown": 1},
        {},
    ],
)
def test_what_is_no_point_is_not_contained(values: dict[str, float | str]) -> None:
    assert not mtp().contains(Candidate(values))


def test_an_absent_switch_is_off() -> None:
    assert mtp().contains(Candidate({"mem_fraction_static": 0.8}))
    assert mtp().parameters_of(Candidate({"mem_fraction_static": 0.8}))["disable_radix_cache"] is False


def test_a_continuous_space_has_no_size_and_is_sampled() -> None:
    free = Space(spec(Parameter("a", "float", low=0.1, high=10, log=True), Parameter("b", "int", low=0, high=1)))
    assert free.size is None
    assert all(0.1 <= float(str(point.values["a"])) <= 10 for point in free.sample(50, seed=0))
    with pytest.raises(ValueError, match="a is continuous: give it a step"):
        list(free.enumerate())


@pytest.mark.parametrize(
    ("text", "values", "holds"),
    [
        ("a <= 2 * b + 1", {"a": 3, "b": 1}, True),
        ("a <= 2 * b + 1", {"a": 4, "b": 1}, False),
        ("1 < a < 4 and b == 2", {"a": 3, "b": 2}, True),
        ("1 < a < 4 and b == 2", {"a": 4, "b": 2}, False),
        ("(a + b) // 2 != -1", {"a": 1, "b": 1}, True),
        ("a / b >= 2", {"a": 1, "b": 0}, True),
        ("a <= b", {"a": 9}, True),  # does not bind where b is not set
    ],
)
def test_constraints(text: str, values: dict[str, int], holds: bool) -> None:
    assert Constraint(text).holds(values) is holds


@pytest.mark.parametrize(
    "text", ["__import__('os').system('x') < 1", "a.b < 1", "a ** 9 < 1", "a or b", "a", "a <", "a < 'x'", "a[0] < 1"]
)
def test_a_constraint_is_arithmetic_and_nothing_else(text: str) -> None:
    with pytest.raises(ConstraintError, match=r"allowed|cannot read|no comparison"):
        Constraint(text)


def test_nothing_to_search() -> None:
    assert "nothing to search" in texts()[0]
    assert "nothing to search" in texts(Parameter("a", "categorical", choices=(1,)))[0]


def test_a_condition_that_can_never_hold_is_said_with_what_is_possible() -> None:
    never = Parameter("x", "flag", when=(Condition("speculative_algorithm", ("NEXTM",)),))
    found = texts(ALGORITHM, never)
    assert found == ['can never hold: speculative_algorithm is never "NEXTM"; it is one of null, "NEXTN"']


def test_conditions_that_exclude_each_other_over_generations_are_found() -> None:
    child = Parameter("y", "flag", when=(Condition("steps", (1,)), Condition("speculative_algorithm", (None,))))
    assert "exclude each other" in texts(ALGORITHM, STEPS, child)[0]


def test_unknown_names_get_the_closest() -> None:
    child = Parameter("y", "flag", when=(Condition("speculative_algoritm", ("NEXTN",)),))
    assert texts(ALGORITHM, child) == ["no parameter 'speculative_algoritm' here; closest: speculative_algorithm"]
    assert "closest: steps" in texts(ALGORITHM, STEPS, constraints=("step < 2",))[0]


def test_conditions_in_a_circle_are_found() -> None:
    a = Parameter("a", "flag", when=(Condition("b", (True,)),))
    b = Parameter("b", "flag", when=(Condition("a", (True,)),))
    assert texts(a, b) == ["the conditions go in a circle: a -> b -> a"]


def test_constraints_that_no_point_meets_are_found_in_small_and_in_endless_spaces() -> None:
    a, b = Parameter("a", "int", low=1, high=3), Parameter("b", "int", low=1, high=3)
    assert "none of its points" in texts(a, b, constraints=("a + b < 2",))[0]
    endless = Parameter("c", "float", low=0, high=1)
    assert "random points" in texts(endless, b, constraints=("c > b",))[0]


@pytest.mark.parametrize(
    ("parameter", "said"),
    [
        (Parameter("a", "int", low=3, high=1), "low 3 is above high 1"),
        (Parameter("a", "int", low=0.5, high=1), "whole numbers"),
        (Parameter("a", "int", low=1), "needs low and high"),
        (Parameter("a", "float", low=0, high=1, log=True), "must lie above 0"),
        (Parameter("a", "float", low=1, high=2, log=True, step=0.1), "exclude each other"),
        (Parameter("a", "float", low=1, high=2, step=0), "step must be above 0"),
        (Parameter("a", "categorical"), "needs choices"),
        (Parameter("a", "categorical", choices=(1, 1)), "stands twice"),
        (Parameter("a", "integer", low=1, high=2), "closest: int"),
        (Parameter("a", "flag", memory="more"), "allowed: up, down or null"),
    ],
)
def test_what_is_wrong_with_a_parameter(parameter: Parameter, said: str) -> None:
    assert any(said in text for text in texts(parameter, FRACTION))


def test_true_and_one_are_different_choices() -> None:
    searched = Space(spec(Parameter("a", "categorical", choices=(1, True, "1"))))
    points = list(searched.enumerate())
    assert [type(point.values["a"]) for point in points] == [int, bool, str]
    assert all(searched.contains(point) for point in points)


def test_neighbours_differ_in_one_parameter_and_mutations_are_points_of_the_space():
    space = Space(
        SpaceSpec(
            "space",
            (
                Parameter("algorithm", "categorical", choices=(None, "A")),
                Parameter("steps", "int", 1, 4, when=(Condition("algorithm", ("A",)),)),
                Parameter("x", "float", 0.0, 1.0, 0.25),
            ),
        )
    )
    here = Candidate({"algorithm": "A", "steps": 2, "x": 0.5})
    around = list(space.neighbours(here, seed=0))
    assert {"x": 0.5} in [item.values for item in around]
    assert {item.values["steps"] for item in around if item.values.get("x") == 0.5 and "steps" in item.values} == {
        1,
        3,
        4,
    }
    assert all(space.contains(item) for item in [*around, *space.mutations(here, 50, seed=0)])
    switched_on = [
        item.values for item in space.neighbours(Candidate({"x": 0.5}), seed=0) if "algorithm" in item.values
    ]
    assert all("steps" in values for values in switched_on)
    assert switched_on


def test_neighbours_of_a_point_that_leaves_out_its_flags_leave_them_off() -> None:
    flags = tuple(Parameter(name, "flag") for name in ("a", "b", "c", "d"))
    space = Space(SpaceSpec("space", (Parameter("x", "int", 1, 4), *flags)))
    differing = [
        sum(item.values[name] != {"x": 2}.get(name, False) for name in item.values)
        for item in space.neighbours(Candidate({"x": 2}), seed=0)
    ]
    assert differing
    assert set(differing) == {1}
