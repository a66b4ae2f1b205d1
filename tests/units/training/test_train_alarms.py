"""Conditions that end a run, by hand."""

import math
from typing import Any

import pytest

pytest.importorskip("omegaconf")
from torchrl_llm_kl.training import ConfigError, read_config
from torchrl_llm_kl.training._alarms import Alarm, alarms_of, since_change, unlogged

LEAST: dict[str, Any] = {"model": {"name": "m"}, "data": {"prompts": "p.jsonl"}, "reward": "r.py:f"}


def rows_of(name: str, *values: float | None, **more: float) -> list[dict[str, float]]:
    return [{"step": i, **({} if x is None else {name: x}), **more} for i, x in enumerate(values)]


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("entropy < 0.01", ("entropy", "<", 0.01, 3)),
        ("kl>20 for 5", ("kl", ">", 20.0, 5)),
        (" doctor/answers/truncated >= 9e-1 for 1 step ", ("doctor/answers/truncated", ">=", 0.9, 1)),
        ("reward <= -2 for 2 steps", ("reward", "<=", -2.0, 2)),
    ],
)
def test_conditions_are_read(text: str, fields: tuple[object, ...]) -> None:
    (alarm,) = alarms_of(read_config(LEAST, [f"run.stop_when={text}", "algorithm.name=on_policy_distill"]))[1:]
    assert (alarm.figure, alarm.sign, alarm.bound, alarm.steps) == fields
    assert Alarm.read(alarm.text) == alarm


@pytest.mark.parametrize(
    "text", ["kl", "kl > high", "kl = 3", "kl > 3 for 0", "kl > 3 for", "kl > nan", "k l > 3", "> 3"]
)
def test_other_texts_are_refused_when_the_configuration_is_read(text: str) -> None:
    with pytest.raises(ConfigError, match=r'run\.stop_when has .*, such as "ESS < 0\.3" or "kl > 20 for 5"\.$'):
        read_config({**LEAST, "run": {"stop_when": ["kl > 3", text]}})


@pytest.mark.parametrize(
    ("sign", "values", "met"),
    [
        ("<", (3.0, 1.9, 1.5), True),
        ("<", (1.0, 1.0, 2.0), False),  # the bound itself
        ("<=", (3.0, 2.0, 2.0), True),
        (">", (1.0, 2.1, math.nan), True),  # a NaN meets any condition
        (">", (2.5, 2.0, 2.5), False),
        (">=", (2.0, 2.0), True),
        (">=", (2.5,), False),  # too few steps
        (">", (3.0, None, 3.0), False),  # a step without the figure interrupts the row
        (">", (3.0, 3.0, None), False),
    ],
)
def test_two_steps_in_a_row(sign: str, values: tuple[float | None, ...], met: bool) -> None:
    assert bool(Alarm.read(f"x {sign} 2 for 2").met(rows_of("x", *values))) is met


def test_the_doctor_s_figures_are_read_at_its_looks() -> None:
    rows = rows_of("doctor/answers/truncated", 1.0, None, None, 1.0, None)
    alarm = Alarm.read("doctor/answers/truncated > 0.9 for 2")
    assert alarm.met(rows).startswith(
        "doctor/answers/truncated was > 0.9 in 2 steps in a row (1, 1): see run.stop_when"
    )
    rows[3] = {"step": 3, "doctor/fault/stale": 1.0}  # a look without the figure
    assert alarm.met(rows) == ""


def kl_alarm(*changes: str) -> Alarm | None:
    config = read_config({**LEAST, "data": {"prompts": "p", "num_prompts": 2, "group_size": 4}}, changes)
    return next((alarm for alarm in alarms_of(config) if alarm.figure == "kl"), None)


@pytest.mark.parametrize(
    ("changes", "tokens", "highest"),
    [
        ((), 8 * 20, 50.0),  # answers of 20 tokens
        ((), 8 * 400, 200.0),  # half a nat for each of 400 tokens
        (("kl.place=none",), 8 * 100, 50.0),
        (("kl.target=0.7",), 8 * 400, 7.0),
        (("kl.target=0.7", "kl.stop_above=3"), 8 * 400, 3.0),
        (("kl.stop_above=3",), 8 * 400, 3.0),
    ],
)
def test_the_highest_kl(changes: tuple[str, ...], tokens: float, highest: float) -> None:
    alarm = kl_alarm(*changes, "kl.stop_after=2")
    assert alarm is not None
    above, at = (rows_of("kl", 0.0, x, x, answer_tokens=tokens) for x in (highest * 1.001, highest))
    assert f"the KL was above kl.stop_above={highest:g} nats per answer in 2 steps in a row" in alarm.met(above)
    assert (alarm.met(at), alarm.met(above[:2])) == ("", "")


def test_a_kl_to_a_teacher_has_a_bound_only_if_it_is_given() -> None:
    taught = ("algorithm.name=gkd", "algorithm.teacher=t")
    assert kl_alarm(*taught) is None
    alarm = kl_alarm(*taught, "kl.stop_above=4")
    assert alarm is not None
    assert alarm.bound == 4.0


def test_steps_before_a_change_do_not_count() -> None:
    rows, change = rows_of("kl", 9.0, 9.0, 9.0, 1.0), {"key": "optimizer.lr", "before": 1, "now": 2}
    assert [row["step"] for row in since_change(rows, [])] == [0, 1, 2, 3]
    changes: Any = [change | {"step": 1}, change | {"step": 2}]
    assert [row["step"] for row in since_change(rows, changes)] == [2, 3]


def test_a_figure_that_no_step_logs_is_named() -> None:
    alarms = alarms_of(read_config(LEAST, ["run.stop_when=[entropi < 1, kl > 9, doctor/x > 1]"]))
    (line,) = unlogged(alarms, {"step": 4, "kl": 0.1, "entropy": 2.0, "doctor/y": 1.0})
    assert line.startswith("warning: run.stop_when has entropi, which step 4 did not log")
    assert line.endswith("Logged: step, kl, entropy.")
