"""The tests of a whole project."""

import isthmus.features.feast  # noqa: F401 - before `import feast` in a test: it takes half the time this way
