"""A method is compared with its interface by the calls that the interface allows."""

from __future__ import annotations

import pytest

from dovetail.interfaces import SampleFilter
from dovetail_sdk.check.signatures import differences


class Interface:
    """What callers rely on."""

    def judge(self, text: str, truth: str = "", *, strict: bool, limit: int = 3) -> float:
        """Judge a text."""


Interface.__module__ = SampleFilter.__module__


def of(judge) -> list[str]:
    cls = type("Mine", (Interface,), {"judge": judge})
    return [difference.text for difference in differences(cls, Interface)]


def grown(self, text, truth="", *, strict, limit=3, more=None):
    pass


def older(self, text, truth="", *, strict):
    pass


def anything(self, *args, **kwargs):
    pass


def renamed(self, answer, truth="", *, strict):
    pass


def shorter(self, text, *, strict):
    pass


def without_default(self, text, truth, *, strict):
    pass


def without_keyword(self, text, truth=""):
    pass


def demanding(self, text, truth="", *, strict, more):
    pass


async def asynchronous(self, text, truth="", *, strict):
    pass


@pytest.mark.parametrize("judge", [grown, older, anything])
def test_a_method_that_takes_every_call_is_no_difference(judge):
    assert of(judge) == []


@pytest.mark.parametrize(
    ("judge", "words"),
    [
        (renamed, "(text=…, truth=…, strict=…): missing"),
        (shorter, "(text, truth, strict=…): too"),
        (without_default, "(text, strict=…): missing"),
        (without_keyword, "unexpected keyword argument 'strict'"),
        (demanding, "a required argument: 'more'"),
        (asynchronous, "is async"),
    ],
)
def test_a_call_that_the_interface_allows_and_the_method_does_not_is_named(judge, words):
    [text] = of(judge)
    assert text.startswith("Mine.judge ")
    assert words in text
