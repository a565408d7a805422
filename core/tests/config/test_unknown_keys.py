"""Unknown keys: what leads from them to the key that was meant, and that packages say of another system's."""

from __future__ import annotations


def test_a_key_of_an_installed_plugin_that_is_not_chosen_leads_to_its_name(problems):
    (problem,) = problems(None, "trainer.on_sync=abort")
    assert problem.endswith("unknown key; another plugin has this key: set trainer.name=streaming")


def test_a_key_that_a_plugin_of_a_file_lacks_does_not_lead_to_another_plugin(problems, tmp_path):
    (tmp_path / "loop.py").write_text(
        "from dovetail.interfaces import AgentLoop\n\n\nclass Loop(AgentLoop):\n    name = 'loop'\n    api = '>=1.0,<2'\n\n"
        "    async def run(self, session): ...\n"
    )
    loop = f"rollout.agent_loop={{path: {tmp_path}/loop.py, attribute: Loop}}"
    for key, fact in (("max_turns", "dovetail.sections.EpisodeSection"), ("tools", "unknown key")):
        (problem,) = problems(None, loop, f"rollout.agent_loop.{key}=3")
        assert fact in problem
        assert "tool_agent" not in problem
    (problem,) = problems(None, "rollout.agent_loop.tools=[calculator]")
    assert problem.endswith("set rollout.agent_loop.name=tool_agent")


def test_packages_say_what_a_key_of_another_system_is(problems, monkeypatch):
    def advise(key, value):
        return f"{key} of {value} is theirs" if key.startswith("theirs.") else None

    monkeypatch.setattr("dovetail.config.aliases._advisers", lambda _: (lambda *_: None, advise))
    found = problems({"theirs": {"one": 1, "more": {"two": 2}}}, "thers=3")
    assert [problem.partition("): ")[2] for problem in found][:2] == ["theirs.one of 1 is theirs", "theirs.more.two of 2 is theirs"]  # fmt: skip
    assert "unknown key" in found[2]


def test_a_misspelt_section_is_told_once_with_every_layer_that_gives_it(problems):
    (problem,) = problems(None, *(f"trainr.key_{number}=1" for number in range(5)))
    assert problem.startswith("trainr (override #1 'trainr.key_0=1', override #2 ")
    assert problem.endswith(", and 2 more): unknown key; did you mean trainer?")
