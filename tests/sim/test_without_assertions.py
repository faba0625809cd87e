"""`python -O` removes assertions and nothing else: the same simulation ends in the same state."""

from tests.sim.command import finish, start

RUN = ("--seed", "11", "--steps", "1000", "--layout", "all", "--faults", "0.05", "--workload", "mix")


def test_a_simulation_without_assertions_is_the_same_simulation() -> None:
    plain, optimised = (start(*RUN, optimised=optimised) for optimised in (False, True))
    (status, summary), (status_without, summary_without) = finish(plain), finish(optimised)
    assert (status, status_without) == (0, 0), (summary, summary_without)
    assert summary["steps"] == 1000 and summary["turns"] > 50 and summary["faults"] > 5
    assert summary == summary_without
