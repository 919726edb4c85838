"""Hypothesis profiles, chosen by the environment variable HYPOTHESIS_PROFILE: `dev` (default), `ci` or `soak`."""

import os

from hypothesis import HealthCheck, settings

pytest_plugins = ["txnbuffer.testing", "spark_session"]

settings.register_profile("dev", max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), max_examples=300)
settings.register_profile("soak", settings.get_profile("dev"), max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
