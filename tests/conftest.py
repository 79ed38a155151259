"""Hypothesis for all tests: no deadlines on shared machines, and a bounded search for the smallest failure."""

from hypothesis import Phase, settings

settings.register_profile(
    "fullhit", deadline=None, print_blob=True, phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
)
settings.register_profile("fuzz", settings.get_profile("fullhit"), max_examples=20_000)  # `make fuzz`
settings.load_profile("fullhit")
