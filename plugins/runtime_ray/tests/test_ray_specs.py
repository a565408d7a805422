"""Objects that a process of another Python environment makes anew: they are as in the controller."""

from __future__ import annotations

from pathlib import Path

from dovetail.interfaces import PluginContext, PluginRef, WorkerSpec
from dovetail.sections import ModelSection
from dovetail_datasets import load_tokenizer
from dovetail_runtime_ray.specs import spec_received, spec_to_send
from dovetail_sdk.testing import tiny_model_and_tokenizer

TEMPLATE = """\
{%- for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}{% endif %}"""


def test_a_process_in_another_environment_renders_alike(tmp_path: Path) -> None:
    """The other process loads the tokenizer anew, since its transformers may have another version."""
    tiny_model_and_tokenizer(tmp_path)
    model = ModelSection(path=str(tmp_path), chat_template=TEMPLATE)
    tokenizer = load_tokenizer(model, chat_template_args={"enable_thinking": False})
    spec = WorkerSpec(
        role="actor",
        plugin=PluginRef(kind="engine", name="x", distribution="x"),
        context=PluginContext(tokenizer=tokenizer, model=model),
    )
    there = spec_received(spec_to_send(spec)).context.tokenizer
    assert there is not tokenizer
    ask, options = [{"role": "user", "content": "1+1"}], {"tokenize": False}
    text = there.apply_chat_template(ask, **options)
    assert text == tokenizer.apply_chat_template(ask, **options)
    assert text.endswith("<think></think>")
