"""Exercises with an instant check, used by the last cells of every notebook; how to write one: notebooks/README.md.

A check never raises: an unsolved exercise prints a hint and the notebook runs on. What each check said stays in
`results`, where the tests look: False for the blank, True for the hidden solution.
"""

from __future__ import annotations

from collections.abc import Callable

results: dict[str, bool] = {}


def check(name: str) -> Callable[[Callable[[], None]], bool]:
    """Decorates a function of assertions and runs it at once; the assertions' messages are the hints.

        @exercise.check("KV bytes of a token")
        def solved():
            assert answer == config.kv_bytes_per_token("float16"), "K and V, for every layer and every KV head"

    The decorated name becomes True or False. A blank is `...`, so any error that it causes means "not yet".
    """

    def run(test: Callable[[], None]) -> bool:
        hint = _first_complaint(test)
        results[name] = hint is None
        print(f"{name}: solved." if hint is None else f"{name}: not yet. {hint}")
        return results[name]

    return run


def _first_complaint(test: Callable[[], None]) -> str | None:
    try:
        test()
    except AssertionError as error:
        return str(error) or "One of the check's assertions does not hold."
    except Exception as error:  # a blank may fail in any way: an Ellipsis in a sum, a None without a shape
        return f"The check ended in {type(error).__name__}: {error}"
    return None
