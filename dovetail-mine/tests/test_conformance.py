"""The conformance suite on Mine."""

from dovetail_sdk.testing.conformance import AdvantageConformance

from dovetail_mine.plugin import Mine


class TestMine(AdvantageConformance):
    plugin = Mine
