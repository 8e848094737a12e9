"""Seeded, within its bounds, and Poisson where it says so."""

from __future__ import annotations

import numpy as np
import pytest

from neo_lite.config import NeoLiteError
from neo_lite.workload import random_prompt, synthetic


def test_lengths_arrivals_and_seed():
    a = synthetic(2000, 1000, 200, rate_per_s=4.0, seed=3)
    assert a == synthetic(2000, 1000, 200, rate_per_s=4.0, seed=3) != synthetic(2000, 1000, 200, rate_per_s=4.0, seed=4)
    assert {900, 1100} == {min(x.prompt_tokens for x in a), max(x.prompt_tokens for x in a)}
    assert {180, 220} == {min(x.output_tokens for x in a), max(x.output_tokens for x in a)}
    gaps = np.diff([x.time_s for x in a])
    assert gaps.mean() == pytest.approx(0.25, rel=0.1) and gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.1)


def test_all_at_once_by_default():
    assert {x.time_s for x in synthetic(5, 10, 10)} == {0.0}


def test_tiny_lengths_stay_positive():
    assert all(x.prompt_tokens >= 1 and x.output_tokens >= 1 for x in synthetic(50, 1, 1, spread=0.9))


def test_prompts_are_of_the_length_and_in_the_vocabulary():
    prompt = random_prompt(synthetic(1, 40, 1)[0], vocab_size=50, seed=1)
    assert prompt == random_prompt(synthetic(1, 40, 1)[0], vocab_size=50, seed=1)
    assert min(prompt) >= 3 and max(prompt) < 50


def test_a_workload_of_nothing_is_refused():
    with pytest.raises(NeoLiteError, match="count is 0"):
        synthetic(0, 10, 10)
