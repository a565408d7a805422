"""The suite for stages finds faults of stages."""

from __future__ import annotations

import inspect
import itertools
from contextlib import suppress

import attrs
import numpy as np
import pytest

from dovetail.batch import Column, Ragged
from dovetail.errors import DovetailError
from dovetail.interfaces import Stage
from dovetail.plugins import objective_spec
from dovetail.sections import PluginSection
from dovetail_sdk.testing.conformance import StageConformance

COUNT = itertools.count()


@attrs.frozen(kw_only=True)
class BoundConfig(PluginSection):
    bound: float = 0.5


class Clip(Stage):
    """Clips advantages to ±bound, and reports the mean share that it clipped so far."""

    name = "clip"
    api = ">=1.0,<2"
    Config = BoundConfig
    phase = "estimate"

    def __init__(self, config, context):
        super().__init__(config, context)
        self.shares = []

    @classmethod
    def requires(cls, config, facts):
        return frozenset({"advantages"})

    @classmethod
    def rewrites(cls, config, facts):
        return frozenset({"advantages"})

    def run(self, batch, step):
        advantages = batch["advantages"]
        values = getattr(advantages, "values", advantages)
        clipped = self.clipped(values)
        step.metrics["advantage/clipped_share"] = self.share(values)
        return self.result(batch, self.column(advantages, clipped))

    def clipped(self, values):
        return np.clip(values, -self.config.bound, self.config.bound)

    def share(self, values):
        return float(np.mean(np.abs(values) > self.config.bound)) if values.size else 0.0

    def column(self, advantages, values):
        return advantages.with_values(values) if isinstance(advantages, Ragged) else values

    def result(self, batch, advantages):
        return batch.with_columns({"advantages": advantages})

    def step_counted(self, batch, step):
        if len(batch):
            self.shares.append(step.metrics["advantage/clipped_share"])

    def state(self):
        return {"shares": self.shares}

    def load_state(self, state):
        self.shares = list(state["shares"])


class TestClip(StageConformance):
    plugin = Clip


class TestClipByToken(StageConformance):
    plugin = Clip
    config = BoundConfig(name="clip", bound=0.1)
    overrides = ("algorithm.advantage=reinforce_plus_plus",)


class Scores(Stage):
    """Two columns of the reference policy's pass, of which one is its own, and one column by sample."""

    name = "scores"
    api = ">=1.0,<2"
    phase = "score"
    columns = (
        Column("sure.entropy", "float32", "ragged", "entropy", "sure", "response_ids"),
        Column("sure.words", "object", "object", "tokens as words", "sure"),
    )

    @classmethod
    def requires(cls, config, facts):
        return {"response_mask": "the pass of ref"}

    @classmethod
    def provides(cls, config, facts):
        return frozenset({"ref_log_probs", "sure.entropy", "sure.words"})

    @classmethod
    def because(cls, config, facts):
        return "every step"

    @classmethod
    def roles(cls, config, facts):
        return ("ref",)

    def asks(self, number, facts):
        return frozenset({"rollout_log_probs"}) if number % 2 else frozenset()

    def run(self, batch, step):
        asked = frozenset({"log_probs", "entropies"})
        found = step.roles["ref"].forward(batch, asked).result()
        words = [" ".join(map(str, row)) for row in batch["response_ids"]]
        return batch.with_columns(
            {
                "ref_log_probs": found["log_probs"],
                "sure.entropy": found["entropies"],
                "sure.words": words,
            }
        )


class TestScores(StageConformance):
    plugin = Scores


class Heads(Stage):
    """Three numbers a token, from the reference policy's pass, and two a sample."""

    name = "heads"
    api = ">=1.0,<2"
    phase = "score"
    columns = (
        Column("sure.heads", "float32", "ragged", "heads", "sure", "response_ids", (3,)),
        Column("sure.pair", "float32", "dense", "first and last head", "sure", inner=(None,)),
    )

    @classmethod
    def requires(cls, config, facts):
        return {"response_mask": "the pass of ref"}

    @classmethod
    def provides(cls, config, facts):
        return frozenset({"sure.heads", "sure.pair"})

    @classmethod
    def because(cls, config, facts):
        return "every step"

    @classmethod
    def roles(cls, config, facts):
        return ("ref",)

    def run(self, batch, step):
        entropies = step.roles["ref"].forward(batch, frozenset({"entropies"})).result()["entropies"]
        heads = entropies.with_values(np.outer(entropies.values, [1, 2, 3]).astype(np.float32))
        pair_N2 = heads.sum()[:, [0, 2]].astype(np.float32)
        return batch.with_columns({"sure.heads": heads, "sure.pair": pair_N2})


class HeadsReader(Stage):
    """Adds the last head's sum to the rewards."""

    name = "heads_reader"
    api = ">=1.0,<2"
    phase = "transform"
    columns = Heads.columns

    @classmethod
    def requires(cls, config, facts):
        return {"sure.heads": "its rewards", "sure.pair": "its rewards", "scores": "its rewards"}

    @classmethod
    def rewrites(cls, config, facts):
        return frozenset({"scores"})

    def run(self, batch, step):
        assert batch["sure.heads"].inner == (3,)
        assert batch["sure.pair"].shape == (len(batch), 3)  # the suite replaces None by 3
        added_N = batch["sure.heads"].sum()[:, 2] + batch["sure.pair"][:, -1]
        return batch.with_columns({"scores": (batch["scores"] + added_N).astype(np.float32)})


class TestHeads(StageConformance):
    plugin = Heads


class TestHeadsReader(StageConformance):
    plugin = HeadsReader


class Update(Stage):
    """An optimizer step of the actor over the whole batch."""

    name = "update_all"
    api = ">=1.0,<2"
    phase = "update"

    @classmethod
    def requires(cls, config, facts):
        return frozenset({"advantages", "old_log_probs"})

    @classmethod
    def roles(cls, config, facts):
        return ("actor",)

    def run(self, batch, step):
        metrics = step.roles["actor"].update(batch, objective_spec("policy")).result()
        step.updates["actor"] = 1
        step.metrics |= {name: metric.value for name, metric in metrics.items()}
        return batch


class TestUpdate(StageConformance):
    plugin = Update


class Check(Stage):
    """Nothing to check."""

    name = "fine"
    api = ">=1.0,<2"
    phase = "check"

    def skips(self, batch, step):
        return step.number == 1

    def run(self, batch, step):
        return batch


class TestCheck(StageConformance):
    plugin = Check


def result(change):
    """A Clip whose result is changed so: (batch given, batch returned) → batch."""

    def changed(self, batch, advantages):
        return change(batch, Clip.result(self, batch, advantages))

    return Clip, {"result": changed}


def clipped(change):
    """A Clip that makes this of the values."""
    return Clip, {"clipped": lambda self, values: change(values)}


def share(value):
    return Clip, {"share": lambda self, values: value}


def scored(change):
    """A Scores whose result is changed so."""
    return Scores, {"run": lambda self, batch, step: change(Scores.run(self, batch, step))}


def answering(base, what, answer):
    """A stage whose class method returns this."""
    return base, {what: classmethod(lambda cls, config, facts: answer())}


def by_row(batch, values):
    return batch.with_columns({"ref_log_probs": values})


def note(batch, done):
    for parts in batch["reward_components"]:
        parts["seen"] = 1.0
    return done


def look(batch, done, name):
    batch.require([name], "it")
    return done


def over_tokens(batch, done):
    """Advantages times a mean over each row's tokens, which is NaN where there is none."""
    counts_N = batch["response_mask"].sum()
    ones_N = (counts_N / counts_N).astype(np.float32)
    return done.with_columns({"advantages": batch["advantages"] * ones_N})


def ask_quietly(self, batch, step):
    with suppress(AssertionError):
        step.roles["critic"]
    return Scores.run(self, batch, step)


def leave_uncounted(self, batch, step):
    done = Update.run(self, batch, step)
    step.updates.clear()
    return done


def add_metric(self, batch, step):
    step.metrics["clipped"] = 0.5
    return Clip.run(self, batch, step)


class Forgetful(Clip):
    """Scales by how many steps it has seen, and does not keep that."""

    def clipped(self, values):
        return super().clipped(values) / np.float32(1 + len(self.shares))

    def load_state(self, state):
        pass


def unkept(self):
    return {"shares": set(self.shares)}


def needing_samples(self, batch, step):
    self.shares.append(float(batch["scores"].min()))


ADVANTAGES = frozenset({"advantages"})
CHANGES = "test_it_returns_the_same_samples_and_changes_what_it_names"
ANSWERS = "test_its_class_methods_give_the_same_twice_in_sets_of_names"
METRICS = "test_metrics_are_finite_and_named_after_a_part"
STATE = "test_its_state_goes_through_a_checkpoint_and_brings_it_back"
FAULTS = {
    "fewer rows": (CHANGES, result(lambda given, done: done.slice(0, len(done) - 1))),
    "other order": (CHANGES, result(lambda given, done: done.take(np.arange(len(done))[::-1]))),
    "undeclared": (
        CHANGES,
        result(lambda given, done: done.with_columns({"returns": done["scores"]})),
    ),
    "not named": (
        CHANGES,
        result(lambda given, done: done.with_columns({"scores": done["scores"] + 1})),
    ),
    "column gone": (CHANGES, result(lambda given, done: done.drop(["scores"]))),
    "array modified": (CHANGES, clipped(lambda values: values.clip(-0.5, 0.5, out=values))),
    "object modified": (CHANGES, result(note)),
    "dtype": (CHANGES, clipped(lambda values: values.astype(np.float64))),
    "shape": (CHANGES, scored(lambda done: by_row(done, np.zeros(len(done), np.float32)))),
    "lengths": (
        CHANGES,
        scored(lambda done: by_row(done, Ragged.from_list([[0.0]] * len(done), dtype="float32"))),
    ),
    "not finite": (CHANGES, clipped(lambda values: values / (values.std() * 0))),
    "not required": (CHANGES, result(lambda given, done: look(given, done, "returns"))),
    "one sample": (
        "test_a_batch_of_one_sample_works",
        clipped(lambda values: ((values - values.mean()) / values.std()).astype(np.float32)),
    ),
    "empty responses": ("test_a_batch_of_empty_responses_works", result(over_tokens)),
    "masked row": ("test_a_batch_with_a_fully_masked_row_works", result(over_tokens)),
    "on request": (
        "test_what_it_does_not_require_of_a_rollout_may_be_absent",
        result(lambda given, done: look(given, done, "rollout_log_probs")),
    ),
    "place": (
        "test_the_order_of_samples_does_not_matter",
        clipped(lambda values: (values * np.arange(len(values))).astype(np.float32)),
    ),
    "not provided": (
        "test_what_it_provides_is_there_unless_it_skips",
        scored(lambda done: done.drop(["sure.words"])),
    ),
    "role": (
        "test_it_uses_the_roles_that_it_names",
        answering(Scores, "roles", lambda: ("actor",)),
    ),
    "role, quietly": ("test_it_uses_the_roles_that_it_names", (Scores, {"run": ask_quietly})),
    "both": (
        "test_a_column_is_provided_or_rewritten_and_not_both",
        answering(Clip, "provides", lambda: ADVANTAGES),
    ),
    "provides another's": (
        "test_a_column_that_it_provides_is_one_of_core_or_its_own",
        answering(Clip, "provides", lambda: {"another.column"}),
    ),
    "requires its own": (
        "test_it_does_not_require_what_it_provides",
        answering(Scores, "requires", lambda: {"ref_log_probs"}),
    ),
    "writing check": ("test_a_check_writes_nothing", (Clip, {"phase": "check"})),
    "other reason": (ANSWERS, answering(Clip, "because", lambda: f"reason {next(COUNT)}")),
    "a list": (ANSWERS, answering(Clip, "requires", lambda: ["advantages"])),
    "misspelt": (
        "test_every_column_that_it_names_is_declared",
        answering(Clip, "requires", lambda: {"advntages"}),
    ),
    "before itself": ("test_it_runs_in_a_phase_and_beside_others", (Clip, {"before": ("clip",)})),
    "asks too much": (
        "test_it_asks_the_rollout_for_what_a_rollout_can_give",
        (Clip, {"asks": lambda self, number, facts: frozenset({"entropies"})}),
    ),
    "metric's name": (METRICS, (Clip, {"run": add_metric})),
    "metric's type": (METRICS, share(np.float32(0.5))),
    "metric's value": (METRICS, share(float("nan"))),
    "updates": ("test_optimizer_steps_are_counted_by_role", (Update, {"run": leave_uncounted})),
    "state forgotten": (STATE, (Forgetful, {})),
    "state of a set": (STATE, (Clip, {"state": unkept})),
    "no samples": ("test_a_step_without_samples_counts", (Clip, {"step_counted": needing_samples})),
}


@pytest.mark.parametrize(("test", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_faulty_stage_is_caught(test, fault, tmp_path):
    base, members = fault
    stage = type("Faulty", (base,), members)
    suite = type("Suite", (StageConformance,), {"plugin": stage})()
    check = getattr(suite, test)
    given = {"seed": 0, "tmp_path": tmp_path}
    wanted = inspect.signature(check).parameters
    with np.errstate(all="ignore"), pytest.raises((AssertionError, ValueError, DovetailError)):
        check(**{name: value for name, value in given.items() if name in wanted})


def test_empty_responses_are_tried_by_token_too():
    class Suite(StageConformance):
        plugin = type("Scaling", (Clip,), {"clipped": lambda self, values: values / values.max()})
        overrides = TestClipByToken.overrides

    with pytest.raises(ValueError, match="zero-size"):
        Suite().test_a_batch_of_empty_responses_works()
