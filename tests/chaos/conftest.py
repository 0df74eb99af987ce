"""What the tests on real processes share."""

from tests.integration.conftest import models, new_home

__all__ = ["models", "new_home"]
