"""Hypothesis for all tests: no deadlines on shared machines, and a bounded search for the smallest failure."""

from hypothesis import Phase, settings

settings.register_profile(
    "fullhit", deadline=None, print_blob=True, phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
)
settings.load_profile("fullhit")
