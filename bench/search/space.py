"""Space: the points that a search may visit, with conditions and constraints between their parameters."""

from __future__ import annotations

import ast
import itertools
import json
import math
import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalChoiceType,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from bench.engines.protocol import Candidate, Value
from bench.experiment import Parameter, SpaceSpec
from bench.words import closest, listed

KINDS = ("int", "float", "categorical", "flag")
SIGNIFICANT_DIGITS = 12  # of a float on a grid: 0.7 + 3 * 0.05 is written 0.85
MAX_EXACT = 200_000  # combinations that are counted one by one where constraints ask for it
MAX_OTHER_VALUES = 16  # of one parameter that a point's neighbours have
SAMPLES_PER_DRAW = 200  # random points tried for one that meets the constraints

Key: TypeAlias = tuple[str | int, ...]


class ConstraintError(ValueError):
    """A constraint cannot be read; the message says which part and what is allowed."""


@dataclass(frozen=True)
class SpaceProblem:
    """What is wrong with a space; ``key`` is where, below ``space`` in the configuration."""

    key: Key
    text: str


class Constraint:
    """An inequality between parameters, such as ``draft <= steps * topk + 1``. It binds where all of them are set.

    Raises:
        ConstraintError: anything but names, numbers, ``+ - * / //``, comparisons, ``and`` and parentheses.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError as error:
            raise ConstraintError(f"cannot read {text!r}: {error.msg}; write e.g. `a <= 2 * b + 1`") from error
        names: set[str] = set()
        self._holds = _condition(tree, names, text)
        self.names = frozenset(names)

    def holds(self, values: Mapping[str, Value]) -> bool:
        """Whether it holds, or does not bind because a parameter is not set."""
        if any(not isinstance(values.get(name), (int, float)) for name in self.names):
            return True
        return self._holds(values)


_Numeric: TypeAlias = Callable[[Mapping[str, Value]], float]
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a / b if b else math.inf,
    ast.FloorDiv: lambda a, b: a // b if b else math.inf,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def _condition(node: ast.expr, names: set[str], text: str) -> Callable[[Mapping[str, Value]], bool]:
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        parts = [_condition(item, names, text) for item in node.values]
        return lambda values: all(part(values) for part in parts)
    if isinstance(node, ast.Compare) and all(type(item) in _COMPARISONS for item in node.ops):
        terms = [_number(item, names, text) for item in (node.left, *node.comparators)]
        compare = [_COMPARISONS[type(item)] for item in node.ops]
        return lambda values: all(
            test(left(values), right(values)) for test, left, right in zip(compare, terms, terms[1:], strict=False)
        )
    raise ConstraintError(
        f"{text!r} is no comparison (at {ast.unparse(node)!r}); allowed are < <= > >= == != between sums, and `and`"
    )


def _number(node: ast.expr, names: set[str], text: str) -> _Numeric:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        constant = float(node.value) if isinstance(node.value, float) else node.value
        return lambda values: constant  # type: ignore[return-value]
    if isinstance(node, ast.Name):
        name = node.id
        names.add(name)
        return lambda values: values[name]  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand, names, text)
        return lambda values: -inner(values)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right, apply = (
            _number(node.left, names, text),
            _number(node.right, names, text),
            _OPERATORS[type(node.op)],
        )
        return lambda values: apply(left(values), right(values))
    raise ConstraintError(f"{text!r}: {ast.unparse(node)!r} is not allowed; use names, numbers, + - * / // and ( )")


class Space:
    """The points that a search may visit, of a specification in which ``problems`` finds nothing."""

    def __init__(self, spec: SpaceSpec) -> None:
        self.parameters = _ordered(spec.parameters)
        self.constraints = tuple(Constraint(text) for text in spec.constraints)
        self.distributions: dict[str, BaseDistribution] = {
            parameter.name: _distribution(parameter) for parameter in self.parameters
        }

    def suggest(self, trial: optuna.trial.BaseTrial) -> Candidate:
        """Ask an Optuna trial for a point, parameter by parameter, those whose conditions do not hold left out.

        The point may violate a constraint: ``violated`` says so.
        """
        values: dict[str, Value | None] = {}
        for parameter in self.parameters:
            if self._active(parameter, values):
                values[parameter.name] = _decode(parameter, _suggest(trial, parameter))
        return _candidate(values)

    def violated(self, candidate: Candidate) -> list[str]:
        """Constraints that a point violates, as they are written."""
        return [item.text for item in self.constraints if not item.holds(candidate.values)]

    def contains(self, candidate: Candidate) -> bool:
        """Whether a candidate is a point: every active parameter within its range, nothing else, no constraint broken.

        An absent value is None, and off for an on/off flag.
        """
        active: dict[str, Value | None] = {}
        for parameter in self.parameters:
            if self._active(parameter, active):
                value = candidate.values.get(parameter.name)
                active[parameter.name] = bool(value) if parameter.kind == "flag" and value is None else value
                if not _within(parameter, active[parameter.name]):
                    return False
        return set(candidate.values) <= set(active) and not self.violated(candidate)

    def parameters_of(self, candidate: Candidate) -> dict[str, CategoricalChoiceType]:
        """A point's values as Optuna keeps them, for active parameters only."""
        active: dict[str, Value | None] = {}
        for parameter in self.parameters:
            if self._active(parameter, active):
                value = candidate.values.get(parameter.name)
                active[parameter.name] = bool(value) if parameter.kind == "flag" else value
        return {name: _encode(value) for name, value in active.items()}

    def enumerate(self) -> Iterator[Candidate]:
        """All points, lazily, each once.

        Raises:
            ValueError: a parameter is continuous.
        """
        for values in self._combinations(self.parameters, {}):
            candidate = _candidate(values)
            if not self.violated(candidate):
                yield candidate

    @cached_property
    def size(self) -> int | None:
        """Number of points; None when a parameter is continuous, or when counting would take too long.

        Parameters on which nothing depends are multiplied, the others are counted one by one.
        """
        if any(_grid_size(parameter) is None for parameter in self.parameters):
            return None
        tied = {condition.parameter for parameter in self.parameters for condition in parameter.when}
        tied |= {name for constraint in self.constraints for name in constraint.names}
        core = _closure(self.parameters, tied)
        free = [parameter for parameter in self.parameters if parameter.name not in {item.name for item in core}]
        if math.prod(_grid_size(parameter) or 1 for parameter in core) > MAX_EXACT:
            return None
        total = 0
        for values in self._combinations(core, {}):
            if not self.violated(_candidate(values)):
                total += math.prod(_grid_size(item) or 1 for item in free if self._active(item, values))
        return total

    def sample(self, count: int, *, seed: int, default_share: float = 0.0) -> Iterator[Candidate]:
        """Random points that meet the constraints, at most ``count``, possibly equal ones among them.

        Args:
            default_share: chance that a parameter which can be left to the engine is.
        """
        generator = random.Random(seed)
        for _ in range(count):
            for _ in range(SAMPLES_PER_DRAW):
                candidate = self._draw(generator, default_share)
                if not self.violated(candidate):
                    yield candidate
                    break

    def neighbours(self, candidate: Candidate, *, seed: int) -> Iterator[Candidate]:
        """Points that differ from this one in one parameter; those that come to exist with it are drawn at random."""
        generator = random.Random(seed)
        before = self._complete(candidate)
        for changed in self.parameters:
            for value in _others(changed, before[changed.name], generator):
                values: dict[str, Value | None] = {}
                for parameter in self.parameters:
                    if not self._active(parameter, values):
                        continue
                    kept = value if parameter is changed else before[parameter.name]
                    values[parameter.name] = kept if _within(parameter, kept) else _random(parameter, generator)
                neighbour = _candidate(values)
                if values.get(changed.name) == value and not self.violated(neighbour):
                    yield neighbour

    def mutations(self, candidate: Candidate, count: int, *, seed: int) -> Iterator[Candidate]:
        """Points in which three parameters of this one are drawn anew, at most ``count``: what takes several
        changes at once to run or to pay, such as wider trees of draft tokens with fewer requests."""
        generator = random.Random(seed)
        before = self._complete(candidate)
        for _ in range(count):
            changed = {item.name for item in generator.sample(self.parameters, min(3, len(self.parameters)))}
            values: dict[str, Value | None] = {}
            for parameter in self.parameters:
                if self._active(parameter, values):
                    kept = before[parameter.name]
                    anew = parameter.name in changed or not _within(parameter, kept)
                    values[parameter.name] = _random(parameter, generator) if anew else kept
            mutation = _candidate(values)
            if not self.violated(mutation):
                yield mutation

    def _complete(self, candidate: Candidate) -> dict[str, Value | None]:
        """A value for each parameter: what a point leaves out is off, if it is a flag, or left to the engine."""
        absent = {item.name: False if item.kind == "flag" else None for item in self.parameters}
        return {**absent, **candidate.values}

    def _draw(self, generator: random.Random, default_share: float) -> Candidate:
        values: dict[str, Value | None] = {}
        for parameter in self.parameters:
            if self._active(parameter, values):
                left = _can_be_left(parameter) and default_share > 0 and generator.random() < default_share
                default = False if parameter.kind == "flag" else None
                values[parameter.name] = default if left else _random(parameter, generator)
        return _candidate(values)

    def _combinations(
        self, parameters: Sequence[Parameter], values: dict[str, Value | None]
    ) -> Iterator[dict[str, Value | None]]:
        if not parameters:
            yield dict(values)
            return
        first, rest = parameters[0], parameters[1:]
        if not self._active(first, values):
            yield from self._combinations(rest, values)
            return
        for value in _grid(first):
            yield from self._combinations(rest, {**values, first.name: value})

    def _active(self, parameter: Parameter, values: Mapping[str, Value | None]) -> bool:
        """Whether its conditions hold; a parameter that is itself absent satisfies none of them."""
        return all(
            condition.parameter in values and values[condition.parameter] in condition.values
            for condition in parameter.when
        )


def problems(spec: SpaceSpec) -> list[SpaceProblem]:
    """What is wrong with a space: ranges, conditions that cannot hold, cycles, constraints nothing satisfies."""
    if not spec.parameters:
        return [SpaceProblem(("parameters",), "there is nothing to search: the space has no parameters")]
    found = [problem for parameter in spec.parameters for problem in _parameter_problems(parameter)]
    if found:
        return found
    found = _condition_problems(spec) + _constraint_problems(spec)
    if found:
        return found
    if all(_grid_size(parameter) == 1 for parameter in spec.parameters):
        return [SpaceProblem(("parameters",), "there is nothing to search: every parameter has a single value")]
    return _unsatisfiable(spec)


def _parameter_problems(parameter: Parameter) -> list[SpaceProblem]:
    key: Key = ("parameters", parameter.name)
    return [SpaceProblem((*key, field) if field else key, text) for text, field in _faults(parameter)]


def _faults(parameter: Parameter) -> Iterator[tuple[str, str]]:
    """What is wrong and in which field ('' where several are concerned)."""
    if parameter.kind not in KINDS:
        yield f"kind is {parameter.kind!r}, allowed: {listed(KINDS)}{closest(parameter.kind, KINDS)}", "kind"
    if parameter.memory not in (None, "up", "down"):
        yield f"memory is {parameter.memory!r}, allowed: up, down or null", "memory"
    if parameter.kind == "categorical":
        if not parameter.choices:
            yield "a categorical needs choices: [...]", ""
        texts = [json.dumps(choice) for choice in parameter.choices]
        for text in dict.fromkeys(text for text in texts if texts.count(text) > 1):
            yield f"{text} stands twice among the choices", "choices"
    elif parameter.choices:
        yield f"choices belong to a categorical, kind is {parameter.kind}", "choices"
    if parameter.kind in ("int", "float"):
        yield from _range_faults(parameter)


def _range_faults(parameter: Parameter) -> Iterator[tuple[str, str]]:
    low, high, step = parameter.low, parameter.high, parameter.step
    if low is None or high is None:
        yield f"kind {parameter.kind} needs low and high; seen: low {low}, high {high}", ""
        return
    if low > high:
        yield f"low {low:g} is above high {high:g}", "low"
    if parameter.kind == "int" and any(value is not None and value != int(value) for value in (low, high, step)):
        yield f"kind int needs whole numbers; seen: low {low:g}, high {high:g}, step {step}", ""
    if step is not None and step <= 0:
        yield f"step must be above 0; seen: {step:g}", "step"
    if parameter.log and low <= 0:
        yield f"a logarithmic range must lie above 0; seen: low {low:g}", "low"
    if parameter.log and step is not None:
        yield "log and step exclude each other; drop one", "step"


def _condition_problems(spec: SpaceSpec) -> list[SpaceProblem]:
    by_name = {parameter.name: parameter for parameter in spec.parameters}
    found = []
    for parameter in spec.parameters:
        for condition in parameter.when:
            key: Key = ("parameters", parameter.name, "when", condition.parameter)
            other = by_name.get(condition.parameter)
            if other is None:
                hint = closest(condition.parameter, by_name)
                found.append(SpaceProblem(key, f"no parameter {condition.parameter!r} here{hint}"))
            elif not any(_within(other, value) for value in condition.values):
                values = listed(json.dumps(value) for value in condition.values)
                text = f"can never hold: {other.name} is never {values}; it is {_described(other)}"
                found.append(SpaceProblem(key, text))
    if found:
        return found
    loop = _cycle(by_name)
    if loop:
        text = f"the conditions go in a circle: {' -> '.join(loop)}"
        return [SpaceProblem(("parameters", loop[0], "when"), text)]
    return [problem for parameter in spec.parameters for problem in _contradictions(parameter, by_name)]


def _contradictions(parameter: Parameter, by_name: Mapping[str, Parameter]) -> list[SpaceProblem]:
    """Conditions that hold one by one and never together, those of the parameters they name included."""
    allowed: dict[str, list[Value | None]] = {}
    queue = list(parameter.when)
    while queue:
        condition = queue.pop()
        before = allowed.get(condition.parameter)
        now = [value for value in condition.values if before is None or value in before]
        if not now:
            text = f"can never hold: its conditions ask {condition.parameter} for values that exclude"
            return [SpaceProblem(("parameters", parameter.name, "when"), f"{text} each other")]
        if before is None:
            queue.extend(by_name[condition.parameter].when)
        allowed[condition.parameter] = now
    return []


def _cycle(by_name: Mapping[str, Parameter]) -> list[str]:
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for condition in by_name[name].when:
            loop = visit(condition.parameter, [*path, name])
            if loop:
                return loop
        done.add(name)
        return []

    return next((loop for name in by_name if (loop := visit(name, []))), [])


def _constraint_problems(spec: SpaceSpec) -> list[SpaceProblem]:
    names = [parameter.name for parameter in spec.parameters]
    found = []
    for index, text in enumerate(spec.constraints):
        try:
            constraint = Constraint(text)
        except ConstraintError as error:
            found.append(SpaceProblem(("constraints", index), str(error)))
            continue
        found += [
            SpaceProblem(
                ("constraints", index), f"constraint {text!r}: no parameter {name!r} here{closest(name, names)}"
            )
            for name in sorted(constraint.names - set(names))
        ]
    return found


def _unsatisfiable(spec: SpaceSpec) -> list[SpaceProblem]:
    if not spec.constraints:
        return []
    space = Space(spec)
    exact = space.size
    if exact == 0 or (exact is None and next(space.sample(20, seed=0), None) is None):
        seen = "none of its points" if exact == 0 else f"none of {20 * SAMPLES_PER_DRAW} random points"
        return [SpaceProblem(("constraints",), f"{seen} meets all constraints: {listed(spec.constraints)}")]
    return []


def _ordered(parameters: Sequence[Parameter]) -> tuple[Parameter, ...]:
    """Each after those that its conditions name, else as written."""
    done: dict[str, Parameter] = {}
    left = list(parameters)
    while left:
        ready = [item for item in left if all(condition.parameter in done for condition in item.when)]
        done[ready[0].name] = ready[0]
        left.remove(ready[0])
    return tuple(done.values())


def _closure(parameters: Sequence[Parameter], names: set[str]) -> list[Parameter]:
    """The named parameters and all on which their existence depends, in order."""
    for parameter in reversed(parameters):
        if parameter.name in names:
            names |= {condition.parameter for condition in parameter.when}
    return [parameter for parameter in parameters if parameter.name in names]


def _candidate(values: Mapping[str, Value | None]) -> Candidate:
    return Candidate({name: value for name, value in values.items() if value is not None})


def _described(parameter: Parameter) -> str:
    if parameter.kind == "categorical":
        return f"one of {listed(json.dumps(choice) for choice in parameter.choices)}"
    if parameter.kind == "flag":
        return "true or false"
    return f"{parameter.low:g} to {parameter.high:g}" + (f" by {parameter.step:g}" if parameter.step else "")


def _within(parameter: Parameter, value: Value | None) -> bool:
    if parameter.kind == "categorical":
        return any(
            value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in parameter.choices
        )
    if parameter.kind == "flag":
        return isinstance(value, bool)
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or parameter.low is None
        or parameter.high is None
    ):
        return False
    if parameter.kind == "int" and not isinstance(value, int):
        return False
    step = parameter.step or (1 if parameter.kind == "int" else None)
    on_grid = (
        step is None
        or math.isclose((value - parameter.low) / step % 1, 0, abs_tol=1e-6)
        or math.isclose((value - parameter.low) / step % 1, 1, abs_tol=1e-6)
    )
    return parameter.low <= value <= parameter.high and on_grid


def _grid(parameter: Parameter) -> Iterator[Value | None]:
    """All values in order.

    Raises:
        ValueError: the parameter is continuous.
    """
    if parameter.kind == "categorical":
        yield from parameter.choices
    elif parameter.kind == "flag":
        yield from (False, True)
    else:
        size = _grid_size(parameter)
        if size is None or parameter.low is None:
            raise ValueError(f"{parameter.name} is continuous: give it a step to enumerate the space")
        for index in range(size):
            yield _rounded(parameter, parameter.low + index * (parameter.step or 1))


def _grid_size(parameter: Parameter) -> int | None:
    if parameter.kind == "categorical":
        return len(parameter.choices)
    if parameter.kind == "flag":
        return 2
    if parameter.low is None or parameter.high is None:
        return None
    if parameter.low == parameter.high:
        return 1
    step = parameter.step or (1 if parameter.kind == "int" else None)
    return None if step is None else int((parameter.high - parameter.low) / step + 1e-9) + 1


def _random(parameter: Parameter, generator: random.Random) -> Value | None:
    low, high = parameter.low or 0.0, parameter.high or 0.0
    if parameter.log:
        return _rounded(parameter, math.exp(generator.uniform(math.log(low), math.log(high))))
    size = _grid_size(parameter)
    if size is None:
        return _rounded(parameter, generator.uniform(low, high))
    return next(itertools.islice(_grid(parameter), generator.randrange(size), None))


def _can_be_left(parameter: Parameter) -> bool:
    """Whether the engine's default is among its values."""
    return parameter.kind == "flag" or None in parameter.choices


def _others(parameter: Parameter, value: Value | None, generator: random.Random) -> list[Value | None]:
    """Other values of a parameter: all, or some where it has many."""
    size = _grid_size(parameter)
    if size is not None and size <= MAX_OTHER_VALUES:
        found: list[Value | None] = list(_grid(parameter))
    else:
        found = [_random(parameter, generator) for _ in range(MAX_OTHER_VALUES)]
    return [item for item in found if item != value]


def _rounded(parameter: Parameter, value: float) -> Value:
    if parameter.kind == "int":
        return round(value)
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def _distribution(parameter: Parameter) -> BaseDistribution:
    if parameter.kind == "categorical":
        return CategoricalDistribution([_encode(choice) for choice in parameter.choices])
    if parameter.kind == "flag":
        return CategoricalDistribution([False, True])
    low, high = parameter.low or 0, parameter.high or 0
    if parameter.kind == "int":
        return IntDistribution(int(low), int(high), log=parameter.log, step=int(parameter.step or 1))
    return FloatDistribution(float(low), float(high), log=parameter.log, step=parameter.step)


def _suggest(trial: optuna.trial.BaseTrial, parameter: Parameter) -> CategoricalChoiceType:
    distribution = _distribution(parameter)
    if isinstance(distribution, CategoricalDistribution):
        return trial.suggest_categorical(parameter.name, distribution.choices)
    if isinstance(distribution, IntDistribution):
        return trial.suggest_int(
            parameter.name, distribution.low, distribution.high, step=distribution.step, log=distribution.log
        )
    assert isinstance(distribution, FloatDistribution)
    return trial.suggest_float(
        parameter.name, distribution.low, distribution.high, step=distribution.step, log=distribution.log
    )


def _encode(value: Value | None) -> CategoricalChoiceType:
    """Optuna keeps no lists: one is kept as its JSON text."""
    return json.dumps(value) if isinstance(value, list) else value


def _decode(parameter: Parameter, value: CategoricalChoiceType) -> Value | None:
    if parameter.kind == "categorical":
        return next(
            choice for choice in parameter.choices if _encode(choice) == value and type(_encode(choice)) is type(value)
        )
    return _rounded(parameter, float(value)) if parameter.kind in ("int", "float") else bool(value)  # type: ignore[arg-type]
