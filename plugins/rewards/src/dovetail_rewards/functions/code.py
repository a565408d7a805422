"""The reward function `code`: runs the response's program on the row's test cases."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs

from dovetail.interfaces import GroundTruth, PluginConfig, PluginContext, RewardFunction
from dovetail_rewards.config_code import CodeConfig
from dovetail_rewards.functions.code_cases import CaseRunner
from dovetail_rewards.functions.code_questions import only_in_process
from dovetail_rewards.functions.code_sandboxes import runner_for
from dovetail_rewards.functions.code_truth import AssertTests, Tests, parse_truth
from dovetail_rewards.sandbox.levels import GUARANTEES

_FENCED = re.compile(
    r"^[ \t]*(`{3,}|~{3,})[^\n`]*\n(.*?)^[ \t]*\1[`~]*[ \t]*$", re.DOTALL | re.MULTILINE
)


class Code(RewardFunction):
    """Runs the response's program on test cases in a sandbox. A case is an input with its expected output, a function call or an assertion.

    The ground truth is a mapping or its JSON: `{"inputs": […], "outputs": […]}`, also with `fn_name` for calls, or `{"tests": "assert …"}`.
    A program that fails in any way does not pass. If the sandbox itself fails, the sample has no score.
    """

    name = "code"
    api = ">=1.0,<2"
    aliases = ("apps", "taco", "codecontests", "codeforces")
    capabilities = frozenset({"sandboxed"})
    Config = CodeConfig

    def __init__(self, config: CodeConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        if config.level == "subprocess" and config.service is None:
            context.logger.warning(
                "reward function 'code' runs programs at level=subprocess, which is weaker than namespaces: "
                f"a program {GUARANTEES['subprocess']}"
            )

    def compute_score(
        self,
        data_source: str | None,
        solution_str: str,
        ground_truth: GroundTruth,
        extra_info: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        """Return `score` and `passed_share` (the share of passed tests); if a test failed, also `first_failure` and `stderr`.

        Raises:
            ValueError: the ground truth holds no test cases, or tests that can't run in a separate process.
            SandboxError: the sandbox could not be started.
        """
        source = self._source(solution_str)
        tests = _first(parse_truth(ground_truth), self.config.max_tests)
        if self.config.tests != "in_process" and (why := only_in_process(tests)):
            raise ValueError(why)
        total = _count(tests)
        if source is None:
            return {
                "score": self.config.no_code_score,
                "passed_share": 0.0,
                "first_failure": "no code block",
            }
        cases = CaseRunner(self.config, runner_for(self.config)).run(source, tests)
        share = sum(case.passed for case in cases) / total
        found: dict[str, Any] = {"score": self._score(share), "passed_share": share}
        for number, case in enumerate(cases):
            if not case.passed:
                found["first_failure"] = f"test {number + 1} of {total}: {case.why}"
                found["stderr"] = case.stderr
                break
        return found

    @classmethod
    def check_row(cls, config: PluginConfig, ground_truth: GroundTruth) -> str | None:
        """Return the reason why this ground truth can't be scored, or None.

        Raises:
            SandboxError: the isolation level is not available on this machine.
        """
        runner_for(config)
        try:
            tests = parse_truth(ground_truth)
        except ValueError as error:
            return f"ground truth {ground_truth!r:.80} can't be scored: {error}"
        if not isinstance(tests, AssertTests) or config.tests == "in_process":
            return None
        if config.service:
            return "a sandbox service can't run assert tests outside the response's process; set tests=in_process"
        return only_in_process(_first(tests, config.max_tests))

    def _source(self, response: str) -> str | None:
        """Return the program in a response; None if there is none."""
        if self.config.extract == "whole":
            return response if response.strip() else None
        blocks = _FENCED.findall(response)
        return blocks[-1][1] if blocks and blocks[-1][1].strip() else None

    def _score(self, share: float) -> float:
        hit, miss = float(self.config.score), float(self.config.miss_score)
        if self.config.scoring == "share":
            return miss + (hit - miss) * share
        return hit if share == 1.0 else miss


def _count(tests: Tests) -> int:
    return len(tests.tests if hasattr(tests, "tests") else tests.inputs)


def _first(tests: Tests, most: int | None) -> Tests:
    """Return the first `most` tests; all if `most` is None."""
    if most is None:
        return tests
    parts = {
        name: getattr(tests, name)[:most]
        for name in ("inputs", "outputs", "tests")
        if hasattr(tests, name)
    }
    return attrs.evolve(tests, **parts)
