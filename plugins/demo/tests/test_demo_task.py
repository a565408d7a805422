"""The parts of the demo's task: problems, worked answers, the tokenizer."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from dovetail_demo.data import needs_carry, problems
from dovetail_demo.model import make_base
from dovetail_demo.warm_start import worked_answer


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_held_out_problems_are_never_trained_on(seed):
    train, held_out = problems(seed)
    seen = {tuple(sorted(pair)) for pair in train}
    assert len(held_out) == 256
    assert not seen & {tuple(sorted(pair)) for pair in held_out}


def test_an_answer_that_carries_is_right_and_one_that_does_not_is_wrong_where_a_carry_is_due():
    for a in range(100):
        for b in range(100):
            assert worked_answer(a, b, carries=True).split("#### ")[1] == str(a + b)
            careless = int(worked_answer(a, b, carries=False).split("#### ")[1])
            assert (careless == a + b) == (not needs_carry(a, b))


def test_the_tokenizer_comes_back_from_disk_as_it_was(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(str(make_base(tmp_path, 1)))
    text = "7+8=15 3+4+1=8 #### 85"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
